"""Loads models of ``transformers``: fills an empty model from the file, or lets the library make it from a state dict.

The class of the model is found without running code from the folder.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import torch

from tensorizer._format.dtypes import (
    CASTABLE,
    known_dtype,
    meant_dtype,
    named_dtype,
    torch_dtype,
)
from tensorizer._io.model_files import is_quantised_by_torchao
from tensorizer._io.uri import local_path
from tensorizer._load.compare import LoadReport, ModuleView, shown
from tensorizer._load.modules import Fill, FillOptions
from tensorizer._load.open_file import OpenFile
from tensorizer._system.devices import one_device
from tensorizer._system.patches import NothingToInitialise, no_init_or_tensor
from tensorizer.errors import UnsupportedContentError
from tensorizer.integrations._hf.folders import LoadOptions, ModelFolder, Weights, find_weights

logger = logging.getLogger("tensorizer.integrations.huggingface")

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
# Keywords for the constructor, and those that need no help of the library. With any other keyword, the library loads.
_OF_CONSTRUCTION = {"attn_implementation", "experts_implementation", "max_memory", "ignore_mismatched_sizes"}
_BALANCED = ("auto", "balanced", "balanced_low_0")


def load_model(cls: Any, folder: ModelFolder, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    """A model in evaluation mode, and the loading information that the library would return."""
    if options.old_name_of_dtype:
        from transformers.utils import logging as library_logging

        library_logging.get_logger("transformers").warning_once("`torch_dtype` is deprecated! Use `dtype` instead!")
    config, keywords = find_config(cls, folder, options)
    builder = model_class_of(cls, config, folder)
    weights = find_weights(folder, "model", options)
    own_file = None
    if is_quantised_by_torchao(config):
        own_file = own_file_of_library(weights)
    model: Any = None
    if _may_be_filled(config, options, keywords):
        model, info = _filled(builder, config, weights, options, keywords)
    if model is None:
        model, info = _by_library(builder, config, weights, options, keywords, own_file)
    if hasattr(model, "can_generate") and model.can_generate() and folder.read_json(_GENERATION) is not None:
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder.fetch(_GENERATION))
    model.config.name_or_path = model.name_or_path = folder.label
    return model.eval(), info


def _may_be_filled(config: Any, options: LoadOptions, keywords: dict[str, Any]) -> bool:
    quantised = options.quantization_config is not None or getattr(config, "quantization_config", None) is not None
    return not quantised and not isinstance(options.dtype, dict) and not set(keywords) - _OF_CONSTRUCTION


def _filled(
    builder: Any, config: Any, weights: Weights, options: LoadOptions, keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Builds an empty model and fills it from the file; ``None`` if only the library can load it."""
    config = copy.deepcopy(config)
    dtype = _dtype_of(config, weights, options)
    chosen = {name: keywords[name] for name in ("attn_implementation", "experts_implementation") if name in keywords}
    with empty_on(torch.device("cpu") if options.device_map is not None else options.device):
        make = builder._from_config if hasattr(builder, "_from_config") else builder.from_config
        model = make(config, dtype=dtype, **chosen)
    devices: Any = options.device
    if options.device_map is not None:
        devices = resolve_device_map(model, options.device_map, keywords.get("max_memory"), dtype)
        if "disk" in devices.values():  # only the library can do that
            return None, {}
    if not fill_empty(model, weights, devices):
        return None, {}
    compute_tables(model)
    if options.device_map is not None:
        _dispatch(model, devices)
    return model, _nothing_wrong()


def compute_tables(model: Any) -> None:
    """Computes the buffers that files do not hold, in the same way as the library.

    Constructors run under the dtype of the model, in which some tables are inexact. So ``from_pretrained`` of version 5
    computes them again, in ``_init_weights`` under torch's default dtype; tensors with a mark are left unchanged.
    """
    if not hasattr(model, "named_non_persistent_buffers"):  # version 4 keeps the buffers of the constructor
        return
    tables = dict(model.named_non_persistent_buffers(remove_duplicate=False))
    if not tables:
        return
    parts = [name.split(".") for name in tables]
    around = {".".join(names[:count]) for names in parts for count in range(len(names))}
    for name, module in model.named_modules():
        module._is_hf_initialized = name not in around
    computed = set(map(id, tables.values()))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = id(tensor) not in computed
    model.initialize_weights()


def _dtype_of(config: Any, weights: Weights, options: LoadOptions) -> torch.dtype:
    """The dtype that the library would choose: "auto" is the dtype of the configuration, else of the weights."""
    dtype = options.dtype
    if dtype is None:
        return torch.get_default_dtype()
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        if dtype is None:
            dtype = dtype_of_file(weights)
    return one_dtype(dtype, f"{weights.folder.label}: {_CONFIG}: " if options.dtype == "auto" else "")


def asked_dtype(dtype: Any) -> Any:
    """Converts the caller's argument: ``None``, ``"auto"``, a dtype, or a mapping from parts of a model to dtypes.

    Raises:
        ValueError: As :func:`one_dtype`.
    """
    if dtype is None or dtype == "auto":
        return dtype
    if isinstance(dtype, Mapping):
        return {part: asked_dtype(value) for part, value in dtype.items()}
    return one_dtype(dtype)


def one_dtype(dtype: Any, place: str = "") -> torch.dtype:
    """A floating-point dtype, also from its name.

    Raises:
        ValueError: It is something else. The message begins with `place` and suggests a dtype.
    """
    found = named_dtype(dtype) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    near = meant_dtype(dtype)
    hint = f"; did you mean {str(near).removeprefix('torch.')!r}?" if near is not None and near != found else ""
    raise ValueError(
        f"{place}dtype: expected a torch.dtype of floating point, its name or 'auto', got {dtype!r:.200}{hint}"
    )


def dtype_of_file(weights: Weights) -> torch.dtype:
    """The dtype of the first tensor of floating-point numbers in the file."""
    if weights.pickled:
        stored = [tensor.dtype for tensor in weights.state_dict().values()]
    else:
        with weights.open() as file:
            stored = [torch_dtype(file.entry(i).dtype) for i in file.selection]
    return next((one for one in stored if one.is_floating_point), torch.get_default_dtype())


def _nothing_wrong() -> dict[str, Any]:
    """``output_loading_info`` of a load that fits, in the types of the installed release."""
    import transformers

    empty: Any = set if int(transformers.__version__.split(".")[0]) >= 5 else list
    return {"missing_keys": empty(), "unexpected_keys": empty(), "mismatched_keys": empty(), "error_msgs": []}


def own_file_of_library(weights: Weights) -> Path:
    """The local file or index for weights that the library must read itself, because file headers hold their layout.

    Raises:
        UnsupportedContentError: The weights are not local or have another format, or are to be checked or decrypted.
    """
    options, folder = weights.options, weights.folder
    path = None if weights.pickled else local_path(weights.source)
    asked = options.verify.reads or options.call.encryption is not None or options.call.trust.required
    usual = re.fullmatch(r"model(\.[\w.-]+)?\.safetensors(\.index(\.[\w.-]+)?\.json)?", os.path.basename(path or ""))
    if usual and not asked:
        return Path(str(path))
    raise UnsupportedContentError(
        f"{folder.label}: quantised by torchao, so the library has to read model.safetensors of a local folder itself, "
        f"without verify=, encryption=, public_key= and require_authenticated=; got {weights.label}"
    )


def _by_library(
    builder: Any,
    config: Any,
    weights: Weights,
    options: LoadOptions,
    keywords: dict[str, Any],
    own_file: Optional[Path] = None,
) -> tuple[Any, dict[str, Any]]:
    """Lets the library load a state dict or its own file: it renames, converts, quantises and places the tensors."""
    builder = _concrete(builder, config)
    device_map = options.device_map
    if device_map is None and options.device.type != "cpu":
        device_map = {"": options.device}
    passed = {
        "dtype": options.dtype,
        "device_map": device_map,
        "quantization_config": options.quantization_config,
        **keywords,
    }
    passed = {name: value for name, value in passed.items() if value is not None}
    if own_file is None:
        passed["state_dict"] = _under_names_of_files(weights.state_dict(), config, weights.folder)
    else:
        passed.update(use_safetensors=True, local_files_only=True, variant=options.variant)
    source = None if own_file is None else str(own_file.parent)
    model, info = builder.from_pretrained(source, config=config, output_loading_info=True, **passed)
    if options.strict:
        _check(model, info, weights)
    return model, info


def _under_names_of_files(state: dict[str, torch.Tensor], config: Any, folder: ModelFolder) -> dict[str, torch.Tensor]:
    """The state dict under the names of the library's own ``save_pretrained``, if it has those of the model.

    From version 5 on, the names in some models differ from those in their files. The library renames all tensors that
    it loads, and spoils names that are right already (Qwen2-VL, A.X-K1).
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return state
    import transformers

    values = folder.read_json(_CONFIG) or {}
    names = values.get("architectures") or getattr(config, "architectures", None) or [None]
    made: Any = getattr(transformers, str(names[0]), None)
    if not hasattr(made, "_from_config") or not isinstance(config, made.config_class):
        return state
    with torch.device("meta"):
        model = made._from_config(copy.deepcopy(config))
    if not state.keys() <= model.state_dict().keys():
        return state
    return dict(revert_weight_conversion(model, state))


def _check(model: Any, info: dict[str, Any], weights: Weights) -> None:
    report = LoadReport(
        module=type(model).__name__,
        source=weights.label,
        missing=tuple(sorted(info.get("missing_keys", ()))),
        unexpected=tuple(sorted(info.get("unexpected_keys", ()))),
    )
    if not report.ok:
        error = report.error((), strict=True)
        error.args = (f"{error} (strict=False takes the model as it is)",)
        raise error


def _concrete(builder: Any, config: Any) -> Any:
    """The model class that an ``AutoModel...`` class selects, because the latter takes no state dict without a name."""
    if hasattr(builder, "_from_config"):
        return builder
    with torch.device("meta"):
        return type(builder.from_config(copy.deepcopy(config)))


def find_config(cls: Any, folder: ModelFolder, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the keywords that are not its members.

    Args:
        cls: The requested class, or ``None``.
        folder: The folder.
        options: If it has a ``config``, that is used. ``model_kwargs`` that name members override them.

    Raises:
        ValueError: The configuration belongs to code in the repository.
        FileNotFoundError: There is no ``config.json``.
    """
    from transformers import AutoConfig

    keywords = dict(options.model_kwargs)
    if options.config is not None:
        config = copy.deepcopy(options.config)
        for name in [name for name in keywords if hasattr(config, name)]:
            if name != "attn_implementation":
                setattr(config, name, keywords.pop(name))
        return config, keywords
    values = folder.read_json(_CONFIG)
    if values is None:
        raise FileNotFoundError(f"{folder.label}: expected {_CONFIG} in it")
    for member, kind in (("model_type", str), ("architectures", list), ("auto_map", dict)):
        found = values.get(member)
        if not isinstance(found, (kind, type(None))):
            raise ValueError(f"{folder.label}: {_CONFIG}: expected a {kind.__name__} as {member}, got {found!r:.200}")
    own = getattr(cls, "config_class", None)
    if own is None and "auto_map" in values and not _is_native(values):
        raise ValueError(
            f"{folder.label}: its classes are code in the repository ({values['auto_map']}), which is never run; "
            "import the class yourself and pass it as model_class="
        )
    source = own or AutoConfig
    files = folder.fetch(_CONFIG)
    if hasattr(source, "for_model"):  # AutoConfig would ask on the terminal; other classes would keep it as a member
        keywords["trust_remote_code"] = False
    config, rest = source.from_pretrained(files, return_unused_kwargs=True, **keywords)
    return config, rest


def _is_native(values: dict[str, Any]) -> bool:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    named = values.get("architectures") or []
    return values.get("model_type") in CONFIG_MAPPING and (not named or hasattr(transformers, str(named[0])))


def model_class_of(cls: Any, config: Any, folder: ModelFolder) -> Any:
    """The class, or ``AutoModel...`` class, that builds the model.

    Raises:
        ValueError: The configuration names no class of the library; the message says how to name one.
    """
    import transformers

    if cls is not None:
        return cls
    names = list(map(str, getattr(config, "architectures", None) or []))
    for name in names:
        found = getattr(transformers, name, None)
        if hasattr(found, "_from_config") or hasattr(found, "from_config"):
            return found
    named = ", ".join(names)
    lacks = f"{named}, which transformers {transformers.__version__} does not have" if named else "no class"
    raise ValueError(f"{folder.label}: its configuration names {lacks}; pass the class as model_class=")


@contextlib.contextmanager
def empty_on(device: torch.device) -> Iterator[None]:
    """A block in which models get their computed buffers on `device` and parameters without memory."""
    with torch.device(device), no_init_or_tensor(), NothingToInitialise():
        yield


def fill_empty(model: torch.nn.Module, weights: Weights, device: Any) -> bool:
    """Fills an empty model if the file has exactly its tensors.

    Args:
        model: The model, whose tensors are replaced. It stays unchanged if the result is ``False``.
        weights: The file.
        device: A device, or a mapping from prefixes of names to devices.

    Returns:
        Whether the model was filled. It is not if names, shapes or kinds differ, if modules load their state dict in
        their own way, or if the class would leave computed buffers without data.

    Raises:
        FormatError, HashMismatchError, CryptographyError, OSError: The file is damaged or cannot be read.
    """
    if weights.pickled:
        return False
    view = ModuleView(model)
    wanted = _wanted_dtypes(view)
    main = _most_common(wanted.values())
    with weights.open(device, main) as file:
        stored = file.flat_names()
        fill = Fill(view, file, stored, FillOptions(ties="equal"), strict=True)
        if fill.hands_over or not fill.report.ok or not _kinds_fit(file, stored, wanted):
            return False
        if fill.left_on_meta:
            logger.debug("%s: %s has no data; the library loads it", weights.label, ", ".join(fill.left_on_meta[:5]))
            return False
        if not {wanted[name] for name in stored} & (CASTABLE - {main}):
            fill.run()
            return True
    tensors: dict[str, torch.Tensor] = {}
    for dtype in dict.fromkeys(wanted.values()):
        chosen = {name for name, other in wanted.items() if other == dtype}

        def accepts(stored_name: Any, chosen: Collection[str] = chosen) -> bool:
            return shown(str(stored_name)) in chosen

        with weights.open(device, dtype if dtype in CASTABLE else None, accepts) as part:
            entries = part.flat_names()
            tensors.update(zip(entries, part.load(list(entries.values()))))
            part.check_files()
    fill.put(tensors)
    return True


def _wanted_dtypes(view: ModuleView) -> dict[str, torch.dtype]:
    """The dtype of each tensor: the dtype in the empty model, or float32 if the class requires it."""
    plain = set(kept_in_float32(view.module))
    strict = set(getattr(view.module, "_keep_in_fp32_modules_strict", None) or ())
    found = {name: slot.tensor.dtype for name, slot in view.slots.items() if slot.tensor is not None}
    for half, patterns in ((torch.float16, plain | strict), (torch.bfloat16, strict)):
        if patterns and half in found.values():
            keeps = re.compile(rf"(^|\.)({'|'.join(map(re.escape, patterns))})($|\.)").search
            coarse = [n for n, dtype in found.items() if dtype == half or not dtype.is_floating_point]  # also counters
            found.update({n: torch.float32 for n in coarse if keeps(n)})
    return found


def kept_in_float32(model: Any) -> list[str]:
    """Words in the names of modules that a model or its class keeps in float32, whatever the dtype of the model."""
    kept = getattr(model, "_keep_in_fp32_modules", None) or []
    return [kept] if isinstance(kept, str) else list(kept)


def _most_common(dtypes: Iterable[torch.dtype]) -> Optional[torch.dtype]:
    counted = collections.Counter(dtype for dtype in dtypes if dtype in CASTABLE)
    return counted.most_common(1)[0][0] if counted else None


def _kinds_fit(file: OpenFile, stored: Mapping[str, int], wanted: Mapping[str, torch.dtype]) -> bool:
    """Whether the stored tensors have the dtypes of the model, or the engine can convert them."""
    pairs = {(file.index.dtype(i), wanted[name]) for name, i in stored.items() if name in wanted}
    kinds = [(known_dtype(dtype), target) for dtype, target in pairs]
    # The engine converts only between dtypes of floating-point numbers.
    return all(found == target or {found, target} <= CASTABLE for found, target in kinds)


def check_device_map(device_map: Any) -> None:
    """Raises ``RuntimeError`` for a device map that names CUDA on a machine without it, before anything is read."""
    devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    for device in devices:
        if isinstance(device, (int, torch.device)) or (isinstance(device, str) and device.startswith("cuda")):
            one_device(device)


def resolve_device_map(
    model: Any, device_map: Any, max_memory: Optional[dict[Any, Any]], dtype: torch.dtype
) -> dict[str, Any]:
    """Maps names of modules to devices, as the library would for an empty model.

    Args:
        model: A model with parameters on the meta device.
        device_map: A mapping, a device, or ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``.
        max_memory: Bytes, or texts like ``"1GB"``, by device.
        dtype: The dtype of the parameters.

    Raises:
        ValueError: `device_map` is another word.
        ImportError: ``accelerate`` is not installed.
    """
    if isinstance(device_map, (torch.device, int)):
        return {"": device_map}
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in (*_BALANCED, "sequential"):
        try:
            return {"": torch.device(device_map)}
        except RuntimeError:
            wanted = ", ".join((*_BALANCED, "sequential"))
            raise ValueError(f"device_map: expected {wanted}, a device or a mapping, got {device_map!r}") from None
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, get_max_memory

    whole = list(getattr(model, "_no_split_modules", None) or ())
    limits: Any = max_memory
    if device_map in _BALANCED:
        limits = get_balanced_memory(model, max_memory, whole, dtype=dtype, low_zero=device_map == "balanced_low_0")
    limits = get_max_memory(limits)
    return dict(infer_auto_device_map(model, limits, whole, dtype=dtype))


def _dispatch(model: Any, device_map: dict[str, Any]) -> None:
    """Adds the hooks of accelerate if there are several devices, and moves buffers to the devices of their modules."""
    devices = {torch.device(f"cuda:{folder}" if isinstance(folder, int) else folder) for folder in device_map.values()}
    if len(devices) == 1:
        model.to(devices.pop())  # moves the buffers; the parameters are there already
        return
    from accelerate import dispatch_model

    dispatch_model(model, device_map=device_map)


def is_of(package: str, obj: Any) -> bool:
    """Whether an object or class is of a package, or derives from a class of it."""
    kind = obj if isinstance(obj, type) else type(obj)
    return any(base.__module__.partition(".")[0] == package for base in kind.__mro__)

"""Loads models and pipelines of ``diffusers``, and adapters."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import torch

from tensorizer._format.dtypes import CASTABLE
from tensorizer._io.model_files import is_quantised_by_torchao
from tensorizer._io.sources import json_content
from tensorizer._system.redaction import shown_location
from tensorizer.errors import LoadError, UnsupportedContentError
from tensorizer.integrations._hf import models
from tensorizer.integrations._hf.folders import LoadOptions, ModelFolder, Weights, find_weights

ADAPTER = "adapter_config.json"
PIPELINE = "model_index.json"
_DIFFUSERS_STEM = "diffusion_pytorch_model"
_LORA_STEM = "pytorch_lora_weights"
_WRAPPER = "base_model.model."
_DENOISERS = ("unet", "transformer")


def load_diffusers_model(cls: Any, folder: ModelFolder, options: LoadOptions) -> Any:
    """One model of ``diffusers``, in evaluation mode."""
    import diffusers

    _only_on_one_device(options)
    if isinstance(options.dtype, dict):
        raise ValueError(f"{folder.label}: dtype: expected one for a model of diffusers, got a mapping")
    values = folder.read_json("config.json")
    if values is None:
        raise FileNotFoundError(f"{folder.label}: expected config.json in it")
    if is_quantised_by_torchao(values):
        raise UnsupportedContentError(
            f"{folder.label}: quantised by torchao, whose layout of tensors only diffusers knows: load it with the "
            "library's own from_pretrained"
        )
    if cls is None:
        name = values.get("_class_name")
        cls = getattr(diffusers, str(name), None)
        if not hasattr(cls, "from_config"):
            raise ValueError(f"{folder.label}: diffusers has no class {name!s:.200}; pass it as model_class=")
    weights = find_weights(folder, _DIFFUSERS_STEM, options)
    config = cls.load_config(folder.fetch("config.json"))
    dtype: Any = models.dtype_of_file(weights) if options.dtype == "auto" else options.dtype
    with models.empty_on(torch.device("cpu")), _default_dtype(dtype):  # the library computes tables on the CPU
        model = cls.from_config(config)
    _set_dtype(model, dtype)
    if not models.fill_empty(model, weights, options.device):
        model = _from_state_dict(cls, config, weights, options, dtype)
    model.register_to_config(_name_or_path=folder.label)
    return model.to(options.device).eval()


def _only_on_one_device(options: LoadOptions) -> None:
    if options.device_map is not None:
        raise ValueError("device_map: models of diffusers are loaded to one device: pass device=")


@contextlib.contextmanager
def _default_dtype(dtype: Optional[torch.dtype]) -> Iterator[None]:
    """A block with this default dtype, in which the library builds models and computes their tables."""
    before = torch.get_default_dtype()
    try:
        if dtype in CASTABLE:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


def _set_dtype(model: Any, dtype: Optional[torch.dtype]) -> None:
    """Converts the tensors of a file to the requested dtype, except those of parts that the class keeps in float32."""
    if dtype is None:
        return
    kept = set(models.kept_in_float32(model))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept & set(name.split(".")) else dtype)


def _from_state_dict(
    cls: Any, config: Any, weights: Weights, options: LoadOptions, dtype: Optional[torch.dtype]
) -> Any:
    """A model that its class initialises, filled with the tensors of the file."""
    with _default_dtype(dtype):
        model = cls.from_config(config)
    _set_dtype(model, dtype)
    try:
        result = model.load_state_dict(weights.state_dict(), strict=False)
    except RuntimeError as error:  # shapes differ
        raise LoadError(f"{weights.label}: {error}") from error
    left = [*result.missing_keys, *result.unexpected_keys]
    if options.strict and left:
        raise LoadError(
            f"{weights.label}: missing from it or unexpected in it: {', '.join(left[:20])}. If early releases of "
            "diffusers wrote the file under other names, load it with the library and save it again"
        )
    return model


def load_pipeline(cls: Any, folder: ModelFolder, options: LoadOptions) -> Any:
    """A pipeline with all its components."""
    import diffusers

    _only_on_one_device(options)
    components = folder.read_json(PIPELINE)
    files = folder.fetch_all(components)
    _refuse_code(folder.label, files, components, options.model_kwargs)
    loaded: dict[str, Any] = {}
    for name, entry in components.items():
        if name.startswith("_") or not isinstance(entry, list) or entry[:1] == [None]:
            continue
        if len(entry) != 2 or not all(isinstance(text, str) for text in entry):
            raise ValueError(f"{folder.label}: {PIPELINE}: expected library and class of {name!r}, got {entry!r:.200}")
        component = _load_component(
            entry, folder.below(name), dataclasses.replace(options, dtype=_dtype_of(name, options))
        )
        if component is not None:
            loaded[name] = component
    keywords = {**options.model_kwargs, **loaded}
    if options.old_name_of_dtype and options.dtype != "auto":
        keywords["torch_dtype"] = options.dtype  # some releases warn that this is deprecated
    pipeline = (cls or diffusers.DiffusionPipeline).from_pretrained(files, **keywords)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.to(options.device)
    return pipeline


def _refuse_code(label: str, files: Path, components: Mapping[str, Any], given: Collection[str] = ()) -> None:
    """Refuses a pipeline with classes that are not from libraries. For such a class, some releases of ``diffusers`` run
    a file of that name in the local folder, or import a module of that name.

    Args:
        label: Name of the folder, for messages.
        files: The local folder with its small files.
        components: The content of its index.
        given: Names of components that the caller has passed.
    """
    from diffusers import pipelines

    refused, reason = f"{label}: {PIPELINE}: its class", "is code that is not of the library, which is never run"
    # Some releases run such a file even without custom_pipeline.
    if isinstance(components.get("_class_name"), list) or (files / "None.py").exists():
        raise ValueError(f"{refused} {reason}")
    for name, entry in components.items():
        if name.startswith("_") or not isinstance(entry, list) or not isinstance(entry[0] if entry else None, str):
            continue
        library = entry[0]
        is_known = library in ("diffusers", "transformers", *sys.modules) or hasattr(pipelines, library)
        if not is_known or (name not in given and (files / name / f"{library}.py").exists()):
            raise ValueError(f"{refused} of {name!r:.200} {reason}; import {library!r:.200} and pass {name!r:.200}")
        if (files / name / PIPELINE).is_file():  # a pipeline inside the pipeline
            content = (files / name / PIPELINE).read_bytes()
            _refuse_code(f"{label}/{name}", files / name, json_content(f"{label}/{name}: {PIPELINE}", content))


def _dtype_of(component: str, options: LoadOptions) -> Any:
    """The dtype argument for pipelines of the library: one dtype, or one for each component and a default."""
    if not isinstance(options.dtype, dict):
        return options.dtype
    return options.dtype.get(component, options.dtype.get("default", torch.float32))


def _load_component(entry: Any, folder: ModelFolder, options: LoadOptions) -> Any:
    """Loads a component that has weights; ``None`` for components that the pipeline reads itself."""
    library, class_name = entry
    plain = dataclasses.replace(options, model_kwargs={}, config=None, old_name_of_dtype=False)
    found = getattr(_module_of(library), class_name, None)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        return None
    if models.is_of("transformers", found):  # a class of diffusers may derive from one of transformers
        return models.load_model(found, folder, plain)[0]
    return load_diffusers_model(found, folder, plain) if models.is_of("diffusers", found) else None


def _module_of(library: str) -> Any:
    """The module that the index of a pipeline names: a library, or the module of a pipeline in ``diffusers``."""
    with contextlib.suppress(ImportError):
        if library in ("diffusers", "transformers"):
            return __import__(library)
        from diffusers import pipelines

        return getattr(pipelines, library, None)
    return None


def stem_of(model: Any) -> str:
    """The file name, without suffix, that the library of a model uses for weights."""
    return _DIFFUSERS_STEM if hasattr(model, "save_config") else "model"


def load_with_base(cls: Any, folder: ModelFolder, options: LoadOptions, load: Callable[..., tuple[Any, Any]]) -> Any:
    """Loads an adapter together with the base model that its configuration names, by `load`.

    Without a class, or with a class of ``peft``, the result is a ``PeftModel``. With a class of ``transformers``, it is
    that model with the adapter in it.

    Raises:
        ValueError: The configuration names no base model.
    """
    values = folder.read_json(ADAPTER)
    named = values.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ValueError(f"{folder.label}: {ADAPTER} names no base model (base_model_name_or_path)")
    if cls is not None and not models.is_of("peft", cls):
        model, _ = load(named, cls, options.of_base_model())
        return load_adapter_into(model, folder, options, "default")
    from peft import get_peft_model

    model, _ = load(named, None, options.of_base_model())
    return _filled(get_peft_model(model, _config(folder), "default"), folder, options, "default")


def load_adapter_into(model: Any, folder: ModelFolder, options: LoadOptions, name: str) -> Any:
    """Puts an adapter into a model or pipeline, and returns that.

    Raises:
        LoadError: Tensors of the adapter are missing, or the model has no place for them.
    """
    if hasattr(model, "load_lora_weights"):
        model.load_lora_weights(_for_pipeline(model, folder, options), adapter_name=name)
        return model
    if models.is_of("peft", model):
        config = _config(folder)
        if name not in model.peft_config:
            model.add_adapter(name, config)
        return _filled(model, folder, options, name)
    if hasattr(model, "load_adapter"):
        state = find_weights(folder, "adapter_model", options).state_dict()
        model.load_adapter(peft_config=_config(folder), adapter_state_dict=state, adapter_name=name)
        return model.eval()
    raise TypeError(f"expected a model of transformers or peft or a pipeline of diffusers, got {type(model).__name__}")


def _config(folder: ModelFolder) -> Any:
    from peft import PeftConfig

    if not folder.has(ADAPTER):
        raise FileNotFoundError(f"{folder.label}: expected {ADAPTER}, got none")
    config = PeftConfig.from_pretrained(str(folder.fetch(ADAPTER)))
    config.inference_mode = True
    # The URI is shown with the model, so it must contain no secrets. It is no longer needed for loading.
    config.base_model_name_or_path = shown_location(config.base_model_name_or_path or "") or None
    return config


def _filled(model: Any, folder: ModelFolder, options: LoadOptions, name: str) -> Any:
    """Fills one adapter of a ``PeftModel`` with the tensors of a folder."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    weights = find_weights(folder, "adapter_model", options)
    state = weights.state_dict()
    wanted = set(get_peft_model_state_dict(model, adapter_name=name))
    missing, unexpected = sorted(wanted - set(state)), sorted(set(state) - wanted)
    if not (options.strict and missing):
        result = set_peft_model_state_dict(model, state, adapter_name=name)
        # load_state_dict lists learned prompts as unexpected; peft puts them into their encoder afterwards.
        unexpected = [key for key in getattr(result, "unexpected_keys", ()) if key not in wanted]
    if options.strict and (missing or unexpected):
        raise LoadError(
            f"{weights.label}: the adapter does not fit {type(model).__name__}: missing {missing[:10]}, "
            f"unexpected {unexpected[:10]}"
        )
    return model.eval()


def _for_pipeline(pipeline: Any, folder: ModelFolder, options: LoadOptions) -> Mapping[str, torch.Tensor]:
    """The tensors under the names that pipelines know: those of ``save_lora_weights``, or of one PEFT model."""
    try:
        return find_weights(folder, _LORA_STEM, options).state_dict()
    except FileNotFoundError:
        state = find_weights(folder, "adapter_model", options).state_dict()
    part = next((name for name in _DENOISERS if getattr(pipeline, name, None) is not None), _DENOISERS[0])
    return {f"{part}.{name.removeprefix(_WRAPPER)}": tensor for name, tensor in state.items()}

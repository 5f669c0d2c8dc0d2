"""Models, pipelines and adapters of the Hugging Face libraries, to and from folders, buckets and the hub.

:func:`save_pretrained` and :func:`from_pretrained` are one line each way. The functions below them are those of earlier
releases, for models, tokenizers and schedulers of ``transformers`` and ``diffusers``: a model is
``<folder>/<prefix>.tensors`` and ``<folder>/<prefix>-config.json``, and where it generates text
``generation_config.json`` (behind ``<prefix>-`` unless that is ``model``); a tokenizer or scheduler is
``<folder>/<prefix>.zip``. No library is imported before it is needed.
"""

from __future__ import annotations

import io
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch

from tensorizer import TensorDeserializer, TensorSerializer, stream_io
from tensorizer._load.device_choice import as_device
from tensorizer._system.redaction import shown_location
from tensorizer.signing import PublicKeyArgument
from tensorizer.utils import get_device, no_init_or_tensor

__all__ = [
    "from_pretrained",
    "load_adapter",
    "load_model",
    "load_pretrained",
    "save_pretrained",
    "serialize_model",
    "serialize_pretrained",
]

Folder = Union[str, "os.PathLike[str]"]
StreamOptions = Optional[Mapping[str, Any]]

logger = logging.getLogger(__name__)

_DEFAULT_PREFIX = "model"


def save_pretrained(
    obj: Any,
    folder: Folder,
    *,
    tokenizer: Any = None,
    metadata: Optional[Mapping[str, str]] = None,
    ties: str = "once",
    encryption: Any = None,
    max_shard_size: Union[str, int, None] = None,
    variant: Optional[str] = None,
    names: str = "model",
    stream_options: StreamOptions = None,
) -> None:
    """Write an object as its library's ``save_pretrained`` would, with the weights in ``.tensors`` files.

    The configuration, the generation configuration and the tokenizer lie beside them, so that ``AutoConfig`` and
    ``AutoTokenizer`` open the folder; :func:`from_pretrained` opens all of it. A local file takes its name when it is
    complete, the weights first; shards and the single file of an earlier save under the same name are removed. In a
    bucket the one that readers would try is; shards that no index names stay.

    Args:
        obj: A model of ``transformers`` or ``diffusers``, a ``PeftModel`` (only its adapters), a pipeline, or a
            ``SentenceTransformer``.
        folder: A local folder, made where missing, or an ``s3://`` prefix.
        tokenizer: Anything else with ``save_pretrained(folder)`` that belongs to it: a tokenizer or processor.
        metadata: Texts to store in the files of weights, beside the ones that say what wrote them.
        ties: Names that share one tensor are stored ``"once"``, the others recorded, or ``"twice"``.
        encryption: Encrypts the weights (:class:`tensorizer.EncryptionParams`); configurations stay in clear.
        max_shard_size: Bytes, or a text like ``"5GB"``: writes several files and an index. Default: one file.
        variant: A word in the names of the files of weights, as in ``model.fp16.tensors``.
        names: ``"model"`` stores tensors under the names of ``state_dict()``, which load without a detour where the
            library has the same ones. ``"library"`` stores those of transformers' own files, for other releases of it:
            version 5 keeps experts fused, and names some models' parts differently than version 4. The library then
            writes a temporary file first. ``metadata`` is not stored with it.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`, such as ``s3_endpoint``.

    Raises:
        TypeError: An object of another kind.
        ValueError: Tensors without data, on the meta device or offloaded; another word for `names`.
        UnsupportedContentError: What is quantised by ``torchao``, whose layout is not in its tensors.
        OSError: The folder cannot be written.
    """
    from tensorizer.integrations._hf.saving import SaveOptions, save_object

    if names not in ("model", "library"):
        raise ValueError(f"names: wanted 'model' or 'library', found {names!r}")
    options = SaveOptions(dict(metadata or {}), ties, encryption, max_shard_size, variant, names, stream_options)
    save_object(obj, folder, tokenizer, options)


def from_pretrained(
    cls: Any,
    source: Folder,
    *,
    revision: Optional[str] = None,
    subfolder: str = "",
    variant: Optional[str] = None,
    dtype: Union[torch.dtype, str, None] = "auto",
    device: Union[torch.device, str, None] = None,
    device_map: Any = None,
    quantization_config: Any = None,
    config: Any = None,
    model_class: Any = None,
    strict: bool = True,
    verify: bool = False,
    encryption: Any = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
    cache: bool = True,
    local_files_only: bool = False,
    token: Any = None,
    allow_pickle: bool = False,
    allow_plaintext_temp: bool = False,
    mmap: Optional[bool] = None,
    output_loading_info: bool = False,
    stream_options: StreamOptions = None,
    **model_kwargs: Any,
) -> Any:
    """Load a model, pipeline or adapter from the weights that are there: ``.tensors``, ``.safetensors`` or ``.bin``.

    What comes back is what the library's own ``from_pretrained`` gives: in evaluation mode, tied, with its generation
    configuration. Tensors go straight to the device where names and shapes of the file are those of the model; where
    the library has to rename, convert or quantise, it gets a state dict; where it reads files alone, a temporary one
    (docs/huggingface.md says which is which).

    Args:
        cls: The class, an ``AutoModel...``, or ``None``: the one that the configuration names.
        source: A local folder, an ``s3://`` or ``https://`` prefix, ``hf://org/name[@revision]``, or a hub id.
        revision: Branch, tag or commit of a hub repository; resolved once, all files are of that commit.
        subfolder: Folder inside of `source`.
        variant: A word in the names of the files of weights.
        dtype: A dtype or its name; ``"auto"`` is that of the configuration, else of the weights; ``None`` is torch's
            default dtype. Parts that the class keeps in ``float32`` stay so.
        device: Where the model goes; the CPU by default, as with the libraries.
        device_map: As the library takes it; needs ``accelerate``.
        quantization_config: Quantises while loading, by the library.
        config: A configuration instead of the one of the folder.
        model_class: The class of a model whose code is not in the library; code of a repository is never run.
        strict: Raises where tensors are missing or unexpected. ``False`` leaves that to the library, which initialises
            what is missing: from a base model to one with a head and back.
        verify: Compares the data with the stored digests; ``.safetensors`` files hold none and are refused.
        encryption: The key of encrypted weights (:class:`tensorizer.DecryptionParams`).
        public_key: Who has to have signed the weights, as for :class:`tensorizer.TensorDeserializer`; configurations
            are not covered.
        require_authenticated: Whether the key or a signature has to vouch for the weights, likewise.
        cache: ``False`` reads a hub repository over HTTPS instead of through the cache.
        local_files_only: Asks nothing of the hub; so does ``HF_HUB_OFFLINE``.
        token: For the hub, as ``huggingface_hub`` takes it; it is sent only to the hub's host.
        allow_pickle: Reads ``.bin`` files where there is nothing else, by ``torch.load(weights_only=True)``.
        allow_plaintext_temp: Lets encrypted weights be decrypted to a private temporary file, where the library reads
            nothing else.
        mmap: ``True`` makes the tensors copy-on-write views of local, unencrypted weights: the model is there at once,
            and its pages are read when they are first used. A program that writes into the file changes the model, and
            one that cuts the file short ends the process; a file that is replaced changes nothing. ``None`` does so
            on the CPU, as the libraries do, where no tensor is converted, `verify` is not asked for, and the file is
            not on a network file system. ``False`` reads the file.
        output_loading_info: Gives ``(model, info)``, with the information of the library.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`, such as ``s3_endpoint``.
        **model_kwargs: What else the library's ``from_pretrained`` takes; members of the configuration override it.

    Raises:
        FileNotFoundError: No such folder, repository or revision, or no weights in it.
        LoadError: With `strict`, tensors are missing or unexpected.
        ValueError: No class is named or known, or its code is in the repository; ``trust_remote_code=True``; weights
            that only `allow_pickle` or `allow_plaintext_temp` would load; `mmap` with another device than the CPU or a
            device map, or of what is encrypted, pickled or not local; ``output_loading_info`` of something that has
            none.
        VerificationError, CryptographyError, FormatError, OSError: The files, as for
            :class:`tensorizer.TensorDeserializer`.
    """
    if model_kwargs.pop("trust_remote_code", False):
        raise ValueError(
            "trust_remote_code: code of a repository is never run; import the class and pass it as model_class="
        )
    from tensorizer.integrations._hf.loading import load_object
    from tensorizer.integrations._hf.opening import open_place
    from tensorizer.integrations._hf.options import LoadOptions

    if mmap and (device_map is not None or as_device(device).type != "cpu"):
        raise ValueError("mmap: views of a file are on the CPU; wanted no device= and no device_map=")
    options = LoadOptions(
        dtype=dtype,
        device=device,
        device_map=device_map,
        quantization_config=quantization_config,
        config=config,
        model_class=model_class,
        strict=strict,
        verify=verify,
        encryption=encryption,
        public_key=public_key,
        require_authenticated=require_authenticated,
        variant=variant,
        allow_pickle=allow_pickle,
        allow_plaintext_temp=allow_plaintext_temp,
        mmap=mmap,
        model_kwargs=model_kwargs,
    )

    def base_model(base_cls: Any, base: str) -> Any:
        # A model of another folder: nothing that was said about the adapter's files holds for it.
        plain = {"dtype": dtype, "device": device, "device_map": device_map, "quantization_config": quantization_config}
        more = {"cache": cache, "local_files_only": local_files_only, "token": token, "allow_pickle": allow_pickle}
        return from_pretrained(base_cls, base, **plain, **more, model_class=model_class, **model_kwargs)

    with open_place(
        source,
        revision=revision,
        cache=cache,
        local_files_only=local_files_only,
        token=token,
        stream_options=stream_options,
    ) as place:
        model, info = load_object(cls, place.below(subfolder), options, base_model)
    if not output_loading_info:
        return model
    if info is None:
        raise ValueError(f"output_loading_info: only models of transformers have it, found {type(model).__name__}")
    return model, info


def load_adapter(
    model: Any,
    source: Folder,
    *,
    adapter_name: str = "default",
    revision: Optional[str] = None,
    subfolder: str = "",
    strict: bool = True,
    verify: bool = False,
    encryption: Any = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
    cache: bool = True,
    local_files_only: bool = False,
    token: Any = None,
    allow_pickle: bool = False,
    stream_options: StreamOptions = None,
) -> Any:
    """Put a PEFT adapter into a model of ``transformers`` or ``peft``, or into a pipeline of ``diffusers``.

    Args:
        model: The model or pipeline, which is changed.
        source: As for :func:`from_pretrained`: the folder of the adapter, or one with ``pytorch_lora_weights`` of a
            pipeline.
        adapter_name: Name of the adapter in the model.
        strict: Raises where tensors of the adapter are missing or unexpected, for models of ``peft``.

    All other arguments are those of :func:`from_pretrained`.

    Returns:
        `model`.

    Raises:
        TypeError: An object of another kind.
        LoadError, OSError, ValueError: As for :func:`from_pretrained`.
    """
    from tensorizer.integrations._hf.adapters import load_adapter_into
    from tensorizer.integrations._hf.opening import open_place
    from tensorizer.integrations._hf.options import LoadOptions

    options = LoadOptions(
        strict=strict,
        verify=verify,
        encryption=encryption,
        public_key=public_key,
        require_authenticated=require_authenticated,
        allow_pickle=allow_pickle,
    )
    with open_place(
        source,
        revision=revision,
        cache=cache,
        local_files_only=local_files_only,
        token=token,
        stream_options=stream_options,
    ) as place:
        return load_adapter_into(model, place.below(subfolder), options, adapter_name)


def _inside(folder: Folder, name: str) -> str:
    return f"{os.fspath(folder).rstrip('/')}/{name}"


def config_to_json(config: Any) -> str:
    """The JSON text of a configuration: a mapping, or an object with ``to_dict`` (transformers)."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(f"config: wanted a mapping or an object with to_dict(), found {type(config).__name__}")
    return json.dumps(dict(config), indent=2, sort_keys=True, default=str) + "\n"


def serialize_model(
    model: torch.nn.Module,
    config: Any,
    model_directory: Folder,
    model_prefix: str = _DEFAULT_PREFIX,
    *,
    stream_options: StreamOptions = None,
    **serializer_options: Any,
) -> None:
    """Write a model, its configuration and its generation configuration to a folder or bucket.

    Under the default `model_prefix` the configuration is also in ``config.json``, so that ``from_pretrained`` of the
    configuration's class (and of ``GenerationConfig``) opens the folder.

    Args:
        model: The model; its non-persistent buffers are left out, as its class makes them again.
        config: A transformers configuration, a diffusers ``model.config`` or another mapping; ``None`` writes none.
        model_directory: Folder or ``s3://`` prefix; made where missing.
        model_prefix: Name of the files.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`, such as ``s3_endpoint``.
        **serializer_options: Keywords for :class:`~tensorizer.TensorSerializer`, such as ``encryption``.

    Raises:
        TypeError: ``config`` is of a kind that has no JSON text. Nothing was written.
    """
    options = dict(stream_options or {})
    texts = _texts_beside(model, config, model_prefix)
    tensors_uri = _inside(model_directory, f"{model_prefix}.tensors")
    with TensorSerializer(tensors_uri, stream_options=options, **serializer_options) as serializer:
        serializer.write_module(model, include_non_persistent_buffers=False)
    for name, text in texts.items():
        with stream_io.open_stream(_inside(model_directory, name), "wb+", **options) as stream:
            stream.write(text.encode("utf-8"))


def _texts_beside(model: torch.nn.Module, config: Any, model_prefix: str) -> dict[str, str]:
    """The files beside the weights, by name."""
    texts = {}
    if config is not None:
        texts[f"{model_prefix}-config.json"] = text = config_to_json(config)
        if model_prefix == _DEFAULT_PREFIX:
            texts["config.json"] = text
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        texts[_generation_file(model_prefix)] = generation.to_json_string()
    return texts


def _generation_file(model_prefix: str) -> str:
    return "generation_config.json" if model_prefix == _DEFAULT_PREFIX else f"{model_prefix}-generation_config.json"


def load_model(
    path_uri: Folder,
    model_class: Any,
    config_class: Any = None,
    model_prefix: str = _DEFAULT_PREFIX,
    device: Union[torch.device, str, None] = None,
    dtype: Optional[torch.dtype] = None,
    *,
    stream_options: StreamOptions = None,
    **deserializer_options: Any,
) -> Any:
    """Load a model that :func:`serialize_model` wrote.

    The model is built without allocating or initialising its parameters, filled, tied again and set to evaluation mode.

    Args:
        path_uri: Folder, ``s3://`` or ``http(s)://`` prefix.
        model_class: A transformers model or ``AutoModel...`` class, a diffusers model class, or a module class that
            takes the configuration (none: nothing) as its argument.
        config_class: Makes the configuration, by ``from_dict`` or from keywords. ``None``: the configuration class that
            ``model_class`` names, or the plain dictionary.
        model_prefix: Name of the files.
        device: Where the model goes. Default: CUDA where available.
        dtype: Convert floating-point tensors to this. Default: as stored.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`, such as ``s3_endpoint``.
        **deserializer_options: Keywords for :class:`~tensorizer.TensorDeserializer`, such as ``encryption``.

    Raises:
        ValueError: The files leave parameters of the model without a value; the message names some.
        OSError: A file cannot be read. A missing configuration is no error where ``model_class`` needs none.
    """
    options = dict(stream_options or {})
    device = get_device() if device is None else torch.device(device)
    config = _load_config(path_uri, model_prefix, model_class, config_class, options)
    with torch.device(device), no_init_or_tensor():
        model = _build(model_class, config)
    tensors_uri = _inside(path_uri, f"{model_prefix}.tensors")
    with TensorDeserializer(
        tensors_uri, device=device, dtype=dtype, stream_options=options, **deserializer_options
    ) as deserializer:
        deserializer.load_into_module(model)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if missing:
        raise ValueError(
            f"{shown_location(tensors_uri)} leaves {len(missing)} tensors of the model unset: {', '.join(missing[:5])}"
        )
    _restore_generation_config(model, _inside(path_uri, _generation_file(model_prefix)), options)
    return model.eval()


def _restore_generation_config(model: Any, uri: str, options: dict[str, Any]) -> None:
    """Gives the model the generation configuration that was kept with it; earlier releases kept none."""
    made = getattr(model, "generation_config", None)
    if made is None:
        return
    try:
        with stream_io.open_stream(uri, "rb", **options) as stream:
            values = json.loads(stream.read())
    except FileNotFoundError:
        return
    except OSError as error:  # stores that may not be listed call a missing file forbidden
        logger.warning("the model keeps the generation configuration of its class: %s", error)
        return
    model.generation_config = type(made).from_dict(values)


def _load_config(
    path_uri: Folder, model_prefix: str, model_class: Any, config_class: Any, options: dict[str, Any]
) -> Any:
    if config_class is None:
        config_class = getattr(model_class, "config_class", None)
    if config_class is None and hasattr(model_class, "_model_mapping"):  # AutoModel...: the values name their class
        from transformers import AutoConfig

        config_class = AutoConfig
    uri = _inside(path_uri, f"{model_prefix}-config.json")
    try:
        with stream_io.open_stream(uri, "rb", **options) as stream:
            values = json.loads(stream.read())
    except FileNotFoundError:
        if config_class is not None:
            raise
        return None
    return _make_config(config_class, values)


def _make_config(config_class: Any, values: dict[str, Any]) -> Any:
    if config_class is None:
        return values
    if hasattr(config_class, "for_model"):  # AutoConfig
        return config_class.for_model(**values)
    if hasattr(config_class, "from_dict"):
        return config_class.from_dict(values)
    return config_class(**values)


def _build(model_class: Any, config: Any) -> Any:
    if hasattr(model_class, "from_config"):  # AutoModel... of transformers, any model of diffusers
        return model_class.from_config(config)
    if hasattr(model_class, "_from_config"):  # a model class of transformers
        return model_class._from_config(config)
    return model_class() if config is None else model_class(config)


def serialize_pretrained(
    component: Any, zip_directory: Folder, prefix: str = "pretrained", *, stream_options: StreamOptions = None
) -> None:
    """Write what a component's ``save_pretrained`` writes (tokenizer, scheduler, ...) as one zip file.

    Args:
        component: An object with ``save_pretrained(folder)``.
        zip_directory: Folder or ``s3://`` prefix for ``<prefix>.zip``.
        prefix: Name of the file.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`.
    """
    with tempfile.TemporaryDirectory() as folder:
        component.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                archive.write(path, path.relative_to(folder).as_posix())
    uri = _inside(zip_directory, f"{prefix}.zip")
    with stream_io.open_stream(uri, "wb+", **dict(stream_options or {})) as stream:
        stream.write(content.getbuffer())


def load_pretrained(
    component_class: Any, path_uri: Folder, prefix: str = "pretrained", *, stream_options: StreamOptions = None
) -> Any:
    """Load a component that :func:`serialize_pretrained` wrote.

    Args:
        component_class: The class whose ``from_pretrained(folder)`` makes the component.
        path_uri: Folder, ``s3://`` or ``http(s)://`` prefix of ``<prefix>.zip``.
        prefix: Name of the file.
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream`.
    """
    with stream_io.open_stream(_inside(path_uri, f"{prefix}.zip"), "rb", **dict(stream_options or {})) as stream:
        data = stream.read()
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(folder)
        return component_class.from_pretrained(folder)

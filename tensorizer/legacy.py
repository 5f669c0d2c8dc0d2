"""The functions of earlier releases: models, tokenizers and schedulers of Hugging Face libraries in folders.

A model is ``<folder>/<prefix>.tensors`` and ``<folder>/<prefix>-config.json``, and where it generates text
``generation_config.json`` (behind ``<prefix>-`` unless that is ``model``); a tokenizer or scheduler is
``<folder>/<prefix>.zip``. :mod:`tensorizer.integrations.huggingface` has them as ``serialize_model``, ``load_model``,
``serialize_pretrained`` and ``load_pretrained``. ``tensorizer.load_model`` and ``tensorizer.serialize_model``, which
``tensorizer`` exported before 1.0, are looked up here when first asked for.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch

from tensorizer import stream_io
from tensorizer._io.sources import json_content
from tensorizer._io.uri import name_in
from tensorizer._system import archives
from tensorizer._system.redaction import shown_location
from tensorizer.deserializer import TensorDeserializer
from tensorizer.errors import FormatError
from tensorizer.serializer import TensorSerializer
from tensorizer.utils import get_device, no_init_or_tensor

__all__ = [
    "load_model",
    "load_model_folder",
    "load_pretrained",
    "serialize_model",
    "serialize_pretrained",
    "write_model_folder",
]

Folder = Union[str, "os.PathLike[str]"]
StreamOptions = Optional[Mapping[str, Any]]

logger = logging.getLogger("tensorizer.integrations.huggingface")

_DEFAULT_PREFIX = "model"


def serialize_model(
    model: torch.nn.Module,
    config: Any,
    model_directory: Union[str, os.PathLike[str]],
    model_prefix: str = "model",
) -> None:
    """Write ``<model_directory>/<model_prefix>.tensors`` and, with a configuration, ``<model_prefix>-config.json``.

    Deprecated: use :func:`tensorizer.integrations.huggingface.serialize_model`, or
    :meth:`tensorizer.TensorSerializer.write_module` for the tensors alone.

    Args:
        model: The model to write.
        config: Its configuration (transformers or diffusers), or ``None``.
        model_directory: Folder or ``s3://`` prefix.
        model_prefix: Name of the files.
    """
    warnings.warn(
        "tensorizer.serialize_model is deprecated: use tensorizer.integrations.huggingface.serialize_model, or "
        "TensorSerializer.write_module",
        DeprecationWarning,
        stacklevel=2,
    )
    write_model_folder(model, config, model_directory, model_prefix)


def load_model(*args: Any, **kwargs: Any) -> Any:
    """Fills a model, or loads one that :func:`serialize_model` wrote: the first argument tells.

    - ``load_model(model, source, strict=True, device=None, …)`` is :func:`tensorizer.torch.load_model`.
    - ``load_model(path_uri, modelclass, configclass=None, model_prefix="model", device=None, dtype=None)`` is
      the one of the releases before 1.0. Deprecated: use :func:`tensorizer.integrations.huggingface.load_model`, or
      :meth:`tensorizer.TensorDeserializer.load_into_module` for a model that you build.

    Args of the latter:
        path_uri: Folder, ``s3://`` or ``http(s)://`` prefix.
        modelclass: Class of the model.
        configclass: Class of its configuration; ``None`` uses the one that ``modelclass`` names, or the plain values.
        model_prefix: Name of the files.
        device: Default: CUDA where available.
        dtype: Convert floating-point tensors to this. Default: as stored.
    """
    if isinstance(args[0] if args else kwargs.get("model"), torch.nn.Module):
        from tensorizer.torch import load_model as fill

        return fill(*args, **kwargs)
    warnings.warn(
        "tensorizer.load_model is deprecated: use tensorizer.integrations.huggingface.load_model, or "
        "TensorDeserializer.load_into_module",
        DeprecationWarning,
        stacklevel=2,
    )
    return _load_from_folder(*args, **kwargs)


def _load_from_folder(
    path_uri: Union[str, os.PathLike[str]],
    modelclass: Any,
    configclass: Any = None,
    model_prefix: str = "model",
    device: Union[torch.device, str, None] = None,
    dtype: Optional[torch.dtype] = None,
) -> Any:
    return load_model_folder(path_uri, modelclass, configclass, model_prefix, device, dtype)


# What tools show is the published signature.
load_model.__signature__ = inspect.signature(_load_from_folder)  # type: ignore[attr-defined]


def config_to_json(config: Any) -> str:
    """The JSON text of a configuration: a mapping, or an object with ``to_dict`` (transformers)."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(f"config: wanted a mapping or an object with to_dict(), found {type(config).__name__}")
    return json.dumps(dict(config), indent=2, sort_keys=True, default=str) + "\n"


def write_model_folder(
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
    from tensorizer._save.compiled import unwrapped

    options = dict(stream_options or {})
    model = unwrapped(model)
    texts = _texts_beside(model, config, model_prefix)
    tensors_uri = name_in(model_directory, f"{model_prefix}.tensors")
    with TensorSerializer(tensors_uri, stream_options=options, **serializer_options) as serializer:
        serializer.write_module(model, include_non_persistent_buffers=False)
    for name, text in texts.items():
        with stream_io.open_stream(name_in(model_directory, name), "wb+", **options) as stream:
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


def load_model_folder(
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
    """Load a model that :func:`write_model_folder` wrote.

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
        ValueError: The files leave parameters of the model without a value; the message names some. The configuration
            is not a JSON object.
        OSError: A file cannot be read. A missing configuration is no error where ``model_class`` needs none.
    """
    options = dict(stream_options or {})
    device = get_device() if device is None else torch.device(device)
    config = _load_config(path_uri, model_prefix, model_class, config_class, options)
    with torch.device(device), no_init_or_tensor():
        model = _build(model_class, config)
    tensors_uri = name_in(path_uri, f"{model_prefix}.tensors")
    with TensorDeserializer(
        tensors_uri, device=device, dtype=dtype, lazy_load=True, stream_options=options, **deserializer_options
    ) as deserializer:
        # With a filter it does not warn of missing parameters: those that no tie fills are an error below.
        deserializer.load_into_module(model, filter_func=lambda name: True)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if missing:
        raise ValueError(
            f"{shown_location(tensors_uri)} leaves {len(missing)} tensors of the model unset: {', '.join(missing[:5])}"
        )
    if hasattr(model, "named_non_persistent_buffers"):
        from tensorizer.integrations._hf.models import compute_tables

        compute_tables(model)
    _restore_generation_config(model, name_in(path_uri, _generation_file(model_prefix)), options)
    return model.eval()


def _restore_generation_config(model: Any, uri: str, options: dict[str, Any]) -> None:
    """Gives the model the generation configuration that was kept with it; earlier releases kept none."""
    made = getattr(model, "generation_config", None)
    if made is None:
        return
    try:
        with stream_io.open_stream(uri, "rb", **options) as stream:
            values = json_content(shown_location(uri), stream.read())
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
    uri = name_in(path_uri, f"{model_prefix}-config.json")
    try:
        with stream_io.open_stream(uri, "rb", **options) as stream:
            values = json_content(shown_location(uri), stream.read())
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
    uri = name_in(zip_directory, f"{prefix}.zip")
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

    Raises:
        FormatError: It is not a zip file, or a damaged one; it is larger than 2 GiB, or unpacks to more than that or
            to more than 100 times its size.
        OSError: It cannot be read.
    """
    uri = name_in(path_uri, f"{prefix}.zip")
    with stream_io.open_stream(uri, "rb", **dict(stream_options or {})) as stream:
        data = bytearray()
        while piece := stream.read(1 << 20):
            data += piece
            if len(data) > archives.MAX_NBYTES:
                raise FormatError(f"{shown_location(uri)}: wanted at most {archives.MAX_NBYTES} bytes, found more")
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                archives.check_zip(archive, str(shown_location(uri)), len(data))
                archive.extractall(folder)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise FormatError(f"{shown_location(uri)}: wanted a zip file that can be unpacked: {error}") from None
        return component_class.from_pretrained(folder)

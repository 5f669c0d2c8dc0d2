"""The two functions that ``tensorizer`` exported before 1.0, for programs that still call them.

A model is ``<folder>/<prefix>.tensors`` and, with a configuration, ``<folder>/<prefix>-config.json``. The functions are
looked up here when ``tensorizer.load_model`` or ``tensorizer.serialize_model`` is first asked for.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch

from tensorizer import stream_io
from tensorizer._io.sources import json_content
from tensorizer._io.uri import name_in
from tensorizer._system.devices import one_device
from tensorizer._system.patches import no_init_or_tensor
from tensorizer._system.redaction import shown_location
from tensorizer.deserializer import TensorDeserializer
from tensorizer.serializer import TensorSerializer

Folder = Union[str, os.PathLike[str]]


def serialize_model(
    model: torch.nn.Module,
    config: Any,
    model_directory: Folder,
    model_prefix: str = "model",
) -> None:
    """Writes ``<model_directory>/<model_prefix>.tensors`` and, with a configuration, ``<model_prefix>-config.json``.

    Deprecated: use :func:`tensorizer.integrations.huggingface.save_pretrained` for models of Hugging Face libraries,
    and :meth:`tensorizer.TensorSerializer.write_module` for others.

    Args:
        model: The model. Its non-persistent buffers are left out, because its class makes them again.
        config: Its configuration: an object with ``to_dict`` (transformers) or a mapping; ``None`` writes none.
        model_directory: Folder or ``s3://`` prefix; created if missing.
        model_prefix: Name of the files.

    Raises:
        TypeError: `config` is of another kind. Nothing was written.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     tensorizer.serialize_model(torch.nn.Linear(4, 2), None, "old")
    """
    warnings.warn(
        "tensorizer.serialize_model is deprecated: use tensorizer.integrations.huggingface.save_pretrained, or "
        "TensorSerializer.write_module",
        DeprecationWarning,
        stacklevel=2,
    )
    from tensorizer._save.compiled import unwrapped

    text = None if config is None else _to_json(config)
    with TensorSerializer(name_in(model_directory, f"{model_prefix}.tensors")) as serializer:
        serializer.write_module(unwrapped(model), include_non_persistent_buffers=False)
    if text is not None:
        with stream_io.open_stream(name_in(model_directory, f"{model_prefix}-config.json"), "wb+") as stream:
            stream.write(text.encode("utf-8"))


def load_model(
    path_uri: Folder,
    modelclass: Any,
    configclass: Any = None,
    model_prefix: str = "model",
    device: Union[torch.device, str, None] = None,
    dtype: Optional[torch.dtype] = None,
) -> Any:
    """Loads a model that :func:`serialize_model` wrote, and sets it to evaluation mode.

    Deprecated: use :func:`tensorizer.integrations.huggingface.from_pretrained` for models of Hugging Face libraries,
    and :meth:`tensorizer.TensorDeserializer.load_into_module` for a model that you build. To fill a module from a file
    under the name that ``safetensors`` has, use :func:`tensorizer.torch.load_model`.

    Args:
        path_uri: Folder, ``s3://`` or ``http(s)://`` prefix.
        modelclass: Class of the model: one of transformers or diffusers, or a module class that takes the
            configuration, if there is one, as its argument.
        configclass: Makes the configuration, by ``from_dict`` or from keywords. ``None``: the class that `modelclass`
            names, else the plain dictionary.
        model_prefix: Name of the files.
        device: Where the model goes. Default: CUDA where available.
        dtype: Converts floating-point tensors to this. Default: as stored.

    Raises:
        ValueError: The file leaves parameters of the model without a value; the message names some. The configuration
            is not a JSON object.
        OSError: A file cannot be read. A missing configuration is no error if `modelclass` needs none.

    Examples:
        >>> import warnings
        >>> class Model(torch.nn.Linear):
        ...     def __init__(self):
        ...         super().__init__(4, 2)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     tensorizer.serialize_model(Model(), None, "old")
        ...     model = tensorizer.load_model("old", Model, device="cpu")
    """
    warnings.warn(
        "tensorizer.load_model is deprecated: use tensorizer.integrations.huggingface.from_pretrained, or "
        "TensorDeserializer.load_into_module; to fill a module from a file, tensorizer.torch.load_model",
        DeprecationWarning,
        stacklevel=2,
    )
    if isinstance(path_uri, torch.nn.Module):
        raise TypeError("path_uri: expected a folder, got a module, which tensorizer.torch.load_model fills")
    device = one_device(device)
    config = _load_config(path_uri, model_prefix, modelclass, configclass)
    with torch.device(device), no_init_or_tensor():
        model = _build(modelclass, config)
    uri = name_in(path_uri, f"{model_prefix}.tensors")
    with TensorDeserializer(uri, device=device, dtype=dtype, lazy_load=True) as deserializer:
        # The filter avoids a warning about missing parameters: those that no tie fills are an error below.
        deserializer.load_into_module(model, filter_func=lambda name: True)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if missing:
        raise ValueError(f"{shown_location(uri)} leaves {len(missing)} tensors of the model unset: {missing[:5]}")
    if hasattr(model, "named_non_persistent_buffers"):
        from tensorizer.integrations._hf.models import compute_tables

        compute_tables(model)
    return model.eval()


def _to_json(config: Any) -> str:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(f"config: expected a mapping or an object with to_dict(), got {type(config).__name__}")
    return json.dumps(dict(config), indent=2, sort_keys=True, default=str) + "\n"


def _load_config(path_uri: Folder, model_prefix: str, model_class: Any, config_class: Any) -> Any:
    if config_class is None:
        config_class = getattr(model_class, "config_class", None)
    if config_class is None and hasattr(model_class, "_model_mapping"):  # AutoModel...: the values name their class
        from transformers import AutoConfig

        config_class = AutoConfig
    uri = name_in(path_uri, f"{model_prefix}-config.json")
    try:
        with stream_io.open_stream(uri, "rb") as stream:
            values = json_content(shown_location(uri), stream.read())
    except FileNotFoundError:
        if config_class is not None:
            raise
        return None
    if config_class is None:
        return values
    if hasattr(config_class, "for_model"):  # AutoConfig
        return config_class.for_model(**values)
    return config_class.from_dict(values) if hasattr(config_class, "from_dict") else config_class(**values)


def _build(model_class: Any, config: Any) -> Any:
    if hasattr(model_class, "from_config"):  # AutoModel... of transformers, any model of diffusers
        return model_class.from_config(config)
    if hasattr(model_class, "_from_config"):  # a model class of transformers
        return model_class._from_config(config)
    return model_class() if config is None else model_class(config)

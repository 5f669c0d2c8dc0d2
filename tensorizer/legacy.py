"""The two functions that ``tensorizer`` exported before 1.0, over the current API.

``tensorizer.load_model`` and ``tensorizer.serialize_model`` are looked up here when first asked for.
"""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any, Optional, Union

import torch

__all__ = ["load_model", "serialize_model"]


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
    from tensorizer.integrations import huggingface

    warnings.warn(
        "tensorizer.serialize_model is deprecated: use tensorizer.integrations.huggingface.serialize_model, or "
        "TensorSerializer.write_module",
        DeprecationWarning,
        stacklevel=2,
    )
    huggingface.serialize_model(model, config, model_directory, model_prefix)


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
    from tensorizer.integrations import huggingface

    return huggingface.load_model(path_uri, modelclass, configclass, model_prefix, device, dtype)


# What tools show is the published signature.
load_model.__signature__ = inspect.signature(_load_from_folder)  # type: ignore[attr-defined]

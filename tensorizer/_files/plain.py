"""All tensors of a file as a plain dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch

from tensorizer._format.entries import FilterFuncType
from tensorizer._load.device_choice import DeviceArgument
from tensorizer.deserializer import TensorDeserializer
from tensorizer.progress import ProgressArgument

__all__ = ["load_plain"]


def load_plain(
    source: Any,
    device: DeviceArgument = "cpu",
    *,
    dtype: Optional[torch.dtype] = None,
    filter_func: Optional[FilterFuncType] = None,
    verify: bool = False,
    encryption: Any = None,
    mmap: bool = False,
    num_readers: Optional[int] = None,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> dict[str, Any]:
    """What :func:`tensorizer.torch.load_file` returns."""
    with TensorDeserializer(
        source,
        "cpu" if device is None else device,
        filter_func,
        dtype,
        verify_hash=verify,
        encryption=encryption,
        mmap=mmap,
        num_readers=num_readers,
        progress=progress,
        stream_options=stream_options,
    ) as tensors:
        plain = {_without_dot(name): _plain(value) for name, value in tensors.items()}
        for alias, kept in tensors.ties.items():
            plain[_without_dot(alias)] = plain[_without_dot(kept)]
        return plain


def _without_dot(name: Any) -> Any:
    return name[1:] if isinstance(name, str) and name.startswith(".") and len(name) > 1 else name


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        if value and all(isinstance(key, int) for key in value):
            return [_plain(value[key]) for key in sorted(value)]
        return {key: _plain(inner) for key, inner in value.items()}
    return value

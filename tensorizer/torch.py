"""The functions that users of ``safetensors.torch`` know, over files of both formats, from anywhere.

``from safetensors.torch import load_file, save_file`` becomes ``from tensorizer.torch import load_file, save_file``.
Tensors are plain ones without a gradient, in a ``dict``, and on the CPU unless a device is named: unlike
:class:`tensorizer.TensorDeserializer`, which gives Parameters on CUDA where there is any.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any, Optional, Union

import torch

from tensorizer._files.convert import write_contents
from tensorizer._files.state_dicts import check_state_dict, contents_of
from tensorizer._format.entries import FilterFuncType
from tensorizer._load.device_choice import DeviceArgument
from tensorizer._load.plain import load_plain
from tensorizer._load.safe_open import safe_open
from tensorizer._save.hashes import HASH_NAMES
from tensorizer.progress import ProgressArgument

__all__ = ["load", "load_file", "safe_open", "save", "save_file"]


def load_file(
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
    """Loads all tensors of a ``.tensors`` or ``.safetensors`` file; its content tells which.

    Args:
        source: A path, URI, descriptor, open binary file object, a folder of shards or their index.
        device: Where the tensors go; the CPU by default.
        dtype: Converts ``float16``, ``bfloat16``, ``float32`` and ``float64`` tensors to this dtype.
        filter_func: Loads only the tensors whose name it accepts.
        verify: Compares the data with the stored digests. A ``.safetensors`` file holds none, and is refused.
        encryption: The key of an encrypted file.
        mmap: Makes tensors copy-on-write views of a local file instead of reading it.
        num_readers: Upper bound for reading threads.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening a URI.

    Returns:
        Plain tensors by name, in the order of the file; aliases of one tensor are the same object. Names of tensors of
        a root module come without their leading dot; nested state dicts as nested dicts.

    Raises:
        FormatError: Not a file of tensors, or a damaged one.
        OSError: It cannot be opened or read.
        MissingHashError: `verify`, and a tensor has no digest.
        HashMismatchError: `verify`, and data disagree with their digest.
        CryptographyError: A key is missing, wrong or not wanted.

    Source: the semantics of ``safetensors.torch.load_file``; docs/safetensors.md says what differs.
    """
    return load_plain(
        source,
        device,
        dtype=dtype,
        filter_func=filter_func,
        verify=verify,
        encryption=encryption,
        mmap=mmap,
        num_readers=num_readers,
        progress=progress,
        stream_options=stream_options,
    )


def load(data: bytes, device: DeviceArgument = "cpu", **options: Any) -> dict[str, Any]:
    """Loads the tensors of a file that is in memory; arguments and errors as :func:`load_file`."""
    return load_plain(io.BytesIO(data), device, **options)


def save_file(
    tensors: Mapping[str, torch.Tensor],
    target: Any,
    metadata: Optional[Mapping[str, str]] = None,
    *,
    format: Optional[str] = None,
    ties: str = "once",
    encryption: Any = None,
    hashes: Union[str, Collection[str], None] = HASH_NAMES,
    max_shard_size: Union[str, int, None] = None,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> None:
    """Writes tensors to one file, or to shards and their index.

    Tensors may be on any device, share memory, be views of larger storages, and need not be contiguous. What is written
    to ``.safetensors`` is what the reference's writer would write, byte for byte.

    Args:
        tensors: By name.
        target: A path, ``s3://`` URI or open binary file object. It appears when it is complete.
        metadata: Texts to store, in their order.
        format: ``"tensors"`` or ``"safetensors"``; ``None`` goes by the extension, ``"tensors"`` without a known one.
        ties: What becomes of names that share one tensor: ``"once"`` stores it once and records the other names,
            ``"twice"`` stores it under each name, ``"error"`` refuses as ``safetensors`` does.
        encryption: Encrypts the file (``.tensors`` only).
        hashes: Digests to store (``.tensors`` only), as for :class:`tensorizer.TensorSerializer`.
        max_shard_size: Bytes, or a text like ``"5GB"``: writes several files beside the name of `target`.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Raises:
        ValueError: `tensors` is no mapping of names to dense tensors, or the format cannot hold something
            (:class:`UnsupportedContentError`); nothing was written.
        OSError: The target cannot be written.
    """
    contents = contents_of(check_state_dict(tensors), metadata)
    write_contents(
        contents,
        target,
        format=format,
        ties=ties,
        encryption=encryption,
        hashes=hashes,
        max_shard_size=max_shard_size,
        progress=progress,
        stream_options=stream_options,
    )


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Optional[Mapping[str, str]] = None,
    *,
    format: str = "safetensors",
    ties: str = "once",
    encryption: Any = None,
) -> bytes:
    """The file that :func:`save_file` would write, as bytes; arguments and errors as there."""
    memory = _Memory()
    save_file(tensors, memory, metadata, format=format, ties=ties, encryption=encryption)
    return memory.getvalue()


class _Memory(io.BytesIO):
    """Stays readable when its writer closes it."""

    def close(self) -> None:
        """Leaves the content where it is."""

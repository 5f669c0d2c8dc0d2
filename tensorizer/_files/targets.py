"""What a conversion writes to: one function per format, given all names and shapes before the first payload.

Each is a context manager that gives a function to write the next tensors with, in the order that was announced. The
file appears when the block ends; after an exception what was there stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch

from tensorizer._files.contents import Content
from tensorizer._format import dtypes
from tensorizer._format.names import Name, path_of
from tensorizer._format.payloads import contiguous
from tensorizer._format.safetensors import HeaderEntry, header_bytes
from tensorizer._io.whole_file import WholeFile
from tensorizer._save.one_call import written_in_one_call

__all__ = ["Write", "safetensors_target", "tensors_target"]

Write = Callable[[Sequence[torch.Tensor]], None]


@contextlib.contextmanager
def safetensors_target(
    target: Any,
    items: Sequence[Content],
    names: Sequence[str],
    metadata: Optional[Mapping[str, str]],
    stream_options: Optional[Mapping[str, Any]],
) -> Iterator[Write]:
    """A ``.safetensors`` file: header first, payloads behind it.

    Args:
        target: A path, URI or open binary file object.
        items: The tensors, in the order of the file.
        names: What each is called there.
        metadata: Texts to store, in their order; ``None`` stores no such member.
        stream_options: Keywords for opening a URI.

    Raises:
        UnsupportedContentError: Something that the format cannot hold; nothing was opened then.
        OSError: The target cannot be written.
    """
    header = header_bytes([HeaderEntry(name, item.dtype, item.shape) for name, item in zip(names, items)], metadata)
    with WholeFile(target, stream_options) as file:
        file.reserve(len(header) + sum(item.tensor_nbytes for item in items))
        file.append(header)

        def write(tensors: Sequence[torch.Tensor]) -> None:
            data = [contiguous(tensor, on_device=False) for tensor in tensors]  # alive until the call returns
            file.append_memory([(d.data_ptr() if d.numel() else 0, d.numel() * d.element_size()) for d in data])

        yield write


@contextlib.contextmanager
def tensors_target(
    target: Any,
    items: Sequence[Content],
    *,
    encryption: Any,
    hashes: frozenset[str],
    metadata: Mapping[str, str],
    ties: Mapping[Name, Name],
    stored_ties: Mapping[Name, Name],
    stream_options: Optional[Mapping[str, Any]],
) -> Iterator[Write]:
    """A ``.tensors`` file, written by one call of the extension's session, so that it appears whole."""
    tied = [(path_of(alias), path_of(kept), False) for alias, kept in ties.items()]
    tied += [(path_of(alias), path_of(kept), True) for alias, kept in stored_ties.items()]
    records = [_described(item) for item in items]
    with written_in_one_call(
        target,
        records,
        tied,
        hashes=hashes,
        encryption=encryption,
        metadata=metadata,
        stream_options=stream_options,
    ) as session:
        written = 0

        def write(tensors: Sequence[torch.Tensor]) -> None:
            nonlocal written
            payloads = []
            for item, tensor in zip(items[written : written + len(tensors)], tensors):
                empty = item.without_data or tensor.numel() == 0
                payloads.append((0 if empty else tensor.data_ptr(), 0 if empty else item.nbytes))
                written += 1
            session.write_payloads(payloads)

        yield write


def _described(item: Content) -> tuple[Any, ...]:
    stored = dtypes.stored_for_tensor(item.dtype)
    scalar = item.without_data and not item.shape
    nbytes = item.dtype.itemsize if scalar else item.nbytes
    return (path_of(item.name), stored.encode(), item.shape, int(item.type), item.module_idx, nbytes, item.without_data)

"""What a conversion reads from: the tensors of one or several sources, in one order, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional, Protocol

import torch

from tensorizer._files.opened import BATCH_NBYTES, OpenedFile
from tensorizer._format.dtypes import CASTABLE
from tensorizer._format.entries import TensorType
from tensorizer._format.names import Name
from tensorizer._format.payloads import contiguous
from tensorizer._save.ties import place_of
from tensorizer._system.runs import runs

__all__ = ["Content", "Contents", "FileContents", "StateDictContents", "batches", "cast"]


class Content(NamedTuple):
    """One tensor, as it will be written."""

    name: Name
    type: TensorType
    module_idx: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    without_data: bool
    """Written from the meta device: the record holds no payload."""
    position: int
    """In its source."""
    tensor_nbytes: int
    """In memory."""
    nbytes: int
    """Of the payload."""

    @classmethod
    def of(
        cls,
        name: Name,
        type: TensorType,
        module_idx: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        without_data: bool,
        position: int,
    ) -> Content:
        nbytes = math.prod(shape) * dtype.itemsize
        return cls(name, type, module_idx, dtype, shape, without_data, position, nbytes, 0 if without_data else nbytes)


class Contents(Protocol):
    """A source of tensors."""

    items: list[Content]

    @property
    def label(self) -> str: ...
    @property
    def metadata(self) -> Optional[Mapping[str, str]]: ...
    @property
    def ties(self) -> Mapping[Name, Name]:
        """From each name that has no payload of its own to the one whose payload it shares."""
        ...

    @property
    def stored_ties(self) -> Mapping[Name, Name]:
        """From each name that is a copy of another one and is stored all the same to that one."""
        ...

    def read(self, items: Sequence[Content]) -> list[torch.Tensor]:
        """Host tensors of the stored dtype, in C order."""


class FileContents:
    """The tensors of a file of tensors.

    Args:
        file: An open file; a key is needed where it is encrypted.
        verify: Compares what is read with the digests in the file.

    Raises:
        CryptographyError: The file is encrypted and there is no key.
    """

    def __init__(self, file: OpenedFile, verify: bool) -> None:
        self._file, self._verify = file, verify
        self.label = file.label
        self.metadata: Optional[Mapping[str, str]] = file.metadata()
        self.ties: Mapping[Name, Name] = {alias: kept for alias, kept, stored in file.ties if not stored}
        self.stored_ties: Mapping[Name, Name] = {alias: kept for alias, kept, stored in file.ties if stored}
        if file.index.stores_hashes:
            file.read_headers(file.entries)
        self.items = [self._item(i) for i in file.entries]

    def _item(self, i: int) -> Content:
        container, index = self._file.container, self._file.index
        without_data = index.data_nbytes(i) == 0 and index.loaded_nbytes(i) > 0
        dtype, shape, module_idx = self._file.described(i)
        return Content.of(container.names[i], container.type(i), module_idx, dtype, shape, without_data, i)

    def read(self, items: Sequence[Content]) -> list[torch.Tensor]:
        entries = sorted({item.position for item in items})  # names of one tensor that are stored apart have one entry
        tensors = dict(zip(entries, self._file.read(entries, self._verify)))
        return [tensors[item.position] for item in items]


class StateDictContents:
    """The tensors of a state dict in memory, or mapped from a pickled file. Shared ones are told in `ties`."""

    def __init__(self, label: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.label = label
        self.metadata: Optional[Mapping[str, str]] = None
        self._tensors = list(tensors.values())
        kept: dict[Hashable, str] = {}
        for name in sorted(tensors):  # of the names of one tensor, the alphabetically first one
            place = place_of(tensors[name])
            if place is not None:
                kept.setdefault(place, name)
        stands_for = {name: kept.get(place_of(tensor), name) for name, tensor in tensors.items()}
        self.ties: Mapping[Name, Name] = {name: other for name, other in stands_for.items() if other != name}
        self.stored_ties: Mapping[Name, Name] = {}
        self.items = [
            Content.of(name, TensorType.STATE_DICT, 0, tensor.dtype, tuple(tensor.shape), False, position)
            for position, (name, tensor) in enumerate(tensors.items())
            if name not in self.ties
        ]

    def read(self, items: Sequence[Content]) -> list[torch.Tensor]:
        return [_host(self._tensors[item.position]) for item in items]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in C order in host memory."""
    return contiguous(tensor, on_device=False).view(tensor.dtype).view(tensor.shape)


def cast(item: Content, dtype: Optional[torch.dtype]) -> Content:
    """The item as ``dtype=`` changes it: floating point of 16 bits and more only."""
    if dtype is None or item.dtype not in CASTABLE or dtype not in CASTABLE:
        return item
    return Content.of(item.name, item.type, item.module_idx, dtype, item.shape, item.without_data, item.position)


def batches(items: Sequence[Content]) -> Iterator[Sequence[Content]]:
    """Runs of items whose payloads fit :data:`~tensorizer._files.opened.BATCH_NBYTES`, or single larger ones."""
    return runs(items, lambda item: item.nbytes, BATCH_NBYTES)

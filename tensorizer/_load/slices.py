"""Parts of tensors, read without the rest of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import torch

from tensorizer._format.names import Name
from tensorizer._format.safetensors import safetensors_dtype
from tensorizer._load.container import Container, ReadOptions
from tensorizer._load.device_choice import DeviceChooser, target_device
from tensorizer._load.loaded_tensors import LoadedTensors
from tensorizer._load.parts import PartReader, TensorFacts, Wanted

__all__ = ["TensorSlice", "TensorSlices"]


class TensorSlice:
    """One tensor of an open file; ``slice[index]`` reads the part that `index` names, and no more than it has to.

    `index` is what torch takes between brackets: integers, slices with positive steps, ``...``, ``None``, lists and
    tensors of integers, masks, and tuples of these. Rows of dimension 0 that a list, tensor or mask names are read
    alone; of other dimensions everything between the first and the last. The result is a plain tensor on the
    deserializer's device, in its ``dtype``. Parts of encrypted tensors are authenticated: they are read in chunks of
    the cipher (2 MiB). May be used from several threads.

    Raises:
        IndexError: Out of range, or more dimensions than the tensor has.
        ValueError: A step below 1; a part of a deserializer that verifies hashes, which are of whole tensors.
        OSError, FormatError, CryptographyError: As for whole tensors.
    """

    __slots__ = ("_entry", "_facts", "_name", "_slices")

    def __init__(self, slices: TensorSlices, name: Name, entry: int) -> None:
        self._slices, self._name, self._entry = slices, name, entry
        self._facts: Optional[TensorFacts] = None

    def _known(self) -> TensorFacts:
        if self._facts is None:
            self._facts = self._slices._parts.facts(self._entry)
        return self._facts

    def _told_by_container(self) -> bool:
        """Whether the file says what torch has no dtype for."""
        container = self._slices._container
        return container.index.format == "safetensors" and container.stored_dtype(self._entry) is None

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self._known().shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read: as stored, or converted to the deserializer's ``dtype``."""
        return self._known().loaded_dtype

    @property
    def ndim(self) -> int:
        """Dimensions of the tensor."""
        return len(self._known().shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor once it is read."""
        facts = self._known()
        return math.prod(facts.shape) * facts.loaded_dtype.itemsize

    def get_shape(self) -> list[int]:
        """The shape as a list, as ``safetensors`` gives it; known also where torch lacks the dtype."""
        if self._told_by_container():
            return list(self._slices._container.shape(self._entry))
        return list(self._known().shape)

    def get_dtype(self) -> str:
        """The dtype by its ``safetensors`` name (``"BF16"``), or torch's where that has none."""
        if self._told_by_container():
            return self._slices._container.index.container_dtype(self._entry)
        dtype = self.dtype
        return safetensors_dtype(dtype) or str(dtype).replace("torch.", "", 1)

    def is_floating_point(self) -> bool:
        """Whether it is, as ``torch.Tensor.is_floating_point`` tells."""
        return self.dtype.is_floating_point

    def __repr__(self) -> str:
        return f"<TensorSlice of {self._name!r}: {self.dtype}, {list(self.shape)}>"

    def __getitem__(self, index: Any) -> torch.Tensor:
        slices = self._slices
        wanted = Wanted(self._entry, index, slices._parts.device_of(self._entry))
        return slices._parts.read([wanted], slices._loaded.must_verify(None))[0]


class TensorSlices:
    """The half of ``TensorDeserializer`` that reads parts of tensors."""

    _container: Container
    _loaded: LoadedTensors
    _parts: PartReader
    _device: Union[torch.device, DeviceChooser]
    _numbers: Optional[dict[Name, int]] = None

    def _open_parts(self, options: ReadOptions) -> None:
        self._parts = PartReader(self._container, self._loaded, options)

    def _number_of(self, name: Name) -> int:
        if self._numbers is None:
            names = self._container.names
            self._numbers = {names[i]: i for i in self._container.selection}
        return self._numbers[name]

    def get_slice(self, name: Name) -> TensorSlice:
        """A tensor of which parts can be read: ``d.get_slice("w")[10:20]``. Reads nothing by itself.

        Args:
            name: As in :meth:`entries`: a path of keys for tensors in nested containers.

        Raises:
            KeyError: There is no such tensor.
        """
        return TensorSlice(self, name, self._number_of(name))

    def slices(self) -> dict[Name, TensorSlice]:
        """All tensors by name, each as what parts can be read of; in file order.

        What takes a state dict of ``safetensors`` slices takes this: ``Model.from_pretrained(None, config=config,
        state_dict=d.slices())`` of transformers 5.
        """
        container = self._container
        return {container.names[i]: TensorSlice(self, container.names[i], i) for i in container.selection}

    def get_slices(
        self,
        parts: Mapping[Name, Any],
        out: Optional[Mapping[Name, torch.Tensor]] = None,
        device: Optional[Union[torch.device, str, int]] = None,
        *,
        verify_hash: Optional[bool] = None,
    ) -> dict[Name, torch.Tensor]:
        """Reads parts of many tensors by one plan: ranges that are close are read together, all threads are busy.

        Args:
            parts: Names, and what :class:`TensorSlice` takes between brackets.
            out: Tensors of the parts' shapes to read to, for every name; they come back. Contiguous ones of the stored
                dtype are read to without a copy, others are copied and converted to. ``None`` makes new ones.
            device: Where new tensors go; ``None`` is the deserializer's device.
            verify_hash: Overrides the constructor's value.

        Returns:
            Plain tensors by name, in the order of `parts`.

        Raises:
            KeyError: There is no such tensor, or `out` lacks a name.
            ValueError: Verification was asked for and a part is not the whole tensor; an `out` tensor of another shape.
            IndexError, TypeError: As for :class:`TensorSlice`.
        """
        entries = [self._number_of(name) for name in parts]
        verify = self._loaded.must_verify(verify_hash)
        if out is not None:
            places = [out[name].detach() for name in parts]
            rows = zip(entries, parts.values(), places)
            self._parts.read([Wanted(entry, index, place.device, place) for entry, index, place in rows], verify)
            return {name: out[name] for name in parts}
        chosen = self._device if device is None else target_device(device)
        found: Optional[Sequence[torch.Tensor]] = None
        if isinstance(chosen, torch.device) and not verify:
            found = self._parts.read_basic(entries, list(parts.values()), chosen)
        if found is None:
            device_of = self._parts.device_of
            wanted = [
                Wanted(i, index, chosen if isinstance(chosen, torch.device) else device_of(i))
                for i, index in zip(entries, parts.values())
            ]
            found = self._parts.read(wanted, verify)
        return dict(zip(parts, found))

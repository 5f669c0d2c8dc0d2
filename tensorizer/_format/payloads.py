"""Turns the tensors and arrays that callers pass into memory that can be written unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch

from tensorizer._format import dtypes
from tensorizer._system.devices import empty

_MAX_DIMENSIONS = 255


def dense_nbytes(shape: Sequence[Any], itemsize: int) -> Optional[int]:
    """Bytes of a tensor whose shape comes from a file; ``None``, after few steps, if no tensor can have that shape.

    As in an index, non-zero dimensions are limited even if another dimension is zero.
    """
    if len(shape) > _MAX_DIMENSIONS:
        return None
    nbytes = itemsize
    for size in shape:
        if type(size) is not int or size < 0:
            return None
        nbytes *= size or 1
        if nbytes >= 1 << 63:
            return None
    return 0 if 0 in shape else nbytes


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, on any devices, have the same dtype, shape and bytes. A NaN equals a NaN of the same bits.

    Tensors without data are equal if their dtype and shape are.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta:
        return True
    first, second = (t.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second.to(first.device))


def stored_dtype(name: Any, tensor: torch.Tensor) -> str:
    """The dtype to store for a tensor that can be stored.

    Raises:
        NotImplementedError: The format cannot hold the tensor: it is quantized, sparse or nested, or has no memory of
            its own, such as a wrapper around other tensors, of which a file would not restore the same thing.
        ValueError: The format does not know the element width, or the tensor of a lazy module has no shape yet.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"tensor {name!r} cannot be stored: its lazy module gives it a shape when it is first called")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).rpartition(".")[2].lstrip("_")
        raise NotImplementedError(f"tensor {name!r} cannot be stored: expected a dense tensor, got a {kind} one")
    try:
        stored = dtypes.stored_for_tensor(tensor.dtype)
    except (NotImplementedError, ValueError) as error:
        raise type(error)(f"tensor {name!r}: {error}") from None
    check_memory(name, tensor, "stored")
    return stored


def check_memory(name: Any, tensor: torch.Tensor, done: str) -> None:
    """Refuses a tensor whose bytes cannot be read. `done` completes the message: "cannot be stored".

    Raises:
        NotImplementedError: Neither the tensor nor the tensor that it detaches to has memory with all its elements.
    """
    if not has_own_data(tensor):
        raise NotImplementedError(
            f"tensor {name!r} cannot be {done}: this {type(tensor).__name__} has no memory that holds all its elements"
            "; give the plain tensors that it stands for"
        )


def has_own_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the tensor that it detaches to, has memory with all its elements.

    On devices other than the CPU and CUDA this cannot be seen and counts as true.
    """
    return tensor.device.type not in ("cpu", "cuda") or _has_memory(tensor) or _detaches_to_memory(tensor)


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie one after the other in the memory at its address."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and _has_memory(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage has memory for all elements that the tensor's strides address."""
    if tensor.numel() == 0:
        return True
    storage = tensor.untyped_storage()
    # the first is for fake tensors, the second for wrapper subclasses and storages that were resized to nothing
    if storage.device.type == "meta" or tensor.data_ptr() == 0:
        return False
    if tensor.is_contiguous():
        span = tensor.numel()
    else:
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return (tensor.storage_offset() + span) * tensor.element_size() <= storage.nbytes()


def _detaches_to_memory(tensor: torch.Tensor) -> bool:
    """Whether a wrapper detaches to the plain tensor that it stands for. The save then writes that one."""
    try:
        plain = tensor.detach()
    except NotImplementedError:  # the class cannot detach
        return False
    return (plain.shape, plain.dtype) == (tensor.shape, tensor.dtype) and _has_memory(plain)


def adopt(name: Any, tensor: Any) -> tuple[torch.Tensor, str]:
    """The tensor to write for a tensor or array, and its stored dtype.

    Raises:
        TypeError: It is neither a tensor nor an array, or an array of a dtype that torch does not know.
        ValueError: It is an array in foreign byte order.
        NotImplementedError: As in :func:`stored_dtype`.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor, stored_dtype(name, tensor)
    if isinstance(tensor, (np.ndarray, np.generic)):
        array = np.asarray(tensor)
        try:
            stored = dtypes.stored_for_array(array.dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"tensor {name!r}: {error}") from None
        return _from_array(np.ascontiguousarray(array).reshape(array.shape)), stored
    raise TypeError(f"tensor: expected a torch.Tensor or a numpy.ndarray, got {type(tensor).__name__}")


def _from_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns about read-only memory; a save only reads it
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def is_copied(tensor: torch.Tensor, on_device: bool) -> bool:
    """Whether :func:`contiguous` makes a copy of the tensor's data."""
    if tensor.is_meta:
        return False
    in_place = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return not in_place or not (on_device or tensor.device.type == "cpu")


def contiguous(tensor: torch.Tensor, on_device: bool) -> torch.Tensor:
    """A contiguous tensor with the same elements in C order; the tensor itself if it is contiguous already.

    The result is on the host; with `on_device`, it is on the tensor's device.
    """
    data = tensor.detach()
    if data.is_meta:  # a scalar is stored as a real zero, other tensors without data (docs/format.md)
        return torch.zeros((), dtype=data.dtype, device="cpu") if data.dim() == 0 else empty(0, device="cpu")
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    if not on_device:
        data = data.to("cpu")
    if data.is_contiguous():
        return data
    integers = dtypes.INTEGER_OF_WIDTH.get(data.dtype.itemsize)  # torch cannot copy every dtype, but it can copy these
    return (data if integers is None else data.view(integers)).contiguous()

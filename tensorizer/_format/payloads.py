"""From the tensors and arrays that callers give to memory that can be written as it stands."""

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
    """Bytes of a tensor whose shape comes from a file; ``None`` where no tensor has such a shape, found in few steps.

    Non-zero dimensions are limited even where another one is zero, as in an index.
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
    """Whether two tensors, on whatever devices, have one dtype, one shape and the same bytes: NaN equals the same NaN.

    Of tensors without data dtype and shape decide.
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
        NotImplementedError: A tensor that the format cannot hold: quantized, sparse or nested; or one without memory
            of its own, such as a wrapper around other tensors, which would be written as something else.
        ValueError: An element width that the format does not know; a tensor of a lazy module that has no shape yet.
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
    """Refuses a tensor whose bytes nobody can read, with what cannot be done to it.

    Raises:
        NotImplementedError: It has no memory that holds all its elements, nor has what it gives when it is detached.
    """
    if not has_own_data(tensor):
        raise NotImplementedError(
            f"tensor {name!r} cannot be {done}: this {type(tensor).__name__} has no memory that holds all its elements"
            "; give the plain tensors that it stands for"
        )


def has_own_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what it gives when it is detached, has memory that holds all its elements, as far as one can
    tell of its device."""
    return tensor.device.type not in ("cpu", "cuda") or _has_memory(tensor) or _detaches_to_memory(tensor)


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements, one after the other, are the memory at its address."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) and _has_memory(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether the elements are where the tensor's address, strides and storage say."""
    if tensor.numel() == 0:
        return True
    storage = tensor.untyped_storage()
    # fake tensors; then wrapper subclasses, and storages that were resized away
    if storage.device.type == "meta" or tensor.data_ptr() == 0:
        return False
    if tensor.is_contiguous():
        span = tensor.numel()
    else:
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return (tensor.storage_offset() + span) * tensor.element_size() <= storage.nbytes()


def _detaches_to_memory(tensor: torch.Tensor) -> bool:
    """Whether a wrapper gives the plain tensor it stands for when detached, which is what is written then."""
    try:
        plain = tensor.detach()
    except NotImplementedError:  # a class that does not know how
        return False
    return (plain.shape, plain.dtype) == (tensor.shape, tensor.dtype) and _has_memory(plain)


def adopt(name: Any, tensor: Any) -> tuple[torch.Tensor, str]:
    """The tensor to write, and its stored dtype, of a tensor or array.

    Raises:
        TypeError: Neither, or an array of a dtype that torch does not know.
        ValueError: An array in foreign byte order.
        NotImplementedError: As :func:`stored_dtype`.
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
    with warnings.catch_warnings():  # about read-only memory: it is only read here
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def is_copied(tensor: torch.Tensor, on_device: bool) -> bool:
    """Whether :func:`contiguous` makes a copy of the tensor's data."""
    if tensor.is_meta:
        return False
    in_place = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return not in_place or not (on_device or tensor.device.type == "cpu")


def contiguous(tensor: torch.Tensor, on_device: bool) -> torch.Tensor:
    """Contiguous memory with the tensor's bytes, in C order; the tensor itself where it is that already.

    On the host, unless `on_device`: then where the tensor is.
    """
    data = tensor.detach()
    if data.is_meta:  # a scalar is stored as a real zero, everything else without data (docs/format.md)
        return torch.zeros((), dtype=data.dtype, device="cpu") if data.dim() == 0 else empty(0, device="cpu")
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    if not on_device:
        data = data.to("cpu")
    if data.is_contiguous():
        return data
    integers = dtypes.INTEGER_OF_WIDTH.get(data.dtype.itemsize)  # torch copies not all types, but all of these
    return (data if integers is None else data.view(integers)).contiguous()

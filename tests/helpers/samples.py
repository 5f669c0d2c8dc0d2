"""Tensors, modules and small helpers that many tests need."""

from __future__ import annotations

import ctypes
import hashlib
import io
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorizer import TensorDeserializer, TensorSerializer

NUMPY_DTYPES = [
    "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bool",
]  # fmt: skip
OPAQUE_DTYPES = [
    "bfloat16", "complex32", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    *[f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8)],
]  # fmt: skip
NUMPY_DTYPES = [getattr(torch, name) for name in NUMPY_DTYPES if hasattr(torch, name)]
OPAQUE_DTYPES = [getattr(torch, name) for name in OPAQUE_DTYPES if hasattr(torch, name)]
ALL_DTYPES = NUMPY_DTYPES + OPAQUE_DTYPES


def fail(count: object) -> int:
    """Fails like the storage below a file object."""
    raise OSError("the cable is cut")


# Wrong results of a file object's ``readinto`` or ``write``, and the errors that must follow.
WRONG_ANSWERS = {
    "float": (float, TypeError),
    "negative": (lambda n: -1, OSError),
    "too many": (lambda n: n + 1, OSError),
    "exception": (fail, OSError),
}


def assert_released(views: list) -> None:
    """Checks that a file object can no longer access the memory that it was given."""
    assert views
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view[0]


def stream(nbytes: int, seed: object) -> bytes:
    """Bytes that look random and depend on ``seed`` alone."""
    return hashlib.shake_128(repr(seed).encode()).digest(nbytes)


def tensor(shape=(3, 4), dtype=torch.float32, seed=0) -> torch.Tensor:
    """A contiguous tensor of arbitrary bits (of 0 and 1 for bool): NaNs of every kind included."""
    result = torch.empty(shape, dtype=dtype)
    data = stream(result.numel() * result.element_size(), (seed, tuple(shape), str(dtype)))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    if data:
        ctypes.memmove(result.data_ptr(), data, len(data))
    return result


def raw(value: torch.Tensor) -> bytes:
    """The tensor's bytes in C order."""
    value = value.detach()
    if not value.is_contiguous():
        value = value.contiguous()
    nbytes = value.numel() * value.element_size()
    return ctypes.string_at(value.data_ptr(), nbytes) if nbytes else b""


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes are equal: stricter than ``torch.equal``, but a NaN equals the same NaN."""
    return found.dtype == wanted.dtype and found.shape == wanted.shape and raw(found) == raw(wanted)


def assert_same(found, wanted) -> None:
    """Checks that two mappings, sequences or tensors are equal to the bit. Containers count as dicts and lists."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert raw(found) == raw(wanted)
    elif hasattr(wanted, "keys"):
        assert list(found.keys()) == list(wanted.keys())
        for key in wanted:
            assert_same(found[key], wanted[key])
    else:
        assert isinstance(found, list)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            assert_same(one, other)


def write_state_dict(target, state_dict, **options):
    """Writes a state dict with one call and closes the file; returns the target."""
    serializer = TensorSerializer(target, **options)
    serializer.write_state_dict(state_dict)
    serializer.close()
    return target


def write_module(target, module, *, options=None, **flags):
    serializer = TensorSerializer(target, **(options or {}))
    serializer.write_module(module, **flags)
    serializer.close()
    return target


def state_dict_bytes(state_dict, **options) -> bytes:
    """The bytes of the file of a state dict."""
    stream = KeptBytesIO()
    write_state_dict(stream, state_dict, **options)
    return stream.getvalue()


def load(source, **options) -> dict:
    """Loads everything in a file, as ``tree()`` returns it."""
    options.setdefault("device", "cpu")
    with TensorDeserializer(source, **options) as deserializer:
        return deserializer.tree()


class Wrapper(torch.Tensor):
    """A tensor without its own memory that wraps another one, as quantizing libraries make them."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})))


class Scaled(torch.Tensor):
    """Integers and a scale for each row, which represent their products, like tensors of quantizing libraries."""

    @staticmethod
    def __new__(cls, codes, scale, context=None):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale, context=None):
        self.codes, self.scale, self.context = codes, scale, context

    def __tensor_flatten__(self):
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten, one = torch.ops.aten, args[0]
        if func is aten.is_pinned.default:
            return False
        if func in (aten.detach.default, aten.view.default):
            return cls(one.codes.detach(), one.scale.detach(), one.context)
        if func is aten.slice.Tensor and args[1] == 0:
            return cls(one.codes[args[2] : args[3]], one.scale[args[2] : args[3]], one.context)
        if func is aten.copy_.default and isinstance(args[1], cls):
            one.codes.copy_(args[1].codes)
            one.scale.copy_(args[1].scale)
            return one
        raise NotImplementedError(str(func))


class KeptBytesIO(io.BytesIO):
    """Keeps its buffer when the serializer closes it, for callers that want the bytes."""

    def close(self) -> None:
        pass


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scratch", torch.full((2,), 7.0), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("missing", None)


class Net(nn.Module):
    """Has a root parameter, root buffers of both kinds, nested modules, tied weights and a module under two names."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)
        self.embed = nn.Embedding(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.blocks[0]


def net(seed: int = 0, width: int = 4) -> Net:
    """A ``Net`` of arbitrary finite values."""
    generator = torch.Generator().manual_seed(seed)
    model = Net(width)
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator))
    return model


def module_names(module: nn.Module, persistent_only: bool = False) -> list:
    """Stored names in file order, by the rules of docs/format.md: with dots, and a leading dot at the root."""
    names = []
    for path, child in module.named_modules():
        for store in (child._parameters, child._buffers):
            seen = set()
            for name, value in store.items():
                if value is None or id(value) in seen:
                    continue
                if persistent_only and store is child._buffers and name in child._non_persistent_buffers_set:
                    continue
                seen.add(id(value))
                names.append(f"{path}.{name}")
    return names


def named_tensor(module: nn.Module, stored_name: str) -> torch.Tensor:
    path, attribute = stored_name.rsplit(".", 1)
    return getattr(module.get_submodule(path), attribute)


def temporary_leftovers(folder: Path, *expected: str) -> list:
    """The unexpected names in a folder."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in expected)

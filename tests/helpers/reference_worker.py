"""Runs inside a virtual environment with a release of the reference: reads and writes many files in one process.

    python reference_worker.py read FOLDER    reads every *.tensors, in several ways, and prints JSON
    python reference_worker.py place FOLDER   loads every *.tensors into a module, and prints JSON
    python reference_worker.py write FOLDER   writes the cases of ``cases()`` and prints JSON

It uses only the public interface of the reference. The bytes of the cases depend on names alone, so the other side
knows the expected content without a pickle.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")

DTYPES = ["uint8", "int16", "int64", "float16", "float32", "float64", "complex64", "bool", "bfloat16", "float8_e5m2"]


def raw(value) -> bytes:
    value = value.detach().contiguous()
    nbytes = value.numel() * value.element_size()
    return ctypes.string_at(value.data_ptr(), nbytes) if nbytes else b""


def make(name: str, dtype: str, shape) -> torch.Tensor:
    result = torch.empty(shape, dtype=getattr(torch, dtype))
    data = hashlib.shake_128(name.encode()).digest(result.numel() * result.element_size())
    if dtype == "bool":
        data = bytes(byte & 1 for byte in data)
    if data:
        ctypes.memmove(result.data_ptr(), data, len(data))
    return result


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(make("scale", "float32", (3,)))
        self.register_buffer("steps", make("steps", "int64", ()))
        self.register_buffer("cache", make("cache", "float16", (5,)), persistent=False)
        self.inner = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        with torch.no_grad():
            for i, layer in enumerate(self.inner):
                layer.weight.copy_(make(f"w{i}", "uint8", (4, 4)).float())
                layer.bias.copy_(make(f"b{i}", "uint8", (4,)).float())
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner[0].weight


class StatefulNet(Net):
    """A module with extra state, which the reference neither stores nor reads."""

    def __init__(self, state=None) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state) -> None:
        self.state = state


def cases(long_dimensions: bool) -> dict:
    """Maps names to the objects to write: modules and state dicts."""
    found = {
        "dtypes": {dtype: make(dtype, dtype, (3, 5)) for dtype in DTYPES if hasattr(torch, dtype)},
        "scalars": {dtype: make("s" + dtype, dtype, ()) for dtype in DTYPES if hasattr(torch, dtype)},
        "empty": {"e": make("e", "float32", (0, 3)), "f": make("f", "int16", (2,))},
        "names": {name: make(name, "uint8", (9,)) for name in ("a.b", "é", "日本語", "with space", "a\0b", "x" * 5000)},
        "nested": {
            "layers": [
                {"w": make(f"n{i}", "float32", (i + 1,)), "b": [make(f"m{i}", "bfloat16", (2,))]} for i in range(12)
            ],
            "x": {"y": {"z": make("z", "int64", (2, 2))}},
        },
        "list": [make(f"l{i}", "float16", (i + 1, 2)) for i in range(5)],
        "strided": {"t": make("t", "float32", (4, 6)).t(), "s": make("s", "int16", (10, 3))[::2]},
        "large": {f"large{i}": make(f"large{i}", "uint8", (300_000 + i,)) for i in range(4)},
        "many": {f"layers.{i}.weight": make(f"many{i}", "float32", (i % 4 + 1,)) for i in range(400)},
        "meta": {"m": torch.empty((3, 4), device="meta"), "r": make("r", "float32", (2,))},
        "module": Net(),
    }
    if long_dimensions:
        found["long"] = {"long": torch.empty((1 << 32, 0), dtype=torch.int8), "short": make("short", "float32", (2,))}
    return found


def describe(items) -> list:
    rows = []
    for module_idx, kind, name, value in items:
        path = [name] if isinstance(name, str) else list(name)
        digest = hashlib.sha256(raw(value)).hexdigest()
        rows.append([module_idx, int(kind), path, str(value.dtype), list(value.shape), digest])
    return rows


def attempt(path: Path, **options):
    """The content that a release reads from a file, or its error."""
    from tensorizer import TensorDeserializer

    try:
        with TensorDeserializer(str(path), device="cpu", **options) as deserializer:
            return describe(deserializer.read_tensors()) if options.get("lazy_load") else len(list(deserializer.keys()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


WAYS = {
    "one reader": {"lazy_load": True, "num_readers": 1},
    "verified": {"lazy_load": True, "verify_hash": True, "num_readers": 3},
    "eager": {"verify_hash": True},
}


def read(folder: Path) -> dict:
    paths = sorted(folder.glob("*.tensors"))
    return {path.stem: {way: attempt(path, **options) for way, options in WAYS.items()} for path in paths}


def place(folder: Path) -> dict:
    """The parameters of a module of zeros after each file was loaded into it, and the number of tensors."""
    from tensorizer import TensorDeserializer

    found = {}
    for path in sorted(folder.glob("*.tensors")):
        target = StatefulNet("untouched")
        with torch.no_grad():
            for value in target.parameters():
                value.zero_()
        with TensorDeserializer(str(path), device="cpu", verify_hash=True) as deserializer:
            count = deserializer.load_into_module(target)
        state = target.state_dict()
        rest = state.pop("_extra_state")
        found[path.stem] = [count, rest, describe((0, 0, name, value) for name, value in state.items())]
    return found


def write(folder: Path) -> dict:
    from tensorizer import TensorSerializer, __version__

    written = {}
    for name, content in cases(long_dimensions=__version__ >= "2.12").items():
        serializer = TensorSerializer(str(folder / f"{name}.tensors"))
        if isinstance(content, torch.nn.Module):
            serializer.write_module(content)
        else:
            serializer.write_state_dict(content)
        serializer.close()
        written[name] = __version__
    return written


if __name__ == "__main__":
    action = {"read": read, "write": write, "place": place}[sys.argv[1]]
    print(json.dumps(action(Path(sys.argv[2]))))

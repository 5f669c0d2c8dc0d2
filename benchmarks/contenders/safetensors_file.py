"""safetensors. Its CPU tensors are views of the mapped file; where a case wants memory of its own, they are copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contender import Contender, State

if TYPE_CHECKING:
    import torch
from benchmarks.sync import fsync_path


class Safetensors(Contender):
    name = "safetensors"
    label = "safetensors"
    suffix = ".safetensors"
    import_time = True

    def import_library(self) -> None:
        import safetensors.torch  # noqa: F401

    def version(self) -> str:
        import safetensors

        return str(safetensors.__version__)

    def prepare(self, state: State, path: Path) -> None:
        self.save(state, path)

    def load(self, path: Path) -> State:
        return {name: tensor.clone() for name, tensor in self.load_mapped(path).items()}

    load_buffered = load

    def load_mapped(self, path: Path) -> State:
        from safetensors.torch import load_file

        return load_file(path, device="cpu")

    def stream(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        with safe_open(path, framework="pt", device="cpu") as tensors:
            for name in tensors.offset_keys():
                yield name, tensors.get_tensor(name)

    def load_one(self, path: Path, name: str) -> State:
        from safetensors import safe_open

        with safe_open(path, framework="pt", device="cpu") as tensors:
            return {name: tensors.get_tensor(name)}

    def load_gpu(self, path: Path) -> State:
        from safetensors.torch import load_file

        return load_file(path, device="cuda:0")

    def save_gpu(self, state: State, path: Path) -> None:
        self.save(state, path)

    def save(self, state: State, path: Path, *, sync: bool = False) -> None:
        from safetensors.torch import save_file

        save_file(state, path)
        if sync:
            fsync_path(path)

    save_crc32 = save

"""fastsafetensors, which reads safetensors files with many threads into one buffer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.contender import Contender, State

if TYPE_CHECKING:
    import torch


class Fastsafetensors(Contender):
    name = "fastsafetensors"
    label = "fastsafetensors"
    suffix = ".safetensors"
    packages = ("fastsafetensors", "safetensors", "numpy")

    def __init__(self) -> None:
        self._buffers: list[Any] = []  # tensors borrow them

    def import_library(self) -> None:
        import fastsafetensors  # noqa: F401

    def version(self) -> str:
        from importlib.metadata import version

        return version("fastsafetensors")

    def prepare(self, state: State, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(state, path)

    def load(self, path: Path) -> State:
        return self._load(path, "cpu")

    def stream(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._load(path, "cpu").items()

    def load_gpu(self, path: Path) -> State:
        return self._load(path, "cuda:0")

    def _load(self, path: Path, device: str) -> State:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), device=device, nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffer = loader.copy_files_to_device()
        self._buffers.append((loader, buffer))
        return {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}

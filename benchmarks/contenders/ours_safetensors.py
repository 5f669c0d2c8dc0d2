"""This project over ``.safetensors`` files, by the one-line function that users of safetensors know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contender import Contender, HttpPlace, S3Place, State
from benchmarks.contenders.ours import Ours

if TYPE_CHECKING:
    import torch


class OursSafetensors(Contender):
    name = "ours-safetensors"
    label = "this project, .safetensors"
    suffix = ".safetensors"
    role = "variant"

    def __init__(self) -> None:
        self._ours = Ours()

    def import_library(self) -> None:
        self._ours.import_library()
        import tensorizer.torch  # noqa: F401

    def version(self) -> str:
        return self._ours.version()

    def prepare(self, state: State, path: Path) -> None:
        from tensorizer.torch import save_file

        save_file(dict(state), path)

    def load(self, path: Path) -> State:
        from tensorizer.torch import load_file

        return load_file(path)

    def load_mapped(self, path: Path) -> State:
        from tensorizer.torch import load_file

        return load_file(path, mmap=True)

    def stream(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        return self._ours.stream(path)

    def stream_http(self, place: HttpPlace) -> Iterator[tuple[str, torch.Tensor]]:
        return self._ours.stream_http(place)

    def load_one(self, path: Path, name: str) -> State:
        from tensorizer.torch import safe_open

        with safe_open(path) as file:
            return {name: file.get_tensor(name)}

    def load_gpu(self, path: Path) -> State:
        return self._ours.load_gpu(path)

    def load_http(self, place: HttpPlace) -> State:
        from tensorizer.torch import load_file

        return load_file(place.url)

    def open_http(self, place: HttpPlace) -> int:
        return self._ours.open_http(place)

    def load_s3(self, place: S3Place) -> State:
        return self._ours.load_s3(place)

    def convert(self, source: Path, target: Path) -> None:
        from tensorizer import convert

        convert(source, target, format="tensors", check=False)

    def convert_checked(self, source: Path, target: Path) -> None:
        from tensorizer import convert

        convert(source, target, format="tensors")

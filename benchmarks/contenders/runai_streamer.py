"""runai-model-streamer, which reads safetensors files with many threads into one buffer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contender import Contender, State

if TYPE_CHECKING:
    import torch


class RunaiStreamer(Contender):
    name = "runai"
    label = "runai-model-streamer"
    suffix = ".safetensors"
    packages = ("runai-model-streamer", "safetensors", "numpy")

    def import_library(self) -> None:
        import runai_model_streamer  # noqa: F401

    def version(self) -> str:
        from importlib.metadata import version

        return version("runai-model-streamer")

    def prepare(self, state: State, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(state, path)

    def load(self, path: Path) -> State:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return dict(streamer.get_tensors())

    def stream(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            yield from streamer.get_tensors()

    load_direct = load  # it uses O_DIRECT where the file system allows it

    def load_gpu(self, path: Path) -> State:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return {name: tensor.to("cuda:0") for name, tensor in streamer.get_tensors()}

"""No file at all: the same number of parameters made by a Python loop, the limit for many small tensors."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contender import Contender, State


class BarePython(Contender):
    name = "bare-python"
    label = "bare Parameters in Python"
    suffix = ".shapes"
    role = "limit"

    def import_library(self) -> None:
        import torch  # noqa: F401

    def version(self) -> str:
        import torch

        return str(torch.__version__)

    def prepare(self, state: State, path: Path) -> None:
        import json

        path.write_text(json.dumps([[name, list(tensor.shape)] for name, tensor in state.items()]))

    def make_parameters(self, path: Path) -> State:
        import json

        import torch

        return {
            name: torch.nn.Parameter(torch.empty(shape, dtype=torch.float16), requires_grad=False)
            for name, shape in json.loads(path.read_text())
        }

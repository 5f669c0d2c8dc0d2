"""How far a reader has to walk: the files of the package that a call enters, and the calls that one more tensor costs.

``python -m benchmarks.walks`` prints a table. The figures are counts, not times: they are the same on every machine.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import tensorizer
from tensorizer.torch import load_file, save_file

__all__ = ["WALKS", "Walk", "walk"]

PACKAGE = str(Path(tensorizer.__file__).parent)
FEW = 100  # tensors; the second count has twice as many

Doing = Callable[[], Any]


class Walk(NamedTuple):
    """What one call costs a reader.

    Attributes:
        files: Files of the package whose functions were called.
        calls: Python functions of the package that were called for each further tensor.
    """

    files: int
    calls: float


def count(do: Doing) -> tuple[set[str], int]:
    """The files of the package that `do` enters, and its calls of their functions."""
    entered, calls, _ = count_changes(do)
    return entered, calls


def count_changes(do: Doing, threads: bool = False) -> tuple[set[str], int, int]:
    """As :func:`count`, and how often the next call is of a function in another file; other threads if asked for."""
    entered: set[str] = set()
    calls = changes = 0
    last = ""

    def seen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, changes, last
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            entered.add(file)
            calls += 1
            changes += file != last
            last = file

    if threads:
        threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        do()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return entered, calls, changes


def walk(prepare: Callable[[Path, int], Doing]) -> Walk:
    """Prepares and counts a call for some tensors and for twice as many; a first run imports what is imported late."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for step, number in enumerate((FEW, FEW, 2 * FEW)):
            place = Path(folder, str(step))
            place.mkdir()
            found.append(count(prepare(place, number)))
    (_, (entered, few), (_, many)) = found
    return Walk(len(entered), (many - few) / FEW)


def module_of(number: int) -> torch.nn.Module:
    return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(2)) for _ in range(number)])


def load(folder: Path, number: int) -> Doing:
    path = folder / "model.tensors"
    with tensorizer.TensorSerializer(path) as serializer:
        serializer.write_state_dict({str(i): torch.zeros(2) for i in range(number)})
    return lambda: tensorizer.TensorDeserializer(path, device="cpu")


def load_into_module(folder: Path, number: int) -> Doing:
    model, path = module_of(number), folder / "model.tensors"
    with tensorizer.TensorSerializer(path) as serializer:
        serializer.write_module(model)

    def do() -> None:
        with tensorizer.TensorDeserializer(path, device="cpu") as file:
            file.load_into_module(model)

    return do


def torch_load_file(folder: Path, number: int) -> Doing:
    path = folder / "model.safetensors"
    save_file({str(i): torch.zeros(2) for i in range(number)}, path)
    return lambda: load_file(path)


def convert(folder: Path, number: int) -> Doing:
    path = folder / "model.safetensors"
    save_file({str(i): torch.zeros(2) for i in range(number)}, path)
    return lambda: tensorizer.convert(path, folder / "model.tensors")


def from_pretrained(folder: Path, number: int) -> Doing:
    import transformers

    from tensorizer.integrations import huggingface

    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=number // 9,  # tensors of a layer
        num_attention_heads=2,
        vocab_size=8,
    )
    huggingface.save_pretrained(transformers.LlamaForCausalLM(config), folder)
    return lambda: huggingface.from_pretrained(folder)


WALKS: dict[str, Callable[[Path, int], Doing]] = {
    "TensorDeserializer": load,
    "load_into_module": load_into_module,
    "torch.load_file": torch_load_file,
    "convert": convert,
    "from_pretrained": from_pretrained,
}


def main() -> None:
    print("| call | files entered | calls a further tensor |\n|---|---|---|")
    for name, prepare in WALKS.items():
        found = walk(prepare)
        print(f"| `{name}` | {found.files} | {found.calls:.1f} |")


if __name__ == "__main__":
    main()

"""Whole models of ``transformers``: from a folder to a module that is ready for use, in host memory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import memory, models
from benchmarks.case import Bench, Case, Goal


@contextmanager
def model_folder(bench: Bench, file: Path, config: dict[str, Any]) -> Iterator[Path]:
    """A folder as the library has them: the configuration, and the contender's file under the usual name."""
    folder = Path(tempfile.mkdtemp(dir=bench.scratch))
    try:
        (folder / "config.json").write_text(json.dumps(config))
        (folder / f"model{bench.contender.suffix}").symlink_to(file.resolve())
        yield folder
    finally:
        shutil.rmtree(folder)


def pretrained(bench: Bench, hot: bool, used: bool = False) -> float:
    """One load, after another one of a small model, so that nothing is done for the first time.

    Args:
        bench: The run.
        hot: Whether the file is in the page cache.
        used: Reads every parameter, as a first run of the model does; a mapped model reads its file then.
    """
    wake_up(bench)
    (memory.warm_page_cache if hot else memory.drop_page_cache)(bench.path)
    import torch

    with model_folder(bench, bench.path, models.llama_config(bench.manifest)) as folder:
        with bench.clock():
            model = bench.contender.from_pretrained(folder)
            if used:
                for parameter in model.parameters():
                    parameter.detach().view(-1).view(torch.uint8).max()
        bench.check(model.state_dict())
    return bench.seconds


def wake_up(bench: Bench) -> None:
    """The measured call on a network of a few kilobytes."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    state = transformers.LlamaForCausalLM(config).half().state_dict()
    file = Path(tempfile.mkdtemp(dir=bench.scratch)) / f"small{bench.contender.suffix}"
    from tensorizer.torch import save_file

    try:
        save_file({name: torch.as_tensor(tensor) for name, tensor in state.items()}, file)
        values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float16"}
        with model_folder(bench, file, values) as folder:
            bench.contender.from_pretrained(folder)
    finally:
        shutil.rmtree(file.parent)


CASES = (
    Case(
        "pretrained-hot",
        "from_pretrained of a language model, page cache hot",
        "from_pretrained",
        lambda bench: pretrained(bench, hot=True),
        goals=(Goal("transformers", at_least=1.0),),
    ),
    Case(
        "pretrained-cold",
        "from_pretrained of a language model, page cache cold",
        "from_pretrained",
        lambda bench: pretrained(bench, hot=False),
        goals=(Goal("transformers", at_least=1.0),),
    ),
    Case(
        "pretrained-used-cold",
        "from_pretrained of a language model and reading every byte of it, page cache cold",
        "from_pretrained",
        lambda bench: pretrained(bench, hot=False, used=True),
        goals=(Goal("transformers", at_least=1.0),),
    ),
)

"""``tensorizer bench``: how fast a file loads here."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any, Optional

from tensorizer import cli
from tensorizer._io.uri import local_path
from tensorizer.cli.keys import add_key_options, decryption
from tensorizer.cli.options import add_common, stream_options
from tensorizer.cli.output import OK, Output, UsageError, escaped, table

_PEERS = ("safetensors", "torch")


def add_parsers(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure how fast a file loads",
        description="Loads a file several times and prints medians. To compare packages, each in a "
        "separate process, use the benchmarks of the repository.",
    )
    parser.add_argument("file", metavar="FILE", help="a path or URI")
    parser.add_argument("--device", default="cpu", help="the device of the tensors; default: cpu")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="counted runs; default 5")
    parser.add_argument("--cold", action="store_true", help="drop a local file from the page cache before each run")
    parser.add_argument("--readers", metavar="N,N,…", help="numbers of reading threads to compare")
    parser.add_argument("--compare", metavar="NAMES", help="safetensors, torch or both, if they can read the file")
    add_key_options(parser, "the file")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, output: Output) -> int:
    with cli.imports():
        from tensorizer._files.inspect import inspect
    from tensorizer._system.sizes import convert_bytes

    if arguments.repeat < 1:
        raise UsageError("--repeat: wanted 1 or more")
    _check_device(arguments.device)
    options = stream_options(arguments, arguments.file)
    if arguments.cold and local_path(arguments.file) is None:
        raise UsageError("--cold needs a local file: a remote one is not in the page cache of this machine")
    info = inspect(arguments.file, stream_options=options)
    key = decryption(arguments, output, info.encrypted, what=escaped(info.source))
    phases: list[tuple[str, Any]] = []
    for readers in _readers(arguments):
        label = "load" if readers is None else f"load, {readers} readers"
        phases.append((label, _loader(arguments, readers, key, False, options)))
    if info.format != "safetensors":
        phases.append(("load, verified", _loader(arguments, arguments.num_readers, key, True, options)))
    phases += [(name, _peer(name, arguments)) for name in (arguments.compare or "").split(",") if name]
    local_files = _local_files(arguments.file) if arguments.cold else []
    results = []
    for label, action in phases:
        seconds = []
        for repetition in range(arguments.repeat + 1):
            if arguments.cold:
                for path in local_files:
                    with open(path, "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            try:
                action()
            except Exception as error:
                if label not in _PEERS:
                    raise
                output.note(f"{label} cannot read it ({type(error).__name__})")
                break
            if repetition or arguments.cold:  # the first hot run warms up
                seconds.append(time.perf_counter() - begin)
        else:
            results.append((label, seconds))
    if output.json:
        output.document(
            {
                "file": info.source,
                "tensor_nbytes": info.tensor_nbytes,
                "cold": arguments.cold,
                "phases": [{"name": label, "seconds": seconds} for label, seconds in results],
            }
        )
        return OK
    rows = [
        [
            label,
            f"{statistics.median(seconds):.3f} s",
            f"{min(seconds):.3f} – {max(seconds):.3f} s",
            f"{convert_bytes(info.tensor_nbytes / statistics.median(seconds))}/s",
        ]
        for label, seconds in results
    ]
    for line in table(["phase", "median", "range", "rate"], rows, frozenset({1, 2, 3}), output.width()):
        output.line(line)
    return OK


def _check_device(device: str) -> None:
    from tensorizer._load.arguments import target_device

    try:
        target_device(device)
    except RuntimeError as error:
        raise UsageError(f"--device: {error}") from None


def _readers(arguments: argparse.Namespace) -> list[Optional[int]]:
    if arguments.readers is None:
        return [arguments.num_readers]
    try:
        chosen = [int(text) for text in arguments.readers.split(",")]
    except ValueError:
        chosen = [0]
    if min(chosen) < 1:
        raise UsageError(f"--readers: wanted numbers of 1 and more, found {arguments.readers!r}")
    return list(chosen)


def _loader(arguments: argparse.Namespace, readers: Optional[int], key: Any, verify: bool, options: Any) -> Any:
    from tensorizer.deserializer import TensorDeserializer

    def load() -> None:
        TensorDeserializer(
            arguments.file,
            device=arguments.device,
            num_readers=readers,
            verify_hash=verify,
            encryption=key,
            stream_options=options,
        )
        if arguments.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()

    return load


def _peer(name: str, arguments: argparse.Namespace) -> Any:
    if name == "safetensors":
        from safetensors.torch import load_file

        return lambda: {key: tensor.clone() for key, tensor in load_file(arguments.file, arguments.device).items()}
    if name == "torch":
        import torch

        return lambda: torch.load(arguments.file, map_location=arguments.device, weights_only=True)
    raise UsageError(f"--compare: wanted {' or '.join(_PEERS)}, found {name!r}")


def _local_files(place: str) -> list[str]:
    """The files that a load reads: one, or the shards of a folder or an index."""
    from tensorizer._io.access import Access
    from tensorizer._io.shards import OpenedShards, open_files
    from tensorizer._load.open_file import chooser

    opened = open_files(place, None, chooser(Access()))
    opened.close()
    return [shard.name for shard in opened.files.values()] if isinstance(opened, OpenedShards) else [opened.name]

"""Runs the command line in this process, because importing torch takes longer than most commands."""

from __future__ import annotations

import io
import os
import sys
import unittest.mock
from pathlib import Path
from typing import NamedTuple

import samples
import torch

from tensorizer import TensorSerializer
from tensorizer.cli.main import main


class Result(NamedTuple):
    """The result of one command."""

    returncode: int
    stdout: bytes
    stderr: bytes


def run(*arguments, stdin=b"", encoding="utf-8", **environment) -> Result:
    """Runs one command, without the settings of the environment. Its streams are pipes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TENSORIZER_", "AWS_"))}
    streams = [io.TextIOWrapper(io.BytesIO(content), encoding=encoding) for content in (stdin, b"", b"")]
    saved = sys.stdin, sys.stdout, sys.stderr
    with unittest.mock.patch.dict(os.environ, {**clean, **environment}, clear=True):
        sys.stdin, sys.stdout, sys.stderr = streams
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_request:
            status = exit_request.code
        finally:
            for stream in streams[1:]:
                stream.flush()
            sys.stdin, sys.stdout, sys.stderr = saved
    return Result(status, *(stream.buffer.getvalue() for stream in streams[1:]))


KEY = bytes(range(32))


def write(path: Path, tensors, **options) -> Path:
    with TensorSerializer(path, **options) as serializer:
        serializer.write_state_dict(tensors)
    return path


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": samples.tensor((64, 32), torch.float16, 1),
        "layers.0.weight": torch.arange(1024.0).reshape(32, 32),
        "layers.1.weight": samples.tensor((32, 32), torch.float32, 3),
        "steps": torch.tensor(7),
    }


def write_key(path: Path) -> Path:
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path

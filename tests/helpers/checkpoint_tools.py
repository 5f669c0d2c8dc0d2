"""Tools for tests of distributed checkpoints: saves, loads, and the marker of a checkpoint."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch_versions import has_checkpoints

import tensorizer.distributed as td

#: The ``pytestmark`` of every file with such tests.
MARKS = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized"),
    has_checkpoints,
]


def save(state, path, **arguments):
    return dcp.save(state, storage_writer=td.TensorizerWriter(path, **arguments))


def load(state, path, **arguments):
    reader = td.TensorizerReader(path, **arguments)
    dcp.load(state, storage_reader=reader)
    return reader


def marker_in(folder):
    """The head and the body of a marker."""
    head, body = (folder / ".metadata").read_bytes().split(b"\n", 1)
    return json.loads(head), json.loads(body)


def write_marker(folder, head, body):
    """Writes a marker with matching sizes and digest, as anybody can."""
    content = json.dumps(body).encode()
    fitting = {"nbytes": len(content), "content_nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / ".metadata").write_bytes(json.dumps({**head, **fitting}).encode() + b"\n" + content)


def cause_of(error: CheckpointException) -> BaseException:
    (failure,) = {type(f[0]): f[0] for f in error.failures.values()}.values()
    return failure

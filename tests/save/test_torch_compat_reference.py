"""What one side saves under torch_compat, or as protobuf, the other loads: against releases of the reference."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import reference_torch_compat
from conftest import SAMPLED_RELEASES
from torch_versions import RELEASE


@pytest.fixture(params=SAMPLED_RELEASES)
def reference(request, reference_python):
    python = reference_python(request.param)

    def run(*arguments, program=reference_torch_compat.__file__):
        subprocess.run([str(python), str(program), *map(str, arguments)], check=True, timeout=200)

    return run


@pytest.mark.skipif(RELEASE < (2, 2), reason="with torch 2.1 the reference saves without end, up to a RecursionError")
def test_ours_loads_what_the_reference_saved(reference, tmp_path):
    reference("save", tmp_path)
    reference_torch_compat.load(tmp_path)


def test_the_reference_loads_what_ours_saved(reference, tmp_path):
    reference_torch_compat.save(tmp_path)
    reference("load", tmp_path)


PROTOBUF_PROGRAM = """
import sys, torch
from tensorizer import protobuf
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
with open(sys.argv[1], "rb") as file:
    protobuf.deserialize_model(other, file)
for name, tensor in model.state_dict().items():
    assert torch.equal(tensor, other.state_dict()[name]), name
with open(sys.argv[2], "wb") as file:
    protobuf.serialize_model(model, file)
"""


def test_protobuf_models_have_the_same_bytes_on_both_sides(reference_python, tmp_path):
    pytest.importorskip("google.protobuf", reason="the protobuf package is not installed")
    import torch

    from tensorizer import protobuf

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    ours, theirs = Path(tmp_path / "ours.pb"), Path(tmp_path / "theirs.pb")
    with ours.open("wb") as file:
        protobuf.serialize_model(model, file)
    python = reference_python("2.12.1")
    arguments = [str(python), "-c", PROTOBUF_PROGRAM, str(ours), str(theirs)]
    subprocess.run(arguments, check=True, timeout=200, stdout=subprocess.DEVNULL)
    assert theirs.read_bytes() == ours.read_bytes()

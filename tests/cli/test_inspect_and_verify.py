"""``inspect``, ``diff`` and ``verify``: what they read, what they say of it, and what they keep."""

from __future__ import annotations

import gc
import struct

import pytest
import torch
from command_line import flip, run
from torch_versions import has_checkpoints

import tensorizer


def test_tensors_without_data_have_their_dtype_on_every_screen(tmp_path):
    files = [tmp_path / name for name in ("e.tensors", "e.safetensors")]
    empty = {
        "bf16": torch.zeros(0, 3, dtype=torch.bfloat16),
        "fp8": torch.empty(0, dtype=torch.float8_e5m2),
        "some": torch.ones(2),
    }
    for file in files:
        tensorizer.torch.save_file(empty, file)
    shown = [{one.name: one.dtype for one in tensorizer.inspect(file).tensors} for file in files]
    assert shown[0] == shown[1] == {"bf16": "bfloat16", "fp8": "float8_e5m2", "some": "float32"}
    assert tensorizer.diff(*files).ok


def test_inspect_reads_no_record_header_that_it_does_not_need(tmp_path):
    path = tmp_path / "m.tensors"
    tensorizer.torch.save_file({"w": torch.ones(8).to(torch.float8_e5m2)}, path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"float8_e5m2", b"float8_none"))  # in the index and in the header
    assert tensorizer.inspect(path).tensors[0].dtype == "float8_none"
    at = path.read_bytes().rindex(b"float8_none")
    path.write_bytes(path.read_bytes()[: at - 40] + bytes(40) + path.read_bytes()[at:])
    assert tensorizer.inspect(path).tensors[0].dtype == "float8_none"


def test_verify_keeps_nothing_of_tensors_that_do_not_match(tmp_path):
    path = tmp_path / "m.tensors"
    tensorizer.torch.save_file({f"w{i}": torch.full((1000,), 7.5) for i in range(5)}, path)
    path.write_bytes(path.read_bytes().replace(struct.pack("<f", 7.5), struct.pack("<f", 7.25)))
    gc.collect()
    gc.disable()
    try:
        report = tensorizer.verify(path)
        kept = [found for found in gc.get_objects() if type(found) is tensorizer.HashMismatchError]
    finally:
        gc.enable()
    assert len(report.mismatched) == 5
    assert kept == []


@has_checkpoints
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_verify_knows_folders_of_checkpoints(tmp_path):
    import torch.distributed.checkpoint as dcp

    from tensorizer.distributed import TensorizerWriter

    state = {"a": torch.arange(1000.0), "b": torch.ones(1000)}
    dcp.save(state, storage_writer=TensorizerWriter(tmp_path / "step"), no_dist=True)
    result = run("verify", tmp_path / "step")
    assert (result.returncode, b"ok: 2 verified" in result.stdout) == (0, True), result
    (file,) = (tmp_path / "step").glob("*.tensors")
    flip(file, file.stat().st_size - 100)
    result = run("verify", tmp_path / "step")
    assert (result.returncode, b"1 do not match" in result.stdout) == (1, True), result

"""``inspect``, ``diff`` and ``verify``: what they read, what they say of it, and what they keep."""

from __future__ import annotations

import gc
import struct

import torch

import tensorizer


def test_tensors_without_data_have_their_dtype_on_every_screen(tmp_path):
    files = [tmp_path / name for name in ("e.tensors", "e.safetensors")]
    empty = {
        "bf16": torch.zeros(0, 3, dtype=torch.bfloat16),
        "fp8": torch.zeros(0, dtype=torch.float8_e5m2),
        "some": torch.ones(2),
    }
    for file in files:
        tensorizer.torch.save_file(empty, file)
    shown = [{one.name: one.dtype for one in tensorizer.inspect(file).tensors} for file in files]
    assert shown[0] == shown[1] == {"bf16": "bfloat16", "fp8": "float8_e5m2", "some": "float32"}
    assert tensorizer.diff(*files).ok


def test_inspect_reads_no_record_header_that_it_does_not_need(tmp_path):
    path = tmp_path / "m.tensors"
    tensorizer.torch.save_file({"w": torch.ones(8, dtype=torch.float8_e5m2)}, path)
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

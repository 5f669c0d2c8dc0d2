"""Progress of loads and saves: silent by default, a bar or a function on request."""

from __future__ import annotations

import sys

import pytest
import samples
import torch

from tensorizer import TensorDeserializer, load_file, load_stream, save_file
from tensorizer.progress import Progress

STATE = {f"t{i}": torch.randn(1000) for i in range(5)}
TOTAL = 5 * 4000


@pytest.fixture
def path(tmp_path):
    return samples.write_state_dict(tmp_path / "model.tensors", STATE)


def save(path, progress):
    samples.write_state_dict(path, STATE, progress=progress)


def load(path, progress, **arguments):
    return TensorDeserializer(path, device="cpu", progress=progress, **arguments)


def shards_of(path):
    save_file(STATE, path.with_name("model.safetensors"), max_shard_size=9000)
    return path.with_name("model.safetensors.index.json")


WORK = {
    "a load": lambda path, progress: load(path, progress),
    "a load to devices of which one holds no data": lambda path, progress: TensorDeserializer(
        path, device={"t0": "cpu", "": "meta"}, progress=progress
    ),
    "a load of views": lambda path, progress: load(path, progress, mmap=True),
    "a load of views that are compared": lambda path, progress: load(path, progress, mmap=True, verify_hash=True),
    "a load of views that are converted": lambda path, progress: load(path, progress, mmap=True, dtype=torch.float16),
    "load_file": lambda path, progress: load_file(path, progress=progress, mmap=True),
    "load_file of shards": lambda path, progress: load_file(shards_of(path), progress=progress, mmap=True),
    "load_stream": lambda path, progress: dict(load_stream(path, progress=progress, verify=False)),
    "load_stream of shards": lambda path, progress: dict(load_stream(shards_of(path), progress=progress)),
    "a save": lambda path, progress: save(path.with_name("out.tensors"), progress),
}


@pytest.mark.parametrize("work", WORK)
def test_a_function_hears_of_every_byte(path, work):
    reports = []
    WORK[work](path, reports.append)
    assert all(isinstance(report, Progress) for report in reports)
    assert [report.bytes_done for report in reports] == sorted(report.bytes_done for report in reports)
    assert reports[-1].bytes_done == reports[-1].bytes_total == TOTAL
    assert reports[-1].bytes_per_second > 0


def test_a_lazy_load_reports_what_is_read(path):
    reports = []
    with load(path, reports.append, lazy_load=True) as deserializer:
        assert reports == []
        deserializer["t3"]
        assert reports[-1].bytes_done == reports[-1].bytes_total == 4000


def test_an_error_of_the_function_ends_the_work(path, tmp_path):
    def fail(progress):
        raise ConnectionError("the listener has gone")

    with pytest.raises(ConnectionError, match="listener"):
        load(path, fail)
    with pytest.raises(ConnectionError, match="listener"):
        save(tmp_path / "out.tensors", fail)
    assert not (tmp_path / "out.tensors").exists()
    assert len(TensorDeserializer(path, device="cpu")) == 5


def test_a_bar_is_shown_only_when_asked_for(path, tmp_path, capfd):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    load(path, False)
    save(tmp_path / "out.tensors", False)
    assert capfd.readouterr() == ("", "")
    load(path, True)
    assert "loading" in capfd.readouterr().err
    save(tmp_path / "out.tensors", True)
    output = capfd.readouterr()
    assert "saving" in output.err
    assert "100%" in output.err
    assert output.out == ""


def test_without_a_bar_tqdm_is_not_needed(path, tmp_path, monkeypatch):
    for module in ("tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, module, None)  # an import raises from here on
    reports = []
    load(path, reports.append)
    save(tmp_path / "out.tensors", reports.append)
    assert len(reports) >= 2
    with pytest.raises(ImportError, match="pip install tqdm"):
        load(path, True)


@pytest.mark.parametrize("wrong", [5, "bar"])
def test_anything_else_is_refused(path, tmp_path, wrong):
    with pytest.raises(TypeError, match="progress"):
        load(path, wrong)
    with pytest.raises(TypeError, match="progress"):
        save(tmp_path / "out.tensors", wrong)

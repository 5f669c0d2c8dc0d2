"""``TensorizerWriter`` and ``TensorizerReader`` under ``torch.distributed.checkpoint``."""

from __future__ import annotations

import ast
import asyncio
import collections
import importlib.util
import io
import json
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import samples
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_tools import MARKS, cause_of, load, save
from servers.s3_recorder import S3Recorder
from torch.distributed.checkpoint.api import CheckpointException

import tensorizer.distributed as td
from tensorizer import DecryptionParams, EncryptionParams, FormatError, TensorDeserializer

pytestmark = MARKS


LEAVES = {
    "step": 7,
    "lr": 1e-3,
    "odd": [float("nan"), float("inf"), -0.0, 1 << 70, -(1 << 63), True, None],
    "text": "Grüße \ud800",
    "raw": b"\x00\xff",
    "pair": (1, (2.5, "x"), [(), {}]),
    "keys": collections.OrderedDict([("a", "x"), ("b", 2)]),
}


def test_tensors_of_every_kind_and_leaves_come_back_and_no_file_holds_a_pickle(tmp_path):
    torch.manual_seed(0)
    wide = torch.randn(600, 500)
    state = {
        "f32": torch.randn(5, 7),
        "bf16": wide.to(torch.bfloat16).t(),
        "f8": wide.to(torch.float8_e4m3fn),
        "bool": wide > 0,
        "complex": torch.randn(3, 4, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "strided": wide[::2, 1:-1],
        "model": {"w": torch.nn.Parameter(torch.randn(4)), "list": [torch.ones(2), 5]},
        "leaves": LEAVES,
    }
    save(state, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == ".metadata"
    assert re.fullmatch(r"r00000-[0-9a-f]{16}\.tensors", names[1])
    assert len(names) == 2
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert b"PK\x03\x04" not in content
        assert b"\x80\x02" not in content[:64]

    target = {name: torch.zeros_like(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    target["f32"] = torch.zeros(7, 5, dtype=torch.float64).t()  # other strides, another dtype
    target["model"] = {"w": torch.zeros(4), "list": [torch.zeros(2), 0]}
    target["leaves"] = dict.fromkeys(LEAVES) | {"odd": [0] * 7, "pair": (0,), "keys": {"a": 0, "b": 0}}
    reader = load(target, tmp_path, verify_hash=True)
    for name in ("bf16", "f8", "bool", "complex", "scalar", "empty", "strided"):
        assert samples.same(target[name].resolve_conj(), state[name].resolve_conj()), name
    assert torch.equal(target["f32"], state["f32"].double())
    assert torch.equal(target["model"]["w"], state["model"]["w"])
    assert target["model"]["list"][1] == 5
    leaves = dict(target["leaves"])
    assert repr(leaves.pop("odd")) == repr(LEAVES["odd"])
    assert leaves.pop("keys") == {"a": "x", "b": 2}
    assert leaves == {key: value for key, value in LEAVES.items() if key not in ("odd", "keys")}
    assert reader.total_bytes_read > sum(value.nbytes for value in target.values() if isinstance(value, torch.Tensor))

    with TensorDeserializer(tmp_path / names[1], device="cpu", verify_hash=True) as file:
        assert torch.equal(file["strided"], state["strided"])


def test_streams_in_memory_and_scalars_of_numpy_come_back_without_a_pickle(tmp_path):
    large = io.BytesIO(bytes(range(256)) * 40_000)
    large.seek(77)
    state = {"small": io.BytesIO(b"content"), "large": large, "number": np.float32(1.5)}
    save({"w": torch.ones(2), **state}, tmp_path)
    target = {"w": torch.zeros(2), **dict.fromkeys(state)}
    load(target, tmp_path)
    assert target["small"].getvalue() == b"content"
    assert (target["large"].getvalue(), target["large"].tell()) == (large.getvalue(), 77)
    assert (type(target["number"]), target["number"]) == (np.float32, 1.5)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_arrays_of_numbers_come_back_without_a_pickle_and_arrays_of_objects_are_refused(tmp_path, encrypted):
    key = EncryptionParams.random() if encrypted else None
    large = np.random.RandomState(0).randint(0, 1 << 30, (500, 700))  # more than is looked into for JSON
    random = np.random.RandomState(3)
    state = {
        "legacy": random.get_state(),
        "random": random.get_state(legacy=False),
        "generator": np.random.Generator(np.random.MT19937(5)).bit_generator.state,
        "buffer": {"seen": large, "nested": [(np.float16([1.5]), {"ends": np.zeros((0, 3)), "n": 1}), "text"]},
        **{f"as {kind}": np.arange(12).reshape(3, 4).astype(kind) for kind in ("?", "<u4", "<u2", "<c8", "i1", "<g")},
        "number": np.array(2.5),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    save({"w": torch.ones(2), **state}, tmp_path, encryption=key)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        assert b"PK\x03\x04" not in content
        assert encrypted or path.suffix != ".tensors" or large[7].tobytes() in content
        assert not encrypted or large[7].tobytes() not in content
    empty = {"legacy": None, "random": random.get_state(legacy=False), "generator": state["generator"]}
    target = {**dict.fromkeys(state), **empty, "buffer": {"seen": 0, "nested": 0}, "w": torch.zeros(2)}
    load(target, tmp_path, verify_hash=True, encryption=key and DecryptionParams.from_key(key.key))

    def assert_same(found, wanted):
        assert type(found) is type(wanted)
        if isinstance(wanted, dict):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert_same(found[name], value)
        elif isinstance(wanted, (list, tuple)):
            assert len(found) == len(wanted)
            for one, other in zip(found, wanted):
                assert_same(one, other)
        elif isinstance(wanted, np.ndarray):
            assert (found.dtype, found.shape, found.flags.writeable) == (wanted.dtype, wanted.shape, True)
            assert np.array_equal(found, wanted)
        else:
            assert found == wanted

    for name, value in state.items():
        assert_same(target[name], value)
    np.random.RandomState().set_state(target["legacy"])
    assert td.verify(tmp_path, encryption=key and DecryptionParams.from_key(key.key)).ok

    for refused in (np.array([{}], object), np.ma.array([1.0, 2.0], mask=[True, False]), np.zeros(2, "i4,f8")):
        for value in (refused, (refused, 1)):
            with pytest.raises(CheckpointException) as caught:
                save({"w": torch.ones(2), "odd": value}, tmp_path / "refused", encryption=key)
            assert isinstance(cause_of(caught.value), TypeError)
            assert "'odd': a leaf that is more than" in str(cause_of(caught.value))


def test_the_streams_of_a_planner_can_be_closed_after_a_save_and_while_a_refusal_is_kept(tmp_path):
    streams = []

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            data = super().resolve_data(item)
            streams.extend([data] if isinstance(data, io.BytesIO) else [])
            return data

    writer = td.TensorizerWriter(tmp_path)
    dcp.save({"w": torch.ones(2), "number": 7, "numbers": np.ones(3)}, storage_writer=writer, planner=Planner())
    with pytest.raises(CheckpointException) as refusal:
        dcp.save({"w": torch.ones(2), "odd": np.array([{}], object)}, storage_writer=writer, planner=Planner())
    assert isinstance(cause_of(refusal.value), TypeError)
    assert len(streams) == 3
    for stream in streams:
        stream.close()  # raises while a view of the stream is left


def test_records_of_arrays_that_no_save_writes_are_refused():
    from tensorizer.distributed._checkpoint.arrays import pack, unpack

    good = bytes(pack({"a": np.arange(4), "b": (np.ones(3, "<f4"), 1)}).numpy())
    assert unpack(good)["b"][0].tolist() == [1, 1, 1]
    for other in ({"a": b"no array"}, [np.zeros(1), {1, 2}], np.array(["text"])):
        assert pack(other) is None
    texts = (
        *('{"x":["|O",[1],0]}', '{"x":["<f8",[-1],0]}', '{"x":["<f8",[99],0]}', '{"x":["<f8",[1],-8]}', '{"x":[]}'),
        *('[{"x":["<f8",[2],0]},{"x":["<f8",[2],8]}]', '{"x":["<f8","2",0]}', '{"x":["<f8",[1],1.0]}', '{"y":1}', ""),
    )
    hostile = [len(text).to_bytes(8, "little") + text.encode().ljust(120) + bytes(64) for text in texts]
    for data in (*hostile, b"", good[:7], good[:40], good[:-1], (1 << 63).to_bytes(8, "little") + good[8:]):
        with pytest.raises(FormatError):
            unpack(data)


def test_a_target_without_memory_of_its_own_is_filled_by_its_own_copy(tmp_path):
    state = {"w": samples.tensor((300, 300))}
    save(state, tmp_path)
    target = {"w": samples.Wrapper(torch.zeros(300, 300))}
    load(target, tmp_path)
    assert samples.same(target["w"].inner, state["w"])


def test_leaves_beyond_the_marker_and_vetted_objects_come_back(tmp_path):
    state = {"long": list(range(3000)), "device": torch.device("cpu"), "mixed": {"a": (torch.arange(3), 1)}}
    save(state, tmp_path)
    target = {"long": None, "device": None, "mixed": {"a": None}}
    load(target, tmp_path)
    assert target["long"] == state["long"]
    assert target["device"] == torch.device("cpu")
    assert torch.equal(target["mixed"]["a"][0], torch.arange(3))


def test_overwriting_replaces_a_checkpoint_as_a_whole_and_overwrite_false_refuses_before_it_writes(tmp_path):
    writer = td.TensorizerWriter(tmp_path)
    for n in range(3):
        dcp.save({"w": torch.full((10,), float(n))}, storage_writer=writer)
        assert len(list(tmp_path.iterdir())) == 2
    leftovers = [
        "r00007-0123456789abcdef.tensors",
        "__3.metadata",
        ".r00001-0123456789abcdef.tensors.0123456789abcdef.tmp",
    ]
    for name in [*leftovers, "mine.txt", "__0_0.distcp"]:
        (tmp_path / name).write_text("x")
    dcp.save({"w": torch.zeros(10)}, storage_writer=writer)  # deletes what was left, and nothing else
    assert not {path.name for path in tmp_path.iterdir()}.intersection(leftovers)
    assert len(list(tmp_path.iterdir())) == 4
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointException) as caught:
        save({"w": torch.zeros(10)}, tmp_path, overwrite=False)
    assert isinstance(cause_of(caught.value), FileExistsError)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "deep" / "er", storage_writer=writer)
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=tmp_path / "deep" / "er", storage_reader=td.TensorizerReader())
    assert torch.equal(target["w"], torch.ones(3))
    with pytest.raises(ValueError, match="gs"):
        td.TensorizerWriter("gs://bucket/x")


def test_a_save_whose_files_another_save_deleted_raises_and_the_other_checkpoint_stays(tmp_path):
    class Overtaken(td.TensorizerWriter):
        def finish(self, *args, **kwargs):
            save({"w": torch.full((3,), 2.0)}, tmp_path)
            super().finish(*args, **kwargs)

    save({"w": torch.zeros(3)}, tmp_path)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(3)}, storage_writer=Overtaken(tmp_path), no_dist=True)
    assert isinstance(cause_of(caught.value), FileNotFoundError)
    assert "another save" in str(cause_of(caught.value))
    target = {"w": torch.zeros(3)}
    load(target, tmp_path)
    assert torch.equal(target["w"], torch.full((3,), 2.0))


@pytest.mark.parametrize("uri", ["s3://", "s3:///", "s3:///prefix"])
def test_an_s3_uri_without_a_bucket_is_refused_before_anything_is_written(tmp_path, monkeypatch, uri):
    monkeypatch.chdir(tmp_path)
    for refuses in (td.TensorizerWriter, td.TensorizerReader, td.is_complete):
        with pytest.raises(ValueError, match="bucket"):
            refuses(uri)
    with pytest.raises(ValueError, match="bucket"):
        dcp.save({"w": torch.zeros(3)}, checkpoint_id=uri, storage_writer=td.TensorizerWriter())
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tmp_path(tmp_path):
    """In memory, if the system has room for it there: these saves sync thousands of files."""
    room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if room < 4 << 30 or not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def run(fresh_process, program: str, *arguments, timeout: float = 200) -> str:
    result = fresh_process(f"import warnings; warnings.simplefilter('ignore')\n{program}", *arguments, timeout=timeout)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def sampled(often: int, nightly: int):
    """Tests every so many of the cases; the nightly run tests more."""
    return pytest.mark.parametrize("stride", [often, pytest.param(nightly, marks=pytest.mark.slow)])


@sampled(3, 1)
def test_what_any_number_of_ranks_saved_on_any_mesh_loads_on_any_other(fresh_process, tmp_path, stride):
    run(fresh_process, f"import sys, checkpoint_matrix\ncheckpoint_matrix.main(sys.argv[1], {stride})", tmp_path)


@sampled(2, 1)
def test_a_save_that_is_killed_at_any_step_leaves_the_old_checkpoint_or_the_new_one(fresh_process, tmp_path, stride):
    program = f"checkpoint_ranks.kill_one_process_at_any_step(Path(sys.argv[1]), {stride})"
    run(fresh_process, f"import sys, checkpoint_ranks\nfrom pathlib import Path\n{program}", tmp_path)


@sampled(14, 5)
def test_a_save_of_which_one_rank_is_killed_leaves_the_old_checkpoint_or_the_new_one(fresh_process, tmp_path, stride):
    program = f"checkpoint_ranks.kill_one_rank_of_two_at_any_step(Path(sys.argv[1]), {stride})"
    run(fresh_process, f"import sys, checkpoint_ranks\nfrom pathlib import Path\n{program}", tmp_path)


@pytest.mark.parametrize("scenario", ["over_tensor_parallelism", "rows_with_gaps"])
def test_strided_shards_are_saved_and_loaded_right_or_refused(fresh_process, tmp_path, scenario):
    run(fresh_process, f"import sys, checkpoint_matrix\ncheckpoint_matrix.{scenario}(sys.argv[1])", tmp_path)


@pytest.mark.parametrize(
    "scenario",
    [
        "kill_one_rank_of_two",
        "fail_on_one_rank",
        "a_store_that_refuses",
        "damage_between_ranks",
        "other_ways",
        "example",
        "program_of_the_guide",
    ],
)
def test_with_ranks_of_their_own(fresh_process, tmp_path, scenario):
    """The functions of the helper say what they test."""
    program = f"import sys, checkpoint_ranks\nfrom pathlib import Path\ncheckpoint_ranks.{scenario}(Path(sys.argv[1]))"
    run(fresh_process, program, tmp_path)


@pytest.mark.parametrize(
    "scenario",
    [
        "ctrl_c_in_any_phase",
        "keys",
        "altered",
        "in_a_process",
        "by_default_in_the_background",
        "two_in_the_background",
        "boxes",
        "blocks",
        "memory_of_a_save",
    ],
)
def test_conduct(fresh_process, tmp_path, scenario):
    """Ctrl-C leaves no thread and no temporary file; a wrong key is an error on all ranks; memory is bounded."""
    program = f"import sys, checkpoint_conduct as c\nfrom pathlib import Path\nc.{scenario}(Path(sys.argv[1]))"
    run(fresh_process, program, tmp_path)


def test_one_writer_and_one_reader_serve_several_checkpoints_and_go_on_at_the_last_one(tmp_path):
    writer, reader = td.TensorizerWriter(), td.TensorizerReader()
    for number, name in enumerate(("a", "b")):
        dcp.save({"w": torch.full((4,), float(number))}, checkpoint_id=tmp_path / name, storage_writer=writer)
    dcp.save({"w": torch.full((4,), 2.0)}, storage_writer=writer)  # where the last one was
    target = {"w": torch.zeros(4)}
    for name, expected in (("b", 2.0), ("a", 0.0), (None, 0.0)):
        dcp.load(target, checkpoint_id=name and tmp_path / name, storage_reader=reader)
        assert target["w"].tolist() == [expected] * 4
    assert writer.checkpoint_id == tmp_path / "b"
    assert reader.checkpoint_id == tmp_path / "a"
    for nowhere in (
        lambda: dcp.save(target, storage_writer=td.TensorizerWriter()),
        lambda: dcp.load(target, storage_reader=td.TensorizerReader()),
    ):
        with pytest.raises((CheckpointException, AssertionError), match=r"checkpoint_id|Metadata"):
            nowhere()


def test_a_busy_store_is_asked_again_and_of_savers_at_the_same_time_exactly_one_wins(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        state = {"w": torch.arange(1000.0), "step": 1}
        save(state, "s3://bucket/a", **options)
        for answer in ((500, "InternalError"), (503, "SlowDown")):
            store.fail_once.update(dict.fromkeys(("PutObject", "GetObject", "ListObjectsV2", "DeleteObject"), answer))
            save({**state, "step": answer[0]}, "s3://bucket/a", **options)
            assert len(store.objects) == 2
            store.fail_once["GetObject"] = answer
            target = {"w": torch.zeros(1000), "step": 0}
            load(target, "s3://bucket/a", **options)
            assert target["step"] == answer[0]
            assert not store.fail_once

        for attempt in range(4):
            uri = f"s3://bucket/race-{attempt}"
            together = threading.Barrier(3)
            original = td.TensorizerWriter.finish

            def finish(self, *, together=together, original=original, **arguments):
                together.wait(30)  # all of them saw nothing, and wrote their data
                original(self, **arguments)

            monkeypatch.setattr(td.TensorizerWriter, "finish", finish)

            def race(step, uri=uri):
                try:
                    save({**state, "step": step}, uri, overwrite=False, **options)
                except CheckpointException as error:
                    return cause_of(error)
                return step

            with ThreadPoolExecutor(3) as threads:
                outcomes = list(threads.map(race, (1, 2, 3)))
            monkeypatch.setattr(td.TensorizerWriter, "finish", original)
            (winner,) = (outcome for outcome in outcomes if isinstance(outcome, int))
            assert sum(isinstance(outcome, FileExistsError) for outcome in outcomes) == 2, outcomes
            load(target, uri, verify_hash=True, **options)
            assert target["step"] == winner
            save({**state, "step": 4}, uri, **options)  # deletes what the others left
            assert len([name for name in store.objects if f"race-{attempt}/" in name]) == 2


def test_a_saver_that_is_killed_in_its_upload_leaves_the_old_checkpoint_in_the_store(fresh_process, monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        save({"step": 1, "w": torch.arange(4000.0)}, "s3://bucket/c", **options)
        before = dict(store.objects)
        program = """
            import json, os, signal, sys, threading, warnings
            warnings.simplefilter("ignore")
            import torch, torch.distributed.checkpoint as dcp
            import tensorizer.distributed as td
            from tensorizer._io.s3.upload import S3Upload
            original = S3Upload.request
            def request(self, number, *arguments):
                if number >= 2:  # parts, of which one was sent
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(self, number, *arguments)
            S3Upload.request = request
            options = json.loads(sys.argv[1])
            state = {"step": 2, "w": torch.ones(12 << 20)}
            dcp.save(state, storage_writer=td.TensorizerWriter("s3://bucket/c", stream_options=options))
        """
        result = fresh_process(program, json.dumps(store.arguments))
        assert result.returncode == -signal.SIGKILL, result.stderr
        assert store.objects == before
        assert store.open_uploads
        target = {"step": 0, "w": torch.zeros(4000)}
        load(target, "s3://bucket/c", verify_hash=True, **options)
        assert target["step"] == 1


def save_as_ranks(states, path, **arguments):
    """A save by as many ranks as there are states, in this process: the calls that torch makes, and no group."""
    writer = td.TensorizerWriter(path, **arguments)
    planners = [dcp.DefaultSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    plans = writer.prepare_global_plan(plans)
    written = [writer.write_data(planner.finish_plan(plan), planner).value() for planner, plan in zip(planners, plans)]
    writer.finish(metadata, written)


class Forever(dict):
    """Failures that do not end after the first one."""

    def pop(self, name):
        return self[name]


def test_a_store_is_asked_about_several_files_at_a_time_and_the_first_error_counts(monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        uri = "s3://bucket/many"
        save_as_ranks([{f"w{rank}": torch.full((4,), float(rank))} for rank in range(40)], uri, **options)
        assert len(store.objects) == 41
        store.hold_reads = 16
        assert td.is_complete(uri, **options)
        assert store.most_reads == 16
        store.hold_reads = 0
        target = {f"w{rank}": torch.zeros(4) for rank in range(40)}
        load(target, uri, verify_hash=True, **options)
        assert all(float(target[f"w{rank}"][3]) == rank for rank in range(40))
        files = sorted(name for name in store.objects if name.endswith(".tensors"))
        content = store.objects.pop(files[2])
        before = len(store.requests)
        assert not td.is_complete(uri, **options)
        assert len(store.requests) - before <= 1 + 16  # what was not asked about yet is not asked about any more
        store.objects[files[2]] = content[:-1]
        assert not td.is_complete(uri, **options)
        store.objects[files[2]] = content
        store.fail_once = Forever(GetObject=(403, "InvalidAccessKeyId"))
        with pytest.raises(OSError, match=r"InvalidAccessKeyId|403"):
            td.is_complete(uri, **options)


def test_a_save_whose_old_files_cannot_be_deleted_has_succeeded(tmp_path, monkeypatch, caplog):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        save({"w": torch.ones(3), "step": 0}, "s3://bucket/a", **options)
        for step, operation in enumerate(("ListObjectsV2", "DeleteObject"), 1):
            store.fail_once[operation] = (403, "AccessDenied")
            caplog.clear()
            save({"w": torch.ones(3), "step": step}, "s3://bucket/a", **options)
            assert "s3://bucket/a" in caplog.text
            assert "AccessDenied" in caplog.text
            target = {"w": torch.zeros(3), "step": 0}
            load(target, "s3://bucket/a", verify_hash=True, **options)
            assert target["step"] == step
        save({"w": torch.ones(3), "step": 3}, "s3://bucket/a", **options)
        assert len(store.objects) == 2

    (tmp_path / "r00000-0123456789abcdef.tensors").mkdir()  # which no unlink removes
    caplog.clear()
    save({"w": torch.ones(3)}, tmp_path)
    assert "r00000-0123456789abcdef" in caplog.text
    assert td.is_complete(tmp_path)


def test_nothing_is_imported_from_torch_that_its_release_2_3_lacks():
    known = {
        "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
        "TensorProperties TensorStorageMetadata",
        "torch.distributed.checkpoint.planner": "LoadItemType LoadPlan LoadPlanner ReadItem SavePlan SavePlanner "
        "WriteItem WriteItemType",
        "torch.distributed.checkpoint.storage": "StorageReader StorageWriter WriteResult",
        "torch.distributed.checkpoint": "_storage_utils format_utils state_dict_loader state_dict_saver",
    }
    for path in Path(td.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.distributed.checkpoint"):
                new = {alias.name for alias in node.names} - set(known[node.module].split())
                assert not new, (path.name, new)


def test_s3_checkpoints_need_no_rename_and_one_of_two_savers_wins(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with S3Recorder() as store:
        options = {"stream_options": store.arguments}
        uri = "s3://bucket/run/step-1"
        state = {"w": torch.arange(100_000.0), "step": 1}
        for step in (1, 2):
            save({**state, "step": step}, uri, **options)
            assert len(store.objects) == 2
        assert td.is_complete(uri, **options)
        assert td.verify(uri, **options).ok
        target = {"w": torch.zeros(100_000), "step": 0}
        load(target, uri, verify_hash=True, **options)
        assert torch.equal(target["w"], state["w"])
        assert target["step"] == 2
        assert {request.operation for request in store.requests} <= {
            *("PutObject", "GetObject", "HeadObject", "DeleteObject", "ListObjectsV2")
        }
        before = dict(store.objects)
        with pytest.raises(CheckpointException) as caught:
            save(state, uri, overwrite=False, **options)
        assert isinstance(cause_of(caught.value), FileExistsError)
        assert store.objects == before

        # The data of the next one. Refusals that may be meant for a checksum are tried once more without.
        store.fail_once["PutObject"] = (403, "InvalidAccessKeyId")
        with pytest.raises(CheckpointException, match="InvalidAccessKeyId"):
            save(state, uri, **options)
        assert store.objects == before

        # Two savers that both saw nothing: the store decides.
        other = "s3://bucket/run/step-2"
        monkeypatch.setattr(td.TensorizerWriter, "set_up_storage_writer", lambda *_, **__: None)
        save(state, other, overwrite=False, **options)
        with pytest.raises(CheckpointException) as caught:
            save({**state, "step": 9}, other, overwrite=False, **options)
        assert isinstance(cause_of(caught.value), FileExistsError)
        load(target, other, **options)
        assert target["step"] == 1
        monkeypatch.undo()
        nbytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        assert td.dcp_to_files(other, tmp_path / "one.tensors", **options) == [nbytes]


def test_code_that_names_no_storage_uses_ours_in_the_block_and_still_reads_what_torch_wrote(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    state = {"w": torch.arange(10.0), "step": 3}
    dcp.save(state, checkpoint_id=theirs)
    before = dcp.FileSystemWriter

    def loads(path, **how):
        target = {"w": torch.zeros(10), "step": 0}
        dcp.load(target, **(how or {"checkpoint_id": path}))
        assert torch.equal(target["w"], state["w"])
        assert target["step"] == 3

    with td.dcp_default(writer={"hashes": "sha256"}), td.dcp_default():
        dcp.save(state, checkpoint_id=ours)
        writer = dcp.FileSystemWriter(tmp_path / "named", thread_count=4, single_file_per_rank=False, sync_files=False)
        assert isinstance(writer, td.TensorizerWriter)
        dcp.save(state, storage_writer=writer)
        for path in (theirs, ours, tmp_path / "named"):
            loads(path)
            loads(path, storage_reader=dcp.FileSystemReader(path))
    assert dcp.FileSystemWriter is before
    assert sorted(path.suffix for path in ours.iterdir()) == ["", ".tensors"]
    with pytest.raises((CheckpointException, pickle.UnpicklingError), match=r"(?i)metadata|invalid load key"):
        loads(ours)
    loads(theirs)
    with pytest.raises(TypeError), td.dcp_default(writer={"wrong": 1}):
        pass


def test_in_the_block_the_names_of_torchs_storage_are_classes_and_those_derived_from_them_stay_themselves(tmp_path):
    from torch.distributed.checkpoint.staging import AsyncStager
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

    genuine, made_before = dcp.FileSystemWriter, dcp.FileSystemWriter(tmp_path / "before")

    class Before(dcp.FileSystemWriter):
        """Derived before the block."""

    class Mixin:
        """Another base."""

    with td.dcp_default(writer={"hashes": "sha256"}):
        writer, reader = dcp.FileSystemWriter(tmp_path / "ours"), dcp.FileSystemReader(tmp_path / "ours")
        assert isinstance(writer, td.TensorizerWriter)
        assert isinstance(writer, dcp.FileSystemWriter)
        assert isinstance(made_before, dcp.FileSystemWriter)
        assert isinstance(reader, dcp.FileSystemReader)
        assert not isinstance(reader, dcp.FileSystemWriter)
        assert issubclass(dcp.FileSystemWriter, StorageWriter)
        assert issubclass(dcp.FileSystemReader, StorageReader)
        assert issubclass(Before, dcp.FileSystemWriter)
        assert isinstance(dcp.FileSystemWriter, type)

        class Inside(dcp.FileSystemWriter, Mixin):
            def __init__(self, path):
                dcp.FileSystemWriter.__init__(self, path)
                self.written = 0

            def write_data(self, plan, planner):
                self.written += 1
                return super().write_data(plan, planner)

        class InsideReader(dcp.FileSystemReader):
            """Derived in the block."""

        for kind in (Before, Inside):
            theirs = kind(tmp_path / kind.__name__)
            assert type(theirs) is kind
            assert isinstance(theirs, dcp.FileSystemWriter)
            assert not isinstance(theirs, td.TensorizerWriter)
            dcp.save({"w": torch.arange(3.0)}, storage_writer=theirs)
            assert not list(theirs.path.glob("*.tensors"))
            for how in ({"checkpoint_id": theirs.path}, {"storage_reader": InsideReader(theirs.path)}):
                state = {"w": torch.zeros(3)}
                dcp.load(state, **how)
                assert state["w"].tolist() == [0, 1, 2]
        assert theirs.written == 1
        kept_writer, kept_reader = dcp.FileSystemWriter, dcp.FileSystemReader
    for kept in (kept_writer, kept_reader):  # as a module has them that was imported inside the block
        assert not isinstance(kept(tmp_path / "ours"), (td.TensorizerWriter, td.TensorizerReader))
    assert isinstance(kept_writer(tmp_path / "ours"), genuine)
    assert genuine in Inside.__mro__
    assert type(InsideReader(tmp_path)) is InsideReader
    assert dcp.FileSystemWriter is genuine
    assert not isinstance(writer, AsyncStager)  # as before the block: torch would ask it to copy tensors


def test_dcp_default_decorates_coroutines_and_generators(tmp_path):
    state = {"w": torch.full((100,), 7.125)}
    key = EncryptionParams.random()

    @td.dcp_default(writer={"encryption": key})
    async def coroutine(path):
        await asyncio.sleep(0)
        dcp.save(state, checkpoint_id=path)

    @td.dcp_default(writer={"encryption": key})
    async def in_a_thread(path):
        await asyncio.get_running_loop().run_in_executor(None, lambda: dcp.save(state, checkpoint_id=path))

    @td.dcp_default(writer={"encryption": key})
    def generator(path):
        yield dcp.save(state, checkpoint_id=path)
        yield None

    @td.dcp_default(writer={"encryption": key})
    async def async_generator(path):
        yield dcp.save(state, checkpoint_id=path)

    async def drain(path):
        async for _ in async_generator(path):
            pass

    before = dcp.FileSystemWriter
    asyncio.run(coroutine(tmp_path / "1"))
    asyncio.run(in_a_thread(tmp_path / "2"))
    for _ in generator(tmp_path / "3"):
        assert dcp.FileSystemWriter is before  # between its steps
    asyncio.run(drain(tmp_path / "4"))
    for number in "1234":
        files = list((tmp_path / number).iterdir())
        assert sorted(path.suffix for path in files) == ["", ".tensors"]
        assert all(state["w"].numpy().tobytes() not in path.read_bytes() for path in files)


def test_dcp_default_with_a_key_never_lets_a_writer_of_torch_write_in_clear(tmp_path):
    state = {"w": torch.full((100,), 7.125)}
    older = dcp.FileSystemWriter
    with td.dcp_default(writer={"encryption": EncryptionParams.random()}):
        for kind in (older, type("Derived", (older,), {})):
            with pytest.raises(ValueError, match="would ignore encryption="):
                dcp.save(state, storage_writer=kind(tmp_path / "a"))
        if importlib.util.find_spec("fsspec"):
            with pytest.raises(ValueError, match="would ignore encryption="):
                dcp.save(state, checkpoint_id="memory://folder/a")
    assert not (tmp_path / "a").exists()
    with td.dcp_default():
        dcp.save(state, storage_writer=older(tmp_path / "a"))
    assert (tmp_path / "a" / ".metadata").exists()


def test_a_checkpoint_is_there_already_only_where_the_status_says_so(monkeypatch):
    """Not where the number of the status is part of a name."""
    pytest.importorskip("boto3")
    from servers.http_faults import FaultyServer, Reply

    from tensorizer._io.call_options import CallOptions
    from tensorizer.distributed._checkpoint.folder import Folder
    from tensorizer.errors import StreamError, StreamExistsError

    monkeypatch.setenv("TENSORIZER_HTTP_RETRIES", "0")
    keys = {"s3_access_key_id": "AKIDEXAMPLE", "s3_secret_access_key": "not-a-real-key", "s3_region_name": "us-east-1"}
    for status, found in ((503, StreamError), (500, StreamError), (412, StreamExistsError), (409, StreamExistsError)):
        with FaultyServer(b"", default=Reply(status=status)) as server:
            options = {"s3_endpoint": f"http://127.0.0.1:{server.port}", "force_http": True, **keys}
            folder = Folder.at("s3://bucket/run-412", CallOptions.to_write(stream_options=options))
            with pytest.raises(OSError) as caught:
                folder.write(".metadata", b"content", fsync=False, replace=False)
            assert type(caught.value) is found, status
            if found is StreamError:
                assert caught.value.status == status

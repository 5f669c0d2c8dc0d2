"""``load_stream``: the tensors of a model in the order of its files, owned, read ahead in bounded memory."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import threading
import time

import pytest
import torch
from memory import MIB, can_measure, peak_growth
from samples import same
from servers.file_server import serve_folder
from servers.http_faults import FaultyServer

import tensorizer
from tensorizer import DecryptionParams, EncryptionParams, SigningKey, load_stream, save_file
from tensorizer._load import stream as streaming
from tensorizer._load.open_file import OpenFile
from tensorizer.stream_io import HTTPOptions

st = pytest.importorskip("safetensors.torch")

TENSORS = {f"layers.{i}.weight": torch.full((40 + i, 64), 1.5 + i) for i in range(24)} | {"scale": torch.tensor(3.0)}


def order_of(path) -> list:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return sorted(header, key=lambda name: header[name]["data_offsets"][0])


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", max_shard_size=40_000)
    return tmp_path


def shards_of(folder) -> list:
    return sorted(folder.glob("model-*.safetensors"))


def assert_is_all(found) -> None:
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert same(found[name], value), name


@pytest.mark.parametrize("memory", [None, 1, 20_000, "1MB"])
def test_a_folder_gives_what_load_file_gives_of_each_shard_in_its_order(folder, memory):
    got = list(load_stream(folder, memory=memory))
    assert [name for name, _ in got] == [name for shard in shards_of(folder) for name in order_of(shard)]
    expected = {name: value for shard in shards_of(folder) for name, value in st.load_file(shard).items()}
    assert len(shards_of(folder)) > 3
    assert all(torch.equal(value, expected.pop(name)) for name, value in got)
    assert not expected


@pytest.mark.parametrize("form", ["file", "tensors", "encrypted", "signed", "http", "memory", "file URI"])
def test_load_stream_takes_every_kind_of_source(tmp_path, form):
    options, source = {}, tmp_path / "model.safetensors"
    if form in ("tensors", "encrypted", "signed"):
        source, key = tmp_path / "model.tensors", None
        if form == "encrypted":
            key = EncryptionParams.random()
            options["encryption"] = DecryptionParams.from_key(key.key)
        save_file(TENSORS, source, encryption=key)
        if form == "signed":
            signer = SigningKey.from_bytes(bytes(range(32)))
            tensorizer.sign(source, signer)
            options["public_key"] = signer.public_key
    else:
        save_file(TENSORS, source)
    if form == "memory":
        pytest.importorskip("fsspec")
        import fsspec

        fsspec.filesystem("memory").put(str(source), "/load_stream/model.safetensors")
        source = "memory://load_stream/model.safetensors"
    if form == "file URI":
        source = f"file://{source}"
    if form != "http":
        assert_is_all(dict(load_stream(source, **options)))
        return
    with serve_folder(tmp_path) as address:
        assert_is_all(dict(load_stream(address)))
        assert_is_all(dict(load_stream(f"{address}/model.safetensors", memory=1)))


def test_the_only_model_of_a_folder_may_have_any_name(tmp_path):
    save_file(TENSORS, tmp_path / "weights.safetensors")
    assert_is_all(dict(load_stream(tmp_path)))
    save_file(TENSORS, tmp_path / "other.safetensors")
    with pytest.raises(tensorizer.FormatError, match="expected one index or one model file"):
        load_stream(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_is_all(dict(load_stream(tmp_path)))


def test_tensors_are_the_callers_own(folder):
    tensors = []
    for _, value in load_stream(folder, memory=1):
        value.add_(1)  # writes into no file, and into no other tensor
        tensors.append(value)
    assert_is_all({name: value - 1 for name, value in zip((n for n, _ in load_stream(folder)), tensors)})
    assert_is_all(dict(load_stream(folder)))


def test_dtype_and_filter_func_of_load_stream(folder):
    got = dict(load_stream(folder, dtype="float16", filter_func=lambda name: name.endswith("1.weight"), memory=1))
    assert got.keys() == {name for name in TENSORS if name.endswith("1.weight")}
    assert all(torch.equal(value, TENSORS[name].half()) for name, value in got.items())


def test_names_of_one_tensor_get_the_same_tensor(tmp_path):
    save_file({"a": TENSORS["scale"], "b": TENSORS["scale"], "c": TENSORS["layers.1.weight"]}, tmp_path / "m.tensors")
    got = list(load_stream(tmp_path / "m.tensors"))
    assert [name for name, _ in got] == ["a", "b", "c"]
    assert got[0][1] is got[1][1]


def test_no_more_than_memory_is_ahead_of_the_consumer(folder, monkeypatch):
    begun = []
    real = streaming._load_of

    def noted(file, group, progress):
        begun.append(group.nbytes)
        return real(file, group, progress)

    monkeypatch.setattr(streaming, "_load_of", noted)
    memory, taken, most = 60_000, 0, 0
    for _, value in load_stream(folder, memory=memory):
        taken += value.nbytes
        most = max(most, sum(begun) - taken)
    assert len(begun) > 4
    assert 0 < most <= memory


@pytest.mark.parametrize("how", ["close", "drop", "with", "before the first"])
def test_a_stream_that_ends_early_frees_files_and_threads(folder, how):
    def descriptors() -> list:
        return sorted(os.listdir("/proc/self/fd"))

    gc.collect()
    before = len(descriptors())
    stream = load_stream(folder, memory=1)
    if how != "before the first":
        name, value = next(stream)
        assert same(value, TENSORS[name])
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            next(stream)
    del stream
    assert len(descriptors()) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorizer-stream")]


def test_threads_may_share_a_stream(folder):
    found = []
    stream = load_stream(folder, memory=1)
    threads = [threading.Thread(target=lambda: found.extend(stream)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(TENSORS)
    assert_is_all(dict(found))


def test_a_named_file_of_a_server_is_opened_once(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with FaultyServer((tmp_path / "model.safetensors").read_bytes()) as server:
        assert_is_all(dict(load_stream(f"{server.url}/model.safetensors")))
        assert len(server.requests) == 1
    save_file(TENSORS, tmp_path / "sharded" / "model.safetensors", max_shard_size=40_000)
    assert_is_all(dict(load_stream(tmp_path / "sharded" / "model.safetensors.index.json")))


def test_a_forked_process_reads_a_stream_of_its_own(folder):
    stream = load_stream(folder, memory=1)
    found = dict([next(stream)])
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            with pytest.raises(RuntimeError, match=r"call load_stream\(\) in it"):
                next(stream)
            assert_is_all(dict(load_stream(folder, memory=1)))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_is_all({**found, **dict(stream)})


def test_unknown_keywords_of_load_stream_get_a_suggestion(folder):
    for name, meant in {"devise": "device", "torch_dtype": "dtype", "verify_hash": "verify"}.items():
        with pytest.raises(TypeError, match=rf"load_stream\(\) has no argument {name}=; did you mean '{meant}'\?"):
            load_stream(folder, **{name: None})


@pytest.mark.parametrize(("memory", "error"), [(0, ValueError), ("much", ValueError), (1.5, TypeError)])
def test_memory_is_a_size(folder, memory, error):
    with pytest.raises(error, match="memory: expected"):
        load_stream(folder, memory=memory)


def test_the_default_memory_is_a_tenth_of_what_is_left_and_at_least_a_gibibyte(monkeypatch):
    monkeypatch.setattr(streaming.cgroup, "available_nbytes", lambda: 50 << 30)
    assert streaming.default_memory_ahead([torch.device("cpu")]) == 5 << 30
    monkeypatch.setattr(streaming.cgroup, "available_nbytes", lambda: 2 << 30)
    assert streaming.default_memory_ahead([]) == 1 << 30
    cuda = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30 if device.index else 80 << 30, 80 << 30))
    assert streaming.default_memory_ahead(cuda[:1]) == 1 << 30
    assert streaming.default_memory_ahead(cuda) == (4 << 30) // 10


def test_errors_of_load_stream_name_the_file(folder):
    shards_of(folder)[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"index\.json.*model-00002-of-.*missing"):
        load_stream(folder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_stream(folder / "nowhere")


def test_a_shard_that_is_cut_short_is_an_error(folder):
    with open(shards_of(folder)[1], "r+b") as file:
        file.truncate(1000)
    with pytest.raises(tensorizer.FormatError, match="model-00002-of-"):
        list(load_stream(folder))


def test_progress_of_load_stream_is_told_all_bytes(folder):
    told = []
    for _ in load_stream(folder, progress=told.append, memory=1):
        pass
    total = sum(value.nbytes for value in TENSORS.values())
    assert told[-1].bytes_done == told[-1].bytes_total == total
    assert [one.bytes_done for one in told] == sorted(one.bytes_done for one in told)


def test_an_error_of_the_progress_function_ends_the_stream(folder):
    def refuse(progress):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        list(load_stream(folder, progress=refuse, memory=1))


@pytest.mark.parametrize("verify", ["auto", True])
def test_a_flipped_bit_of_a_tensors_file_is_found_by_its_digests(tmp_path, verify):
    path = tmp_path / "model.tensors"
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(tensorizer.HashMismatchError, match=r"model\.tensors"):
        list(load_stream(path, verify=verify))
    assert len(dict(load_stream(path, verify=False))) == len(TENSORS)


def test_load_stream_reads_each_byte_of_a_server_once(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  model.safetensors\n")
    with serve_folder(tmp_path) as address:
        sums = f"{address}/SHA256SUMS"
        with load_stream(f"{address}/model.safetensors", verify=sums, memory=10_000) as stream:
            assert_is_all(dict(stream))
            file = stream.file
            source = file.readers[0].sha256
    assert source == hashlib.sha256(content).hexdigest()


def test_only_the_first_and_the_last_requests_of_a_stream_are_short(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_LEAST_REQUEST_NBYTES", 32 << 10)
    monkeypatch.setattr(streaming, "_REQUEST_NBYTES", 256 << 10)
    save_file({f"{i:04}": torch.zeros(4 << 10) for i in range(1024)}, tmp_path / "model.safetensors")  # 16 MiB

    def requested(load) -> list[int]:
        with FaultyServer((tmp_path / "model.safetensors").read_bytes()) as server:
            load(f"{server.url}/model.safetensors")
            return [end - begin + 1 for begin, end in sorted(request.range for request in server.requests)][1:]

    few = {"http_options": HTTPOptions(connections=4)}  # else their number depends on how fast the server answers
    sizes = requested(lambda address: list(load_stream(address, stream_options=few)))
    assert max(sizes) == 256 << 10
    assert sizes[0] < 256 << 10
    assert sizes[-1] <= 32 << 10
    assert max(requested(tensorizer.load_file)) == 8 << 20


def write_sums(folder):
    lines = [f"{hashlib.sha256(shard.read_bytes()).hexdigest()}  {shard.name}\n" for shard in shards_of(folder)]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder / "SHA256SUMS"


def change_loads(monkeypatch, group_nbytes, before) -> None:
    """Groups have at most so many bytes, and two files are hashed at once.

    `before` is called with each group before it is loaded.
    """
    load_of = streaming._load_of

    def changed(file, group, progress):
        load = load_of(file, group, progress)

        def run():
            before(group)
            return load()

        return run

    monkeypatch.setattr(OpenFile, "files_at_once", 2)
    monkeypatch.setattr(streaming, "_load_of", changed)
    monkeypatch.setattr(streaming, "_GROUP_NBYTES", group_nbytes)


def test_load_stream_hashes_several_files_at_once(folder, monkeypatch):
    both, seen = threading.Barrier(2, timeout=60), set()

    def wait_for_the_other_file(group):
        reader = group.parts[0][0]
        if reader not in seen and len(seen) < 2:
            seen.add(reader)
            both.wait()

    change_loads(monkeypatch, 20_000, wait_for_the_other_file)
    assert_is_all(dict(load_stream(folder, verify=write_sums(folder))))
    assert len(seen) == 2


def test_a_load_that_fails_leaves_no_other_one_waiting_for_its_bytes(folder, monkeypatch):
    refused = []

    def refuse_the_first(group):
        if group.parts[0][0].source_name == str(shards_of(folder)[0]):
            refused.append(group)
            raise RuntimeError("refused")

    change_loads(monkeypatch, 60_000, refuse_the_first)
    with pytest.raises(RuntimeError, match="refused"):
        list(load_stream(folder, verify=write_sums(folder)))
    assert len(refused[0].parts) == 2  # the next group has the rest of the second file


def test_a_stream_that_another_thread_closes_does_not_end_as_if_it_were_complete(folder, monkeypatch):
    begun = threading.Event()

    def wait_for_the_end(group):
        begun.set()
        assert stream._loads._stopped.wait(60)

    change_loads(monkeypatch, 20_000, wait_for_the_end)
    stream = load_stream(folder)
    closer = threading.Thread(target=lambda: (begun.wait(60), stream.close()))
    closer.start()
    with pytest.raises(RuntimeError, match="another thread has closed the stream"):
        next(stream)
    closer.join()


@pytest.mark.slow
@pytest.mark.skipif(not can_measure(), reason="the kernel does not reset the peak of a process")
@pytest.mark.parametrize("keeps", [False, True], ids=["copied", "kept"])
def test_the_host_needs_the_memory_ahead_and_little_more(tmp_path, keeps):
    tensors = {f"layers.{i:02}.weight": torch.full((8 << 20,), float(i), dtype=torch.float16) for i in range(40)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)  # 640 MiB
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    kept = {}
    with peak_growth() as growth:  # files that are compared are read, not mapped
        for name, value in load_stream(path, verify=tmp_path / "SHA256SUMS", memory="64MB"):
            if name == "layers.00.weight":
                time.sleep(1)  # the threads could read everything
            if keeps:
                kept[name] = value
            else:
                tensors[name].copy_(value)
    beyond = growth.peak - sum(value.nbytes for value in kept.values())
    assert beyond <= 64_000_000 + 256 * MIB
    assert all(float(value[-1]) == i for i, value in enumerate((kept or tensors).values()))

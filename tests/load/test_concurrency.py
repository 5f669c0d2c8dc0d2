"""Threads of the caller: one deserializer read from several, many objects at once, and a free interpreter lock."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import random
import threading
import time

import pytest
import samples
import torch
from samples import assert_same, load, tensor

from tensorizer import TensorDeserializer

VALUES = {f"t{i}": tensor((50 + 997 * i,), torch.uint8, seed=i) for i in range(40)}
VALUES["nested"] = tensor((3,))
THREADS = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return samples.write_state_dict(tmp_path_factory.mktemp("concurrency") / "f", VALUES)


@pytest.fixture(params=["path", "memory", "file", "mapped"])
def source(request, path):
    """Opens the file in one of several ways."""

    def open_it(**options):
        if request.param == "mapped":
            return TensorDeserializer(path, device="cpu", mmap=True, **options)
        made = {
            "path": lambda: path,
            "memory": lambda: io.BytesIO(path.read_bytes()),
            "file": lambda: path.open("rb"),
        }
        return TensorDeserializer(made[request.param](), device="cpu", **options)

    return open_it


def in_threads(work, count=THREADS):
    """Runs ``work(i)`` in threads that start together; gives their results, or raises what one of them raised."""
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait(20)
        return work(i)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, i) for i in range(count)]
        return [future.result(60) for future in futures]


def shuffled(i) -> list:
    return random.Random(i).sample(list(VALUES), len(VALUES))


READS = [
    lambda deserializer, i: {name: deserializer[name] for name in shuffled(i)},
    lambda deserializer, i: {name: deserializer.tree((name,)) for name in shuffled(i)},
    lambda deserializer, i: deserializer.tree(),
    lambda deserializer, i: dict(deserializer.items()),
]


@pytest.mark.parametrize("lazy_load", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("reads", [READS[:1], READS], ids=["by key", "in bulk"])
def test_one_object_may_be_read_from_several_threads(source, lazy_load, reads):
    with source(lazy_load=lazy_load, verify_hash=True) as deserializer:
        results = in_threads(lambda i: reads[i % len(reads)](deserializer, i))
        for found in results:
            assert found.keys() == VALUES.keys()
            for name, wanted in VALUES.items():
                assert samples.same(found[name], wanted)
                assert found[name] is results[0][name]  # the cache is one


def test_generators_in_several_threads_yield_right_tensors_only(source):
    with source(lazy_load=True) as deserializer:
        for found in in_threads(lambda i: list(deserializer.read_tensors(cache=bool(i % 2))), 4):
            for _, _, name, value in found:
                assert samples.same(value, VALUES[name])


def test_a_close_while_others_read_gives_tensors_or_a_clear_error(source):
    for delay in (0.0, 0.001, 0.003):
        deserializer = source(lazy_load=True)

        def work(i, deserializer=deserializer, delay=delay):
            if i == 0:
                time.sleep(delay)
                deserializer.close()
                return None
            found = {}
            with contextlib.suppress(RuntimeError, ValueError):
                for name in VALUES:
                    found[name] = deserializer[name]
            return found

        for found in in_threads(work, 4)[1:]:
            for name, value in found.items():
                assert samples.same(value, VALUES[name])


def test_objects_of_their_own_load_at_the_same_time(path):
    def work(i):
        found = load(path, verify_hash=bool(i % 2), num_readers=1 + i % 3, mmap=i == 5)
        assert_same(found, VALUES)

    in_threads(work)


def test_objects_of_their_own_save_at_the_same_time(tmp_path):
    def work(i):
        samples.write_state_dict(tmp_path / str(i), VALUES, fsync=False)

    in_threads(work)
    contents = {(tmp_path / str(i)).read_bytes() for i in range(THREADS)}
    assert len(contents) == 1
    assert_same(load(tmp_path / "0"), VALUES)


def test_saves_of_one_path_at_the_same_time_leave_one_of_the_complete_files(tmp_path):
    path = tmp_path / "f"

    def work(i):
        for step in range(5):
            samples.write_state_dict(path, {f"{i}.{step}": tensor((1000,), seed=i)}, fsync=False)

    in_threads(work, 4)
    assert len(load(path, verify_hash=True)) == 1
    assert samples.temporary_leftovers(tmp_path, "f") == []


def test_a_file_may_be_replaced_while_it_is_loaded_again_and_again(tmp_path):
    path = samples.write_state_dict(tmp_path / "f", {"a": tensor((100_000,), seed=0)})
    stop = threading.Event()

    def work(i):
        if i == 0:
            for step in range(30):
                samples.write_state_dict(path, {"a": tensor((100_000 + step,), seed=step)}, fsync=False)
            stop.set()
            return 0
        count = 0
        while not stop.is_set():
            found = load(path, verify_hash=True)["a"]
            assert samples.same(found, tensor((found.shape[0],), seed=found.shape[0] - 100_000))
            count += 1
        return count

    assert sum(in_threads(work, 3)) > 0


def ticks_during(work) -> int:
    """How often another Python thread gets to run while ``work`` does."""
    count = 0
    stop = threading.Event()

    def tick():
        nonlocal count
        while not stop.is_set():
            count += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    work()
    elapsed = time.monotonic() - begin
    stop.set()
    thread.join()
    assert elapsed > 0.02, "too short to tell"
    return int(count / elapsed)


def test_the_interpreter_lock_is_free_during_loads_and_saves(tmp_path):
    values = {str(i): torch.zeros(32 << 20, dtype=torch.uint8) for i in range(6)}
    path = samples.write_state_dict(tmp_path / "f", values, fsync=False)
    assert ticks_during(lambda: load(path, verify_hash=True)) > 50
    assert ticks_during(lambda: samples.write_state_dict(tmp_path / "g", values, fsync=False)) > 50


def test_a_python_object_may_be_read_while_its_methods_need_the_lock(path):
    class Busy(io.BytesIO):
        def readinto(self, buffer):
            sum(range(2000))
            return super().readinto(buffer)

    def work(i):
        assert_same(load(Busy(path.read_bytes()), num_readers=4), VALUES)

    in_threads(work, 4)

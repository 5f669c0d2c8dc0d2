"""Files that grow by single tensors: what is synced and when, what others see, what the end of a process leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import torch
from samples import assert_same, load, tensor

from tensorizer import TensorSerializer, TensorType

COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>
int syncs, threads, truncations;
int fsync(int fd) { ++syncs; return 0; }
int fdatasync(int fd) { ++syncs; return 0; }
int ftruncate64(int fd, off_t length) {
  ++truncations;
  return ((int (*)(int, off_t))dlsym(RTLD_NEXT, "ftruncate64"))(fd, length);
}
int ftruncate(int fd, off_t length) __attribute__((alias("ftruncate64")));
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
  ++threads;
  return ((int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(RTLD_NEXT, "pthread_create"))(
      thread, attributes, run, argument);
}
"""

COUNTED_LOOP = """
import ctypes, sys, torch
from tensorizer import TensorDeserializer, TensorSerializer
path, fsync = sys.argv[1], sys.argv[2] == "fsync"
counts = ctypes.CDLL(None)
count = lambda name: ctypes.c_int.in_dll(counts, name).value
value = torch.ones(1024)
serializer = TensorSerializer(path, fsync=fsync)
serializer.write_tensor(0, "first", 2, value)
before = {name: count(name) for name in ("syncs", "threads", "truncations")}
for i in range(300):
    serializer.write_tensor(0, f"t{i}", 2, value)
print(*(count(name) - before[name] for name in before))
serializer.close()
print(before["syncs"], count("syncs"))
assert len(TensorDeserializer(path, device="cpu", verify_hash=True)) == 301
"""


def test_a_loop_over_write_tensor_syncs_with_the_name_and_at_the_end_and_starts_no_thread_per_tensor(tmp_path):
    shim = tmp_path / "shim.so"
    compiler = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(shim), "-ldl"]
    subprocess.run(compiler, input=COUNTER, text=True, check=True)
    for mode in ("fsync", "no fsync"):
        run = subprocess.run(
            [sys.executable, "-c", COUNTED_LOOP, str(tmp_path / "f"), mode],
            env={**os.environ, "LD_PRELOAD": str(shim)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        syncs, threads, truncations, first, last = map(int, run.stdout.split())
        if mode == "fsync":
            assert first == 2  # the file and its folder
            assert last - first - syncs == 2  # at the end: the content, and the prologue that counts it
            # a machine that takes seconds for the loop syncs a few times more, once a second at most
            assert syncs <= 20
            assert threads <= 3 * syncs
        else:
            assert (first, last, threads) == (0, 0, 0)
        assert truncations <= syncs + 2


@pytest.mark.parametrize("end", ["close", "drop", "fail"])
def test_single_tensors_of_a_path_are_complete_after_close_and_without_it(tmp_path, end):
    values = {f"t{i}": tensor((50 + i,), seed=i) for i in range(40)}

    def write():
        with contextlib.ExitStack() as stack:
            serializer = TensorSerializer(tmp_path / "f")
            if end != "drop":
                stack.enter_context(serializer)
            for name, value in values.items():
                serializer.write_tensor(0, name, TensorType.STATE_DICT, value)
            if end == "fail":
                raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        write()
    assert_same(load(tmp_path / "f", verify_hash=True), values)


@pytest.mark.parametrize("fsync", [True, False])
def test_what_others_see_is_the_content_of_whole_calls_and_all_of_it_where_nothing_is_synced(tmp_path, fsync):
    path = tmp_path / "f"
    with TensorSerializer(path, fsync=fsync) as serializer:
        for i in range(10):
            serializer.write_tensor(0, f"t{i}", TensorType.STATE_DICT, torch.full((100,), float(i)))
            seen = load(path, verify_hash=True)
            assert list(seen) == [f"t{k}" for k in range(len(seen))]
            assert len(seen) == i + 1 if not fsync or i == 0 else len(seen) >= 1
        serializer.write_state_dict({"all": torch.ones(3)})  # many tensors at once are seen at once, with what waited
        assert len(load(path, verify_hash=True)) == 11


def test_much_data_does_not_wait(tmp_path):
    path = tmp_path / "f"
    with TensorSerializer(path, hashes="crc32") as serializer:
        large = torch.zeros(65 << 20, dtype=torch.uint8)
        for i, value in enumerate([torch.ones(1), torch.ones(2), large]):
            serializer.write_tensor(0, f"t{i}", TensorType.STATE_DICT, value)
        assert list(load(path)) == ["t0", "t1", "t2"]


def test_a_tensor_that_fails_or_needs_another_version_while_others_wait_takes_nothing_with_it(tmp_path):
    path = tmp_path / "f"
    wanted = {f"t{i}": tensor((i + 1,), seed=i) for i in range(20)}
    wanted |= {"wide": torch.empty(1 << 33, 0), "after": torch.ones(5)}
    with TensorSerializer(path) as serializer:
        for name, value in wanted.items():
            serializer.write_tensor(0, name, TensorType.STATE_DICT, value)
            with pytest.raises(ValueError):
                serializer.write_tensor(0, name, TensorType.STATE_DICT, torch.ones(1))
    assert_same(load(path, verify_hash=True), wanted)


def test_a_child_that_inherits_a_growing_file_and_ends_does_not_touch_it(fresh_process, tmp_path):
    program = """
        import gc, os, sys, torch
        from tensorizer import TensorSerializer
        serializer = TensorSerializer(sys.argv[1])
        for i in range(5):
            serializer.write_tensor(0, f"t{i}", 2, torch.ones(100))
        begin, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(begin, 1)  # the parent has closed its file
            del serializer
            gc.collect()
            os._exit(0)
        for i in range(5, 9):
            serializer.write_tensor(0, f"t{i}", 2, torch.ones(100))
        serializer.close()
        os.close(go)
        assert os.waitpid(child, 0)[1] == 0
        """
    done = fresh_process(program, tmp_path / "f")
    assert done.returncode == 0, done.stderr
    assert len(load(tmp_path / "f", verify_hash=True)) == 9


@pytest.mark.parametrize("delay", [0.002, 0.03, 0.1])
def test_a_process_that_is_killed_in_such_a_loop_leaves_whole_calls(fresh_process, tmp_path, delay):
    program = """
        import os, signal, sys, threading, torch
        from tensorizer import TensorSerializer
        serializer = TensorSerializer(sys.argv[1])
        serializer.write_tensor(0, "t0", 2, torch.zeros(1))
        threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        for i in range(1, 1_000_000):
            serializer.write_tensor(0, f"t{i}", 2, torch.full((1 << 18,), float(i)))
        """
    assert fresh_process(program, tmp_path / "f", delay).returncode == -signal.SIGKILL
    found = load(tmp_path / "f", verify_hash=True)
    assert list(found) == [f"t{i}" for i in range(len(found))]
    assert found

"""One serializer in several threads, in signal handlers and in forked children."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tensorizer import TensorDeserializer, TensorSerializer


def test_calls_of_several_threads_on_one_serializer_wait_for_each_other(tmp_path):
    path = tmp_path / "x.tensors"

    def write(n: int) -> None:
        serializer.write_state_dict({f"{n}.{i}": torch.full((1000,), float(n)) for i in range(20)})

    with TensorSerializer(path, fsync=False) as serializer, ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    loaded = TensorDeserializer(path, device="cpu", verify_hash=True)
    assert len(loaded) == 160
    assert all((value == int(name.partition(".")[0])).all() for name, value in loaded.items())


@pytest.mark.parametrize("by", ["progress", "thread", "signal"])
def test_a_close_during_a_write_call_takes_effect_after_it(tmp_path, by):
    path = tmp_path / "x.tensors"
    closers = []

    def close(*_: object) -> None:
        if closers:
            return
        closers.append(threading.Thread(target=serializer.close))
        if by == "thread":
            closers[0].start()
        elif by == "signal":
            signal.raise_signal(signal.SIGUSR1)
        else:
            serializer.close()

    before = signal.signal(signal.SIGUSR1, lambda *_: serializer.close())
    try:
        serializer = TensorSerializer(path, fsync=False, progress=close)
        serializer.write_state_dict({str(i): torch.full((1 << 18,), float(i)) for i in range(20)})
    finally:
        signal.signal(signal.SIGUSR1, before)
    if by == "thread":
        closers[0].join()
    loaded = TensorDeserializer(path, device="cpu", verify_hash=True)
    assert len(loaded) == 20
    with pytest.raises(ValueError, match="closed"):
        serializer.write_state_dict({"more": torch.ones(1)})


def test_a_close_during_a_write_call_that_fails_keeps_the_content_before_it(tmp_path):
    path = tmp_path / "x.tensors"

    def close_and_stop(*_: object) -> None:
        if path.exists():
            serializer.close()
            raise SystemExit

    serializer = TensorSerializer(path, fsync=False, progress=close_and_stop)
    serializer.write_state_dict({"first": torch.ones(1)})
    with pytest.raises(SystemExit):
        serializer.write_state_dict({str(i): torch.ones(1 << 18) for i in range(20)})
    assert list(TensorDeserializer(path, device="cpu")) == ["first"]


def test_a_child_forked_during_a_write_call_of_another_thread_can_close_its_copy(tmp_path):
    path = tmp_path / "x.tensors"
    writing, forked = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        writing.set()
        assert forked.wait(60)

    serializer = TensorSerializer(path, fsync=False, progress=wait)
    thread = threading.Thread(target=serializer.write_state_dict, args=({"x": torch.ones(1 << 18)},))
    thread.start()
    assert writing.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # instead of a hang
        try:
            serializer.close()
        finally:
            os._exit(0)
    forked.set()
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    serializer.close()
    assert list(TensorDeserializer(path, device="cpu", verify_hash=True)) == ["x"]


def test_a_write_call_within_another_one_is_refused(tmp_path):
    path = tmp_path / "x.tensors"
    found = []

    def write_more(*_: object) -> None:
        with pytest.raises(RuntimeError, match="write called from inside another write") as caught:
            serializer.write_state_dict({"more": torch.ones(1)})
        found.append(caught.value)

    with TensorSerializer(path, fsync=False, progress=write_more) as serializer:
        serializer.write_state_dict({"x": torch.ones(1 << 18)})
    assert found
    assert list(TensorDeserializer(path, device="cpu", verify_hash=True)) == ["x"]

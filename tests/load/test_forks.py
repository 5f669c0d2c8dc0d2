"""Children that are forked while a thread of their parent holds a lock that they need: none of them waits for it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, save_file
from tensorizer._load.open_file import OpenFile

VALUES = {"a": torch.arange(1000.0), "b": torch.arange(5000)}


def ends_well_in_child(work: Callable[[], bool]) -> bool:
    """Whether ``work`` returns true in a forked child within a minute."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            os._exit(0 if work() and os.getpid() != parent else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextlib.contextmanager
def held(work: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """A thread that is inside of ``work``, which calls what it gets, as long as the block runs."""
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        done.wait(120)

    thread = threading.Thread(target=work, args=(hold,))
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture
def path(tmp_path):
    save_file(VALUES, tmp_path / "m.tensors")
    return tmp_path / "m.tensors"


def reads_right(file: TensorDeserializer) -> bool:
    return all(torch.equal(file[name], value) for name, value in VALUES.items())


def test_a_child_reads_a_file_object_in_which_a_thread_of_its_parent_reads(path):
    class Slow(io.BytesIO):
        hold: Callable[[], None] = staticmethod(lambda: None)
        process = os.getpid()

        def readinto(self, into):
            if os.getpid() == self.process:
                self.hold()
            return super().readinto(into)

    content = Slow(path.read_bytes())
    with TensorDeserializer(content, device="cpu", lazy_load=True) as file:

        def read(hold: Callable[[], None]) -> None:
            content.hold = hold
            file["a"]

        with held(read):
            assert ends_well_in_child(lambda: reads_right(file))
        assert reads_right(file)


def test_a_child_reads_a_file_of_which_another_thread_holds_the_lock(path):
    with TensorDeserializer(path, device="cpu", lazy_load=True) as file:

        def lock(hold: Callable[[], None]) -> None:
            with file._open_file._lock:
                hold()

        with held(lock):
            assert ends_well_in_child(lambda: reads_right(file))
        assert reads_right(file)


def test_a_child_asks_for_a_key_that_a_thread_of_its_parent_waits_for(tmp_path):
    secret = os.urandom(32)
    save_file(VALUES, tmp_path / "m.tensors", encryption=EncryptionParams(key=secret))
    holds: list[Callable[[], None]] = []
    parent = os.getpid()

    def provider() -> bytes:
        if os.getpid() == parent:
            holds[0]()
        return secret

    params = DecryptionParams.from_provider(provider)

    def load() -> bool:
        with TensorDeserializer(tmp_path / "m.tensors", device="cpu", encryption=params) as file:
            return reads_right(file)

    def wait_for_key(hold: Callable[[], None]) -> None:
        holds.append(hold)
        load()

    with held(wait_for_key):
        assert ends_well_in_child(load)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no lock there any more")
def test_a_child_computes_what_a_thread_of_its_parent_computes(path):
    """A cached property has one lock for all objects."""
    lock = vars(OpenFile)["total_tensor_bytes"].lock

    def compute(hold: Callable[[], None]) -> None:
        with lock:
            hold()

    nbytes = sum(value.nbytes for value in VALUES.values())
    with TensorDeserializer(path, device="cpu", lazy_load=True) as file, held(compute):
        assert ends_well_in_child(lambda: file.total_tensor_bytes == nbytes)

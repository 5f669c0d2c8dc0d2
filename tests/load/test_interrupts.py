"""Ctrl-C, failing sources, fork and interpreter exit: calls end soon, and nothing goes on in the background."""

from __future__ import annotations

import os
import signal
import textwrap

import pytest
import reference_format as fmt
import samples
import torch
from samples import tensor

# Seconds from the signal to the exception. The promise is 0.2 on a machine that has nothing else to do; tests share
# theirs, so the best of three tries counts.
PROMISE = 0.2

PRELUDE = """
import gc, io, os, signal, sys, threading, time
import torch
from tensorizer import TensorDeserializer, TensorSerializer

def tasks():
    return len(os.listdir("/proc/self/task"))

class Trickle(io.BytesIO):
    'A source that takes its time: one small piece per call.'
    started = threading.Event()
    def readinto(self, buffer):
        if self.tell() > 100_000:
            Trickle.started.set()
            time.sleep(0.02)
        return super().readinto(memoryview(buffer).cast("B")[:50_000])
    def read(self, size=-1):
        view = bytearray(max(0, min(size, 50_000)) if size >= 0 else 50_000)
        return bytes(view[:self.readinto(view)])

def slow():
    'The file of the first argument, from a source that takes its time.'
    return Trickle(open(sys.argv[1], "rb").read())

def load_on_another_thread():
    threading.Thread(target=lambda: TensorDeserializer(slow(), device="cpu"), daemon=True).start()
    Trickle.started.wait(20)

class Drip(io.BytesIO):
    'A target that takes its time.'
    started = threading.Event()
    def write(self, data):
        if self.tell() > 300_000:
            Drip.started.set()
            time.sleep(0.02)
        return super().write(bytes(memoryview(data).cast("B")[:50_000]))

def interrupt_when(event, delay):
    sent = []
    def send():
        if event is not None:
            event.wait(20)
        time.sleep(delay)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=send)
    thread.start()
    return thread, sent

def measure(call, event=None, delay=0.1):
    before = tasks()
    thread, sent = interrupt_when(event, delay)
    try:
        call()
    except KeyboardInterrupt:
        caught = time.monotonic()
        thread.join()
        for _ in range(50):
            if tasks() <= before:
                break
            time.sleep(0.01)
        print(f"{caught - sent[0]:.3f} {tasks() - before}")
    else:
        try:
            thread.join()
            time.sleep(1)
        except KeyboardInterrupt:
            pass
        print("finished before the signal")
"""


@pytest.fixture
def run(fresh_process):
    """Runs a program behind the prelude."""

    def run_it(program, *arguments, timeout=60):
        return fresh_process(PRELUDE + textwrap.dedent(program), *arguments, timeout=timeout)

    return run_it


@pytest.fixture
def assert_prints(run):
    """The program ends well, says this, and complains of nothing."""

    def check(output, program, *arguments):
        result = run(program, *arguments)
        assert (result.returncode, result.stdout, result.stderr) == (0, output, "")

    return check


@pytest.fixture
def assert_interrupted(run):
    """Within the promise in the best of three tries, and without a thread left in any."""

    def check(program, *arguments):
        delays = []
        for _ in range(3):
            result = run(program, *arguments)
            assert result.returncode == 0, result.stderr
            assert "finished" not in result.stdout, "the call was over before the signal came"
            delay, threads = result.stdout.split()
            assert int(threads) <= 0, "threads were left"
            delays.append(float(delay))
            if delays[-1] < PROMISE:
                return
        pytest.fail(f"took {delays} s")

    return check


@pytest.fixture(scope="module")
def slow_file(tmp_path_factory):
    """6 MiB, which the slow source needs more than two seconds for."""
    values = {str(i): tensor((1 << 20,), torch.uint8, seed=i) for i in range(6)}
    return samples.write_state_dict(tmp_path_factory.mktemp("slow") / "f.tensors", values)


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    """768 MiB of zeros in a sparse file: long enough to verify that a signal falls into it."""
    path = tmp_path_factory.mktemp("large") / "f.tensors"
    nbytes = 768 << 20
    honest = fmt.Tensor(("zeros",), "|u1", (nbytes,), b"")
    header = bytearray(fmt.encode_header(honest))
    header[-8:] = nbytes.to_bytes(8, "little")
    entry = fmt.encode_entry(honest, 4096 - len(header), 4096)[:-8] + nbytes.to_bytes(8, "little")
    index_nbytes = 4096 - len(header) - fmt.PROLOGUE_NBYTES
    with path.open("wb") as stream:
        stream.write(fmt.encode_prologue(1, 0, nbytes, 1, index_nbytes) + entry)
        stream.seek(4096 - len(header))
        stream.write(header)
        stream.truncate(4096 + nbytes + 8)
    return path


@pytest.mark.parametrize(
    "use",
    [
        "TensorDeserializer(source, device='cpu')",
        "TensorDeserializer(source, device='cpu', num_readers=1, verify_hash=True)",
        "list(TensorDeserializer(source, device='cpu', lazy_load=True).read_tensors())",
        "TensorDeserializer(source, device='cpu', lazy_load=True).tree()",
    ],
    ids=["eager", "verified", "read_tensors", "tree"],
)
def test_ctrl_c_ends_a_load_from_a_slow_object(assert_interrupted, slow_file, use):
    assert_interrupted(f"source = slow(); measure(lambda: {use}, Trickle.started)", slow_file)


@pytest.mark.parametrize("options", ["num_readers=2", "mmap=True"])
def test_ctrl_c_ends_a_load_from_a_file(assert_interrupted, large_file, options):
    program = f"""
    measure(lambda: TensorDeserializer(sys.argv[1], device="cpu", verify_hash=True, {options}), delay=0.08)
    """
    assert_interrupted(program, large_file)


def test_the_deserializer_works_again_after_an_interrupted_read(assert_prints, slow_file):
    program = """
    deserializer = TensorDeserializer(slow(), device="cpu", lazy_load=True)
    thread, _ = interrupt_when(Trickle.started, 0.05)
    try:
        deserializer.tree()
    except KeyboardInterrupt:
        pass
    else:
        raise SystemExit("no interrupt")
    thread.join()
    time.sleep = lambda seconds: None
    print({name: len(value) for name, value in deserializer.items()} == {str(i): 1 << 20 for i in range(6)})
    """
    assert_prints("True\n", program, slow_file)


def test_a_signal_handler_that_does_not_raise_does_not_end_the_load(assert_prints, slow_file):
    program = """
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    thread, _ = interrupt_when(Trickle.started, 0.05)
    with TensorDeserializer(slow(), device="cpu") as deserializer:
        print(len(deserializer), calls)
    thread.join()
    """
    assert_prints("6 [1]\n", program, slow_file)


def test_the_exception_of_a_signal_handler_is_the_one_that_surfaces(assert_prints, slow_file):
    program = """
    def handler(*_):
        raise ZeroDivisionError("time is up")
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        TensorDeserializer(slow(), device="cpu")
    except ZeroDivisionError as error:
        print(error)
    """
    assert_prints("time is up\n", program, slow_file)


def test_ctrl_c_ends_a_save_to_a_slow_object(assert_interrupted):
    program = """
    values = {str(i): torch.zeros(1 << 20, dtype=torch.uint8) for i in range(6)}
    measure(lambda: TensorSerializer(Drip()).write_state_dict(values), Drip.started)
    """
    assert_interrupted(program)


def test_ctrl_c_during_a_save_leaves_the_old_file_and_no_temporary_one(assert_interrupted, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old content")
    program = """
    values = {"zeros": torch.zeros(1 << 30, dtype=torch.uint8)}
    measure(lambda: TensorSerializer(sys.argv[1], fsync=False).write_state_dict(values), delay=0.08)
    gc.collect()
    """
    assert_interrupted(program, path)
    assert path.read_bytes() == b"old content"
    assert samples.temporary_leftovers(tmp_path, "f") == []


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failing_source_ends_the_load_with_its_error_and_no_thread_left(assert_prints, slow_file):
    program = """
    class Fails(Trickle):
        def readinto(self, buffer):
            if self.tell() > 1_000_000:
                raise ZeroDivisionError("gone")
            return super().readinto(buffer)
    before = tasks()
    begin = time.monotonic()
    try:
        TensorDeserializer(Fails(slow().getvalue()), device="cpu", num_readers=4)
    except ZeroDivisionError as error:
        print(error, tasks() - before, time.monotonic() - begin < 2)
    """
    assert_prints("gone 0 True\n", program, slow_file)


def test_loads_and_saves_leave_no_threads_behind(assert_prints, slow_file, tmp_path):
    program = """
    TensorDeserializer(sys.argv[1], device="cpu").close()
    torch.zeros(1 << 22).add_(1)
    before = tasks()
    for i in range(20):
        with TensorDeserializer(sys.argv[1], device="cpu", verify_hash=bool(i % 2), num_readers=4) as deserializer:
            with TensorSerializer(sys.argv[2], fsync=False) as serializer:
                serializer.write_state_dict(deserializer)
    print(tasks() <= before)
    """
    assert_prints("True\n", program, slow_file, tmp_path / "g")


def test_loads_and_saves_go_on_where_no_thread_can_be_made(assert_prints, tmp_path):
    program = """
    import ctypes
    from tensorizer import DecryptionParams, EncryptionParams
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(256)
    libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 47))  # more than there are addresses
    assert libc.pthread_setattr_default_np(attributes) == 0
    torch.set_num_threads(1)
    before = tasks()
    state = {f"t{i}": torch.arange(3_000_000 + i) for i in range(3)}
    encryption = EncryptionParams.random()
    for options in ({}, {"encryption": encryption}):
        with TensorSerializer(sys.argv[1], fsync=False, **options) as serializer:
            serializer.write_state_dict(state)
        keys = {"encryption": DecryptionParams.from_key(encryption.key)} if options else {}
        with TensorDeserializer(sys.argv[1], device="cpu", verify_hash=True, num_readers=4, **keys) as again:
            print(all(torch.equal(value, state[name]) for name, value in again.items()), tasks() <= before)
    """
    assert_prints("True True\n" * 2, program, tmp_path / "g")


# --- exit and fork --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise SystemExit(3)", "os._exit(3)"])
def test_the_interpreter_ends_in_the_middle_of_a_load_on_another_thread(run, slow_file, ending):
    result = run(f"load_on_another_thread(); {ending}", slow_file, timeout=20)
    assert result.returncode == 3, result.stderr
    assert "Fatal" not in result.stderr


def test_the_interpreter_ends_in_the_middle_of_a_generator_and_with_everything_open(assert_prints, slow_file, tmp_path):
    program = """
    deserializer = TensorDeserializer(sys.argv[1], device="cpu", lazy_load=True)
    generator = deserializer.read_tensors()
    kept = [next(generator), next(generator)]
    mapped = TensorDeserializer(sys.argv[1], device="cpu", mmap=True)
    value = mapped["3"]
    serializer = TensorSerializer(sys.argv[2])
    serializer.write_state_dict({"a": value})
    other = TensorSerializer(sys.argv[2] + "2")
    """
    assert_prints("", program, slow_file, tmp_path / "g")
    assert samples.temporary_leftovers(tmp_path, "g") == []


@pytest.mark.parametrize("moment", ["after a load", "during a load"])
def test_a_forked_child_can_load_and_save(assert_prints, slow_file, tmp_path, moment):
    program = """
    import warnings
    warnings.simplefilter("ignore")
    TensorDeserializer(sys.argv[1], device="cpu", num_readers=2).close()
    if sys.argv[3] == "during a load":
        load_on_another_thread()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            with TensorDeserializer(sys.argv[1], device="cpu", verify_hash=True, num_readers=2) as deserializer:
                with TensorSerializer(sys.argv[2]) as serializer:
                    serializer.write_state_dict(deserializer)
            with TensorDeserializer(sys.argv[2], device="cpu") as deserializer:
                status = 0 if len(deserializer) == 6 else 2
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert_prints("0\n", program, slow_file, tmp_path / "g", moment)


def test_a_child_that_is_forked_during_a_load_and_exits_normally_ends_at_once(assert_prints, slow_file):
    program = """
    import warnings
    warnings.simplefilter("ignore")
    load_on_another_thread()
    child = os.fork()
    if child == 0:
        sys.exit(7)
    began = time.monotonic()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, time.monotonic() - began < 5)
    """
    assert_prints("7 True\n", program, slow_file)


def test_a_lazy_object_opened_before_a_fork_serves_parent_and_child(assert_prints, slow_file):
    program = """
    import warnings
    warnings.simplefilter("ignore")
    deserializer = TensorDeserializer(sys.argv[1], device="cpu", lazy_load=True)
    child = os.fork()
    total = sum(int(value.sum()) for value in deserializer.values())
    if child == 0:
        os._exit(total % 251)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == total % 251)
    """
    assert_prints("True\n", program, slow_file)


def test_a_killed_process_leaves_what_it_loaded_intact(run, slow_file):
    before = slow_file.read_bytes()
    program = """
    found = TensorDeserializer(sys.argv[1], device="cpu", mmap=True)["0"]
    found.zero_()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(program, slow_file).returncode == -signal.SIGKILL
    assert slow_file.read_bytes() == before
    assert os.path.getsize(slow_file) > 6 << 20


# --- objects of the caller --------------------------------------------------------------------------------------------


def test_methods_of_a_file_object_run_on_the_thread_of_the_caller(assert_prints, slow_file):
    program = """
    class Bound(io.BytesIO):
        'An object that belongs to a thread.'
        threads = set()
        def close(self):
            self.content = self.getvalue()
            super().close()

    for name in ("readinto", "write", "seek"):
        def method(self, *arguments, original=getattr(io.BytesIO, name)):
            self.threads.add(threading.get_ident())
            return original(self, *arguments)
        setattr(Bound, name, method)

    def work():
        with TensorDeserializer(Bound(open(sys.argv[1], "rb").read()), device="cpu", lazy_load=True) as file:
            state = {name: file[name] for name in file}
        target = Bound()
        with TensorSerializer(target) as serializer:
            serializer.write_state_dict(state)
            serializer.write_state_dict({"more": torch.ones(300_000)})
        again = TensorDeserializer(Bound(target.content), device="cpu", num_readers=4)
        print(all(torch.equal(again[name], state[name]) for name in state))
        print(Bound.threads == {threading.get_ident()})
        Bound.threads.clear()

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    """
    assert_prints("True\nTrue\n" * 2, program, slow_file)


BLOCKED = """
class Blocked(io.BytesIO):
    'An object whose reads end with the process.'
    started = threading.Event()
    def readinto(self, buffer):
        if self.tell() > 0:
            Blocked.started.set()
            {wait}
        return super().readinto(buffer)
data = open(sys.argv[1], "rb").read()
"""


@pytest.mark.parametrize("wait", ["time.sleep(600)", "os.read(os.pipe()[0], 1)"])
def test_ctrl_c_ends_a_load_from_an_object_that_blocks_for_ever(assert_interrupted, slow_file, wait):
    use = 'measure(lambda: TensorDeserializer(Blocked(data), device="cpu"), Blocked.started)'
    assert_interrupted(BLOCKED.format(wait=wait) + use, slow_file)


@pytest.mark.slow
def test_the_interpreter_ends_while_a_daemon_thread_is_in_a_file_object(assert_prints, slow_file):
    program = """
threading.Thread(target=lambda: TensorDeserializer(Blocked(data), device="cpu"), daemon=True).start()
Blocked.started.wait(20)
import atexit
class Late:
    def __del__(self):  # while the interpreter takes itself apart
        time.sleep(4)
sys.late = Late()
"""
    assert_prints("", BLOCKED.format(wait="time.sleep(12)") + program, slow_file)


def test_the_interpreter_ends_while_daemon_threads_wait_for_its_lock(assert_prints, slow_file):
    program = """
from tensorizer import _C
source = _C.FileSource(os.open(sys.argv[1], os.O_RDONLY), "source")
def work():
    while True:
        source.close()  # lets go of the lock and takes it again
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    assert_prints("", program, slow_file)


def test_ctrl_c_ends_a_load_through_a_driver_of_fsspec_that_waits_for_ever(assert_interrupted, slow_file):
    pytest.importorskip("fsspec")
    program = """
    import fsspec
    fs = fsspec.filesystem("memory")
    fs.pipe("/f", open(sys.argv[1], "rb").read())
    started = threading.Event()
    def cat_file(path, start=None, end=None, **options):
        started.set()
        while True:
            time.sleep(0.05)
    def load():
        stream = TensorDeserializer("memory://f", device="cpu", lazy_load=True)
        fs.cat_file = cat_file
        stream.tree()
    measure(load, started)
    """
    assert_interrupted(program, slow_file)

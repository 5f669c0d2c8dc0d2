"""Loads to and saves from CUDA devices: the same claims for a real device and for the fake driver."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import accelerators
import golden_files
import pytest
import samples
import torch
from paths import HELPERS
from servers.file_server import serve_folder

import tensorizer.cuda
from tensorizer import _C, CryptographyError, DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer._load import open_file
from tensorizer._load.open_file import FileReader
from tensorizer._system import cuda_engine
from tensorizer.errors import DeviceError, HashMismatchError, MissingHashError
from tensorizer.weight_sync import WeightFollower, WeightPublisher

MIB = 1 << 20


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    if request.param == "real":
        yield accelerators.RealDevice()
        return
    if torch.cuda.is_available():
        pytest.skip("this process uses a real device")
    driver = accelerators.fake_driver()
    driver.reset()
    driver.set_delay(0, 100)
    device = accelerators.FakeDevice(driver)
    device.install(monkeypatch)
    monkeypatch.setattr(cuda_engine, "_ring_size", (4, 2 * MIB))
    yield device
    driver.reset()
    gc.collect()  # since Python 3.13, tracebacks of interrupted loads are part of cycles
    for index in range(2):
        assert _C.cuda_release_pinned(index)
    assert driver.leaks() == b""


@pytest.fixture
def fake(gpu):
    if gpu.name != "fake":
        pytest.skip("needs what only the fake driver can do")
    return gpu.driver


def written(state, **options) -> io.BytesIO:
    return io.BytesIO(samples.state_dict_bytes(state, **options))


def key_pair(encrypted: bool) -> tuple[dict, dict]:
    """The arguments of a save and of a load."""
    if not encrypted:
        return {}, {}
    encryption = EncryptionParams.random()
    return {"encryption": encryption}, {"encryption": DecryptionParams.from_key(encryption.key)}


def load_golden(golden, device, **options) -> dict:
    file = io.BytesIO(golden_files.read(golden))
    file.seek(golden.get("start", 0))
    return dict(leaves(TensorDeserializer(file, device=device, **golden_files.keys(golden), **options)))


@contextlib.contextmanager
def interrupted(seconds=0.2):
    """Ctrl-C comes so long after the beginning, and ends what is done."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    timer.join()


def on_cpu(file, **options):
    return dict(TensorDeserializer(io.BytesIO(file.getvalue()), device="cpu", **options).items())


def assert_loads_as_on_cpu(gpu, file, **options):
    wanted = on_cpu(file, **options)
    found = gpu.load(io.BytesIO(file.getvalue()), **options)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert samples.same(found[name], tensor.detach()), name


def test_every_dtype_arrives_to_the_bit(gpu):
    state = {f"t{i}": samples.tensor((5, 7), dtype, i) for i, dtype in enumerate(samples.ALL_DTYPES)}
    assert_loads_as_on_cpu(gpu, written(state), verify_hash=True)


def test_tensors_of_odd_sizes_at_odd_offsets_arrive_to_the_bit(gpu):
    state = {f"{i:03}": samples.tensor((i * i + i % 3,), torch.uint8, i) for i in range(80)}
    state.update(scalar=samples.tensor((), torch.float64, 1), empty=torch.empty(0, 5))
    assert_loads_as_on_cpu(gpu, written(state))


def test_a_tensor_larger_than_the_ring_arrives_to_the_bit(gpu, monkeypatch):
    monkeypatch.setattr(cuda_engine, "_ring_size", (2, 2 * MIB))
    state = {"large": samples.tensor((9 * MIB + 13,), torch.uint8), "after": samples.tensor((3,))}
    assert_loads_as_on_cpu(gpu, written(state), verify_hash=True)


def test_twenty_thousand_small_tensors_arrive_to_the_bit(gpu):
    count = 20_000 if gpu.name == "real" else 3_000  # each is a mapping of its own on the fake device
    state = {f"layer.{i}": samples.tensor((1 + i % 9,), torch.int16, i) for i in range(count)}
    assert_loads_as_on_cpu(gpu, written(state))


def leaves(value, path=()):
    """(path, tensor) of everything in a nested object."""
    if isinstance(value, torch.Tensor):
        yield path, value
    else:
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(part, (*path, key))


@golden_files.each(golden_files.distinct(golden_files.select(refused=False)))
def test_every_golden_file_arrives_as_on_the_cpu(gpu, golden, monkeypatch):
    monkeypatch.setattr(cuda_engine, "_ring_size", (2, 2 * MIB))
    wanted, found = load_golden(golden, "cpu"), load_golden(golden, "cuda:0")
    samples.assert_same({path: gpu.fetch(value) for path, value in found.items()}, wanted)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_encrypted_tensors_are_decrypted_on_their_way(gpu, verify, on_device, monkeypatch):
    monkeypatch.setenv("TENSORIZER_CUDA_DECRYPT", "1" if on_device else "0")
    state = {"a": samples.tensor((5 * MIB + 3,), torch.uint8), "b": samples.tensor((7, 3)), "c": samples.tensor(())}
    saving, loading = key_pair(True)
    assert_loads_as_on_cpu(gpu, written(state, **saving), verify_hash=verify, **loading)


def load_encrypted(gpu, damage=None):
    """What a load of two encrypted tensors gives, or the text of its error."""
    state = {"a": samples.tensor((5 * MIB + 3,), torch.uint8), "b": samples.tensor((3 * MIB,), torch.uint8, 2)}
    saving, loading = key_pair(True)
    file = bytearray(written(state, **saving).getvalue())
    if damage is not None:
        file[damage] ^= 1
    try:
        found = gpu.load(io.BytesIO(file), **loading)
    except (CryptographyError, DeviceError) as error:
        return str(error)
    return all(samples.same(found[name], state[name]) for name in state)


def test_the_device_decrypts_where_it_was_told_to(fake, gpu, monkeypatch):
    for setting, launches in [("auto", 0), ("0", 0), ("1", 2 + 2)]:
        monkeypatch.setenv("TENSORIZER_CUDA_DECRYPT", setting)
        fake.reset()
        assert load_encrypted(gpu) is True
        assert fake.calls(b"cuLaunchKernel") >= launches
        assert (fake.calls(b"cuLaunchKernel") > 0) == (launches > 0)


def test_a_forged_chunk_is_refused_in_the_same_words_wherever_it_is_opened(gpu, monkeypatch):
    said = []
    for setting in ("0", "1"):
        monkeypatch.setenv("TENSORIZER_CUDA_DECRYPT", setting)
        said.append(load_encrypted(gpu, damage=-100_000))
        assert load_encrypted(gpu) is True
    assert said[0] == said[1]
    assert "does not match its authentication code" in said[0]


def test_a_load_says_so_where_the_device_was_told_to_decrypt_and_cannot(fake, gpu, monkeypatch):
    monkeypatch.setenv("TENSORIZER_CUDA_DECRYPT", "1")
    fake.fail(b"cuModuleLoadData:1:222")
    assert "cannot decrypt: loading the kernels" in load_encrypted(gpu)
    assert _C.cuda_release_pinned(0)
    assert load_encrypted(gpu) is True


def test_decrypts_on_tells_who_decrypts_and_why(fake, gpu, monkeypatch):
    for setting, why in [("auto", "auto, which means the host"), ("0", "DECRYPT is 0")]:
        monkeypatch.setenv("TENSORIZER_CUDA_DECRYPT", setting)
        decrypts, reason = tensorizer.cuda.decrypts_on("cuda:0")
        assert not decrypts
        assert why in reason
    monkeypatch.setenv("TENSORIZER_CUDA_DECRYPT", "1")
    fake.fail(b"cuModuleLoadData:1:222")
    decrypts, reason = tensorizer.cuda.decrypts_on("cuda:0")
    assert not decrypts
    assert "loading the kernels" in reason
    assert _C.cuda_release_pinned(0)
    assert tensorizer.cuda.decrypts_on(0) == (True, "")


def test_a_wrong_word_for_who_decrypts_is_refused(gpu, monkeypatch):
    monkeypatch.setenv("TENSORIZER_CUDA_DECRYPT", "yes")
    saving, loading = key_pair(True)
    with pytest.raises(ValueError, match="TENSORIZER_CUDA_DECRYPT: expected auto, 0 or 1, got 'yes'"):
        gpu.load(written({"a": samples.tensor((3 * MIB,))}, **saving), **loading)


# ---- dtype= ---------------------------------------------------------------------------------------------------------

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def assert_converted(found, wanted):
    """The bits are those of torch; a NaN is one."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        value, tensor = found[name], tensor.detach()
        assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape), name
        if tensor.dtype in FLOATS:
            assert torch.equal(value.isnan(), tensor.isnan()), name
            value, tensor = value.masked_fill(value.isnan(), 0), tensor.masked_fill(tensor.isnan(), 0)
        assert samples.same(value, tensor), name


@pytest.fixture
def converting(gpu, monkeypatch):
    """On a fake device torch converts in host memory."""
    if gpu.name == "real":
        return
    moved = FileReader._moved

    def moved_on_host(self, entry, tensor, device, plain):
        if device.type == "cpu":
            return moved(self, entry, tensor, device, plain)
        return gpu.put(moved(self, entry, gpu.fetch(tensor), torch.device("cpu"), plain).detach())

    monkeypatch.setattr(FileReader, "_moved", moved_on_host)


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtype_converts_tensors_on_their_device(gpu, converting, monkeypatch, dtype, encrypted):
    state = {f"large.{i}": samples.tensor((1_500_001,), stored, i) for i, stored in enumerate(FLOATS)}
    state.update({f"small.{i}": samples.tensor((i,), FLOATS[i % 4], i) for i in range(40)})
    state.update(whole=samples.tensor((7, 3), torch.int32), flag=torch.ones(3) > 0, scalar=torch.tensor(1.5))
    state.update(empty=torch.empty(0, 5))
    saving, keys = key_pair(encrypted)
    file = written(state, **saving)
    wanted = on_cpu(file, dtype=dtype, **keys)
    for who in ("0", "1"):
        monkeypatch.setenv("TENSORIZER_CUDA_DECRYPT", who)
        for verify in (False, True):
            assert_converted(gpu.load(io.BytesIO(file.getvalue()), dtype=dtype, verify_hash=verify, **keys), wanted)


@golden_files.each(golden_files.distinct(golden_files.select(refused=False)))
def test_every_golden_file_is_converted_as_on_the_cpu(gpu, converting, golden):
    wanted, found = (load_golden(golden, device, dtype=torch.float16) for device in ("cpu", "cuda:0"))
    assert_converted({path: gpu.fetch(value) for path, value in found.items()}, wanted)


def test_a_load_that_converts_needs_memory_for_one_batch_beside_its_tensors(fake, gpu, converting, monkeypatch):
    monkeypatch.setattr(open_file, "_MOVED_NBYTES", 20 * MIB)
    alive, most = {}, []

    def note(*args):
        tensor = allocate(*args)
        if tensor.numel():
            alive[weakref.ref(tensor, lambda gone: alive.pop(gone))] = tensor.numel()
            most.append(sum(alive.values()))
        return tensor

    allocate = cuda_engine.allocate
    monkeypatch.setattr(cuda_engine, "allocate", note)
    state = {f"{i}": samples.tensor((5 * MIB // 2,), torch.float32, i) for i in range(6)}
    found = gpu.load(written(state), dtype=torch.float16)
    assert_converted(found, {name: value.half() for name, value in state.items()})
    assert len(most) == 6
    assert max(most) == 20 * MIB
    assert not alive


def test_one_file_for_two_devices_is_converted_by_both(fake, gpu, converting):
    state = {f"{i}": samples.tensor((MIB + i,), torch.float64, i) for i in range(6)}
    file = written(state)
    found = gpu.load(io.BytesIO(file.getvalue()), device=lambda name: f"cuda:{int(name) % 2}", dtype=torch.float32)
    assert_converted(found, on_cpu(file, dtype=torch.float32))


def test_small_tensors_share_allocations_of_which_each_keeps_at_most_16_mib(gpu, monkeypatch):
    alive = {}

    def note(*args):
        tensor = allocate(*args)
        if tensor.numel():
            alive[weakref.ref(tensor, lambda gone: alive.pop(gone))] = tensor.numel()
        return tensor

    allocate = cuda_engine.allocate
    monkeypatch.setattr(cuda_engine, "allocate", note)
    state = {f"t{i}": samples.tensor((MIB + 40 * i + 3,), torch.uint8, i) for i in range(40)}
    state.update(empty=torch.empty(0, 3), large=samples.tensor((9 * MIB,), torch.uint8))
    on_device = dict(TensorDeserializer(written(state), device="cuda:0").items())
    assert len(alive) == 4
    assert max(alive.values()) <= 16 * MIB
    for name, tensor in on_device.items():
        assert tensor.untyped_storage().nbytes() == state[name].nbytes, name
        assert tensor.data_ptr() % 512 == 0 or not tensor.numel()
        assert samples.same(gpu.fetch(tensor), state[name]), name
    del tensor
    kept = on_device.pop("t0")
    on_device.clear()
    assert len(alive) == 1
    assert samples.same(gpu.fetch(kept), state["t0"])


def test_what_was_decrypted_before_a_damaged_chunk_is_wiped_on_the_device(gpu, monkeypatch):
    allocated = []
    allocate = cuda_engine.allocate
    monkeypatch.setattr(cuda_engine, "allocate", lambda *args: allocated.append(allocate(*args)) or allocated[-1])
    saving, loading = key_pair(True)
    state = {f"t{i}": samples.tensor((9 * MIB + 3,), torch.uint8, i) for i in range(3)}
    damaged = bytearray(written(state, **saving).getvalue())
    damaged[-100] ^= 1
    with pytest.raises(CryptographyError, match="t2"):
        gpu.load(io.BytesIO(damaged), num_readers=1, **loading)
    allocated = [tensor for tensor in allocated if tensor.numel()]
    assert [tensor.numel() for tensor in allocated] == [9 * MIB + 3] * 3
    for tensor in allocated:
        assert not gpu.fetch(tensor.view(torch.uint8)).any()


def test_an_error_does_not_wait_for_work_of_the_callers_stream(gpu, fake):
    encryption = EncryptionParams.random()
    file = written({"a": samples.tensor((MIB,), torch.uint8)}, encryption=encryption)
    fake.hold(None, 0)
    gives_up = threading.Timer(60, fake.let_go)
    gives_up.start()
    try:
        with pytest.raises(CryptographyError):
            gpu.load(file, encryption=DecryptionParams.from_key(bytes(32)))
        assert gives_up.is_alive()
    finally:
        gives_up.cancel()
        fake.let_go()
        fake.wait(None, 0)


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["as stored", "converted"])
def test_a_damaged_tensor_is_named_and_the_next_load_works(gpu, converting, dtype):
    file = written({"a": samples.tensor((MIB,)), "b": samples.tensor((MIB,), seed=1)})
    damaged = bytearray(file.getvalue())
    damaged[-1000] ^= 1
    with pytest.raises(HashMismatchError, match="tensor 'b'"):
        gpu.load(io.BytesIO(damaged), dtype=dtype, verify_hash=True)
    found = gpu.load(io.BytesIO(file.getvalue()), dtype=dtype, verify_hash=True)
    assert_converted(found, on_cpu(file, dtype=dtype))


def test_a_tensor_without_a_digest_is_not_taken_as_verified(gpu):
    state = {"bare": samples.tensor((5, 3)), "empty": torch.empty((0, 3))}
    with pytest.raises(MissingHashError, match="'bare'"):
        gpu.load(written(state, hashes=()), verify_hash=True)
    loaded = gpu.load(written(state, hashes=()), verify_hash=True, allow_missing_hashes=True)
    samples.assert_same(loaded, state)


def test_two_loads_at_once_share_the_ring_and_keep_their_bytes_apart(gpu):
    files = [written({"x": samples.tensor((6 * MIB + i,), torch.uint8, i)}) for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(gpu.load, [io.BytesIO(file.getvalue()) for file in files]))
    samples.assert_same(found, [on_cpu(file) for file in files])


def test_a_load_behind_a_busy_stream_writes_after_it(gpu):
    file = written({f"t{i}": samples.tensor((MIB,), torch.uint8, i) for i in range(6)})
    gpu.keep_busy(200)
    assert_loads_as_on_cpu(gpu, file)


def test_lazy_reads_and_filters_bring_what_was_asked_for(gpu):
    state = {f"t{i}": samples.tensor((1000 + i,), torch.float32, i) for i in range(10)}
    file = written(state)
    found = gpu.load(io.BytesIO(file.getvalue()), filter_func=lambda name: name in ("t2", "t7"))
    assert list(found) == ["t2", "t7"]
    with TensorDeserializer(io.BytesIO(file.getvalue()), device="cuda:0", lazy_load=True) as lazy:
        for name in ("t9", "t0", "t4"):
            assert samples.same(gpu.fetch(lazy[name]), state[name])


def test_a_mapping_spreads_one_file_over_two_devices(gpu):
    if gpu.name == "real" and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    state = {f"{part}.{i}": samples.tensor((300_000 + i,), torch.uint8, i) for part in "ab" for i in range(3)}
    found = gpu.load(written(state), device={"a": "cuda:0", "b": "cuda:1"})
    assert all(samples.same(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("attribute", [18, 100], ids=["integrated", "host-page-tables"])
@pytest.mark.parametrize("verify", [False, True], ids=["plain", "verified"])
def test_a_device_that_shares_the_memory_of_the_host_leaves_no_model_in_the_page_cache(
    gpu, fake, tmp_path, monkeypatch, attribute, verify
):
    memory = pytest.importorskip("benchmarks.memory")
    state = {f"t{i}": torch.randn(1 << 20) for i in range(6)}
    path = samples.write_state_dict(tmp_path / "model.tensors", state)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet stay

    def cached_after_load(**options):
        path.read_bytes()
        if memory.cached_share(path) < 0.99:
            pytest.skip("a file system that does not tell what is cached")
        samples.assert_same(gpu.load(path, verify_hash=verify, **options), state)
        return memory.cached_share(path)

    assert cached_after_load() > 0.99
    fake.unify(attribute)
    assert cached_after_load(direct_io="never") > 0.99
    assert cached_after_load() < 0.05
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cached_after_load() > 0.99


@pytest.mark.parametrize("verify", [False, True])
def test_two_devices_are_served_by_one_load(gpu, fake, tmp_path, monkeypatch, verify):
    """Neither waits for the other: memory of both is asked for before either has all of its own."""
    state = {f"{i}": samples.tensor((9 * MIB + i,), torch.uint8, i) for i in range(8)}
    path = samples.write_state_dict(tmp_path / "model.tensors", state)
    asked, allocate = [], cuda_engine.allocate
    monkeypatch.setattr(
        cuda_engine, "allocate", lambda device, *args: asked.append((device.index, *args)) or allocate(device, *args)
    )
    found = gpu.load(path, device=lambda name: f"cuda:{int(name) >= 4:d}", verify_hash=verify)
    order = [index for index, nbytes, _ in asked if nbytes]
    assert sorted(order) == [0] * 4 + [1] * 4
    assert 1 in order[:4]
    samples.assert_same(found, state)


def test_an_allocation_that_fails_ends_the_load_with_torchs_own_error(gpu, fake, tmp_path, monkeypatch):
    state = {f"{i}": samples.tensor((9 * MIB + i,), torch.uint8, i) for i in range(5)}
    path = samples.write_state_dict(tmp_path / "model.tensors", state)
    allocate = cuda_engine.allocate
    alive: list[weakref.ref] = []
    for nth in (1, 2, 5):

        def fail(device, nbytes, zeros, nth=nth):
            if nbytes and len(alive) + 1 == nth:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory: tried to allocate")
            tensor = allocate(device, nbytes, zeros)
            if nbytes:
                alive.append(weakref.ref(tensor))
            return tensor

        monkeypatch.setattr(cuda_engine, "allocate", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError, match="tried to allocate"):
            gpu.load(path)
        assert not [reference for reference in alive if reference() is not None]
        alive.clear()
        monkeypatch.setattr(cuda_engine, "allocate", allocate)
        samples.assert_same(gpu.load(path), state)


def test_ctrl_c_while_memory_is_allocated_ends_the_load(gpu, fake, tmp_path, monkeypatch):
    state = {f"{i}": samples.tensor((9 * MIB,), torch.uint8, i) for i in range(5)}
    path = samples.write_state_dict(tmp_path / "model.tensors", state)
    allocate, asked = cuda_engine.allocate, []

    def interrupted(*args):
        asked.append(args)
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return allocate(*args)

    monkeypatch.setattr(cuda_engine, "allocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.load(path)


def test_a_file_object_of_python_is_read_while_memory_is_allocated(gpu):
    """Both are done by the thread that called: neither may wait for the other."""
    state = {f"{i}": samples.tensor((9 * MIB + i,), torch.uint8, i) for i in range(4)}

    class Reader(io.BytesIO):
        def readinto(self, buffer):
            time.sleep(0.001)
            return super().readinto(buffer)

    samples.assert_same(gpu.load(Reader(written(state).getvalue())), state)


@pytest.mark.parametrize("slots", [2, 16])
@pytest.mark.parametrize("encrypted", [False, True])
def test_what_comes_over_a_network_arrives_to_the_bit(gpu, monkeypatch, tmp_path, slots, encrypted):
    monkeypatch.setattr(cuda_engine, "_ring_size", (slots, 2 * MIB))
    state = {f"{i}": samples.tensor((5 * MIB + i,), torch.uint8, i) for i in range(8)}
    state.update({f"small{i}": samples.tensor((i,), torch.float32, i) for i in range(50)})
    saving, keys = key_pair(encrypted)
    samples.write_state_dict(tmp_path / "model.tensors", state, **saving)
    with serve_folder(tmp_path) as url:
        for verify in (False, True):
            samples.assert_same(gpu.load(f"{url}/model.tensors", verify_hash=verify, **keys), state)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_file_saved_from_the_device_is_that_saved_from_the_host(gpu, encrypted, tmp_path):
    state = {
        "large": samples.tensor((9 * MIB + 7,), torch.uint8),
        "matrix": samples.tensor((33, 65), torch.bfloat16),
        "scalar": samples.tensor((), torch.float64),
        **{f"small{i}": samples.tensor((i + 1,), torch.int32, i) for i in range(300)},
    }
    saving, loading = key_pair(encrypted)
    on_device = {name: gpu.put(value) for name, value in state.items()}
    gpu.save(tmp_path / "device.tensors", on_device, encryption=saving.get("encryption"))
    samples.assert_same(samples.load(tmp_path / "device.tensors", verify_hash=True, **loading), state)
    if not encrypted:
        with TensorSerializer(tmp_path / "host.tensors") as cpu:
            for name, value in state.items():
                cpu.write_tensor(0, name, 2, value)
        assert (tmp_path / "device.tensors").read_bytes() == (tmp_path / "host.tensors").read_bytes()


def test_weights_of_a_device_are_published_as_those_of_the_host(gpu, tmp_path):
    state = {
        "large": samples.tensor((9 * MIB + 7,), torch.uint8),
        "scalar": samples.tensor((), torch.float64),
        "empty": torch.empty(0, 3),
        **{f"small{i}": samples.tensor((i + 1,), torch.bfloat16, i) for i in range(50)},
    }
    state = dict(sorted(state.items()))
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish({name: gpu.put(value) for name, value in state.items()})
        follower = WeightFollower(tmp_path, None)
        samples.assert_same(follower.tensors, state)
        state["large"][5_000_000] ^= 1
        state["small7"].view(torch.int16)[3] ^= 1
        published = publisher.publish({name: gpu.put(value) for name, value in state.items()})
        assert (published.kind, published.changed) == ("delta", 2)
        assert follower.update().elements == 2
        samples.assert_same(follower.tensors, state)


# ---- what only a real device has ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_memory_that_the_allocator_reuses_is_not_written_before_its_former_owner_is_done():
    state = {f"t{i}": samples.tensor((4 * MIB,), torch.uint8, i) for i in range(8)}
    file = written(state)
    for _ in range(5):
        former = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda:0") for _ in range(8)]
        torch.cuda._sleep(100_000_000)
        for tensor in former:
            tensor.fill_(7)
        del former, tensor
        loaded = TensorDeserializer(io.BytesIO(file.getvalue()), device="cuda:0")
        samples.assert_same({name: value.detach().cpu() for name, value in loaded.items()}, state)


@pytest.mark.gpu
def test_work_after_a_load_sees_the_data_without_synchronising():
    state = {"x": torch.arange(8 * MIB, dtype=torch.int32)}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loaded = TensorDeserializer(written(state), device="cuda:0")
        doubled = loaded["x"] * 2
    stream.synchronize()
    assert torch.equal(doubled.cpu(), state["x"] * 2)


def test_work_given_to_threads_uses_the_current_streams_of_who_gave_it(monkeypatch):
    """torch keeps the current stream for each thread."""
    current = threading.local()

    @contextlib.contextmanager
    def entered(stream):
        before, current.stream = getattr(current, "stream", "default"), stream
        yield
        current.stream = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{current.stream} of {device}")
    monkeypatch.setattr(torch.cuda, "stream", entered)
    found = []
    with entered("side"):
        devices = [torch.device("cpu"), torch.device("cuda:1")]
        work = cuda_engine.on_current_streams(lambda text: found.append((text, current.stream)), devices)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work, "a").result()
    assert found == [("a", "side of cuda:1")]


@pytest.mark.gpu
def test_a_load_while_another_stream_computes_changes_neither():
    file = written({"x": samples.tensor((64 * MIB,), torch.uint8)})
    wanted = on_cpu(file)["x"]
    matrix = torch.randn(2048, 2048, device="cuda:0")
    alone = matrix @ matrix
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = [matrix @ matrix for _ in range(50)]
    loaded = TensorDeserializer(io.BytesIO(file.getvalue()), device="cuda:0")
    assert samples.same(loaded["x"].detach().cpu(), wanted.detach())
    stream.synchronize()
    assert all(torch.equal(result, alone) for result in results)


@pytest.mark.gpu
def test_load_into_module_places_parameters_on_the_device(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
    path = tmp_path / "module.tensors"
    samples.write_module(path, model)
    target = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200)).to("meta")
    TensorDeserializer(path, device="cuda:0").load_into_module(target)
    found = {name: value.cpu() for name, value in target.state_dict().items()}
    samples.assert_same(found, dict(model.state_dict()))


@pytest.mark.gpu
def test_a_save_right_after_computing_writes_what_was_computed(tmp_path):
    value = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda:0")
    torch.cuda._sleep(100_000_000)
    value.fill_(9)
    serializer = TensorSerializer(tmp_path / "x.tensors")
    serializer.write_state_dict({"x": value})
    serializer.close()
    value.fill_(1)
    loaded = TensorDeserializer(tmp_path / "x.tensors", device="cpu", verify_hash=True)
    assert bool((loaded["x"] == 9).all())


@pytest.mark.gpu
def test_a_device_that_is_full_is_an_out_of_memory_error_and_the_next_load_works():
    file = written({"x": samples.tensor((64 * MIB,), torch.uint8)})
    free, _ = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 16 * MIB / free))
    try:
        torch.cuda.empty_cache()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            TensorDeserializer(io.BytesIO(file.getvalue()), device="cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    loaded = TensorDeserializer(io.BytesIO(file.getvalue()), device="cuda:0")
    assert samples.same(loaded["x"].detach().cpu(), on_cpu(file)["x"].detach())


def test_wrong_arguments_about_pinned_memory_are_refused_by_name():
    for name, value in (("slots", 1), ("slot_nbytes", 2 * MIB - 1)):
        with pytest.raises(ValueError, match=f"^{name}: expected 2"):
            tensorizer.cuda.set_pinned_memory(**{name: value})
    for device in ("cpu", "cuda", torch.device("cuda")):
        with pytest.raises(ValueError, match="expected a CUDA device with an index"):
            tensorizer.cuda.release_pinned_memory(device)


def test_pinned_memory_is_there_after_a_load_and_gone_on_request(gpu):
    gpu.load(written({"x": samples.tensor((10,))}))
    pinned = tensorizer.cuda.pinned_memory("cuda:0")
    assert pinned["slots"] == pinned["free_slots"] > 0
    assert pinned["users"] == 0
    assert tensorizer.cuda.release_pinned_memory("cuda:0")
    assert not any(tensorizer.cuda.pinned_memory(0).values())
    assert tensorizer.cuda.release_pinned_memory()


def test_a_ring_has_the_size_that_was_set_until_the_defaults_are_set_again(gpu):
    tensorizer.cuda.set_pinned_memory(slots=3, slot_nbytes=4 * MIB)
    gpu.load(written(SMALL))
    resized = tensorizer.cuda.pinned_memory(0)
    assert (resized["slots"], resized["slot_nbytes"]) == (3, 4 * MIB)
    tensorizer.cuda.set_pinned_memory()
    gpu.load(written(SMALL))
    assert tensorizer.cuda.pinned_memory(0)["slot_nbytes"] == 8 * MIB


# ---- failures, on the fake driver -----------------------------------------------------------------------------------

SMALL = {f"t{i}": samples.tensor((200_000,), torch.uint8, i) for i in range(30)}


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync:2:700", "cuEventQuery:4:999", "cuStreamCreate:1:999"])
def test_a_failing_driver_is_a_device_error_and_the_next_load_works(gpu, fake, call):
    file = written(SMALL)
    fake.fail(call.encode())
    with pytest.raises(DeviceError, match=r"CUDA device 0|CUDA stream"):
        gpu.load(io.BytesIO(file.getvalue()))
    fake.reset()
    assert_loads_as_on_cpu(gpu, file)


def test_memory_that_cannot_be_pinned_makes_a_load_slower_and_never_fail(model_file):
    result = run_script(
        """
        device.driver.fail(b",".join([b"cuMemHostRegister:1:1", b"cuMemHostAlloc:1:1"] * 12))
        device.driver.allow_pageable(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                assert device.load(path, verify_hash=True)["x"].numel() == 30 << 20
        print(*[f"{w.category.__name__} {w.message}" for w in caught], sep="\\n")
        """,
        model_file,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("RuntimeWarning") == 1, result.stdout
    assert "cannot be pinned" in result.stdout


def test_kernels_that_compute_something_else_are_warned_of_once_and_not_used(model_file):
    result = run_script(
        """
        import tensorizer.cuda
        os.environ["TENSORIZER_CUDA_DECRYPT"] = "1"
        device.driver.break_kernels(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                decrypts, why = tensorizer.cuda.decrypts_on("cuda:0")
                assert not decrypts
                assert "when they were tested" in why
                assert tensorizer.cuda.release_pinned_memory("cuda:0")
                device.driver.break_kernels(0)
        print(*[f"{w.category.__name__} {w.message}" for w in caught])
        """,
        model_file,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("RuntimeWarning tensorizer: CUDA device 0: the kernels ") == 1, result.stdout
    assert "this process does not use them" in result.stdout


@pytest.mark.parametrize("lazy", [False, True])
def test_ctrl_c_ends_a_load_behind_work_of_the_caller_that_never_ends(gpu, fake, lazy):
    """Even a single small tensor, which is otherwise read in the calling thread."""
    file = written({"x": samples.tensor((40 * MIB,), torch.uint8), "small": samples.tensor((10,))})
    fake.hold(None, 0)
    began = time.monotonic()
    try:
        with interrupted(0.3):
            TensorDeserializer(io.BytesIO(file.getvalue()), device="cuda:0", lazy_load=lazy)["small"]
        assert time.monotonic() - began < 60  # a second on a machine that has nothing else to do
    finally:
        fake.let_go()
        fake.wait(None, 0)
    assert_loads_as_on_cpu(gpu, file)


def test_a_loop_over_single_tensors_makes_no_streams_events_or_threads(gpu, fake, tmp_path):
    state = {f"t{i}": samples.tensor((1000 + i,), torch.float32, i) for i in range(40)}
    path = samples.write_state_dict(tmp_path / "many.tensors", state)
    lazy = TensorDeserializer(path, device="cuda:0", lazy_load=True)
    first = gpu.fetch(lazy["t0"])
    assert samples.same(first, state["t0"])
    calls = {name: fake.calls(name) for name in (b"cuStreamCreate", b"cuEventCreate", b"cuMemHostRegister")}
    threads = len(os.listdir("/proc/self/task"))
    for name, value in state.items():
        assert samples.same(gpu.fetch(lazy[name]), value)
        assert len(os.listdir("/proc/self/task")) <= threads
    assert {name: fake.calls(name) for name in calls} == calls
    lazy.close()


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["as stored", "converted"])
def test_ctrl_c_ends_a_load_with_copies_in_flight_and_the_next_load_works(gpu, fake, converting, dtype):
    file = written({"x": samples.tensor((10 * MIB,))})
    fake.set_delay(120_000, 120_000)  # of each copy of a MiB: 1.2 s in all on four streams
    with interrupted():
        gpu.load(io.BytesIO(file.getvalue()), dtype=dtype)
    fake.set_delay(0, 0)
    assert_converted(gpu.load(io.BytesIO(file.getvalue()), dtype=dtype), on_cpu(file, dtype=dtype))


def run_script(text: str, path) -> subprocess.CompletedProcess:
    """Runs a script in a process of its own, with the fake driver's ``device`` and the ``path`` of a model."""
    accelerators.build_fake_driver()
    head = """
        import os, sys, threading, time, warnings
        sys.path.insert(0, os.environ["HELPERS"])
        import accelerators, pytest, torch, tensorizer.cuda
        tensorizer.cuda.set_pinned_memory(slot_nbytes=2 << 20)
        device = accelerators.FakeDevice(accelerators.fake_driver())
        device.install(pytest.MonkeyPatch())
        path = os.environ["MODEL"]
        """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(text)],
        env=dict(os.environ, HELPERS=str(HELPERS), MODEL=str(path)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def model_file(tmp_path):
    return samples.write_state_dict(tmp_path / "model.tensors", {"x": samples.tensor((30 * MIB,), torch.uint8)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a real device")
def test_the_interpreter_ends_cleanly_with_a_load_in_flight(model_file):
    result = run_script(
        """
        device.driver.set_delay(30_000, 30_000)
        device.driver.kept = []
        # Far from the end of the load: torch itself aborts in such a thread.
        tensorizer.cuda.set_pinned_memory(slots=2, slot_nbytes=2 << 20)
        threading.Thread(target=device.load, args=(path,), daemon=True).start()
        deadline = time.monotonic() + 60
        while device.driver.calls(b"cuMemcpyHtoDAsync") == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        print("copies", device.driver.calls(b"cuMemcpyHtoDAsync") > 0)
        """,
        model_file,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "copies True\n", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a real device")
def test_importing_does_not_touch_the_driver_so_a_forked_child_may_use_it_and_all_ends_cleanly_at_exit(model_file):
    result = run_script(
        """
        import tensorizer._io.node_cache, tensorizer._io.upload_on_close  # what they do at exit is registered here
        child = os.fork()
        if child == 0:
            assert device.load(path)["x"].numel() == 30 << 20
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert device.load(path)["x"].numel() == 30 << 20
        """,
        model_file,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a real device")
def test_a_forked_child_gets_an_error_that_names_spawn_and_the_parent_goes_on(model_file):
    result = run_script(
        """
        before = device.load(path)
        warnings.simplefilter("ignore")  # Python 3.12 and later warn that our threads live
        child = os.fork()
        if child == 0:
            try:
                device.load(path)
            except Exception as error:
                sys.exit(0 if type(error).__name__ == "DeviceError" and "spawn" in str(error) else 1)
            sys.exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(device.load(path)["x"], before["x"])
        """,
        model_file,
    )
    assert (result.returncode, result.stderr) == (0, "")

"""How much memory loads and saves take, what a surviving tensor keeps alive, and that nothing leaks."""

from __future__ import annotations

import textwrap

import memory
import pytest
import samples
import torch
from paths import HELPERS
from samples import tensor

from tensorizer.torch import save_file

pytestmark = [
    pytest.mark.skipif(not memory.can_measure(), reason="the peak of the resident set cannot be measured here"),
    pytest.mark.xdist_group("memory"),  # they share a large file
]

MIB = memory.MIB

PRELUDE = """
import gc, io, os, sys
sys.path.insert(0, sys.argv[1])
import torch
from memory import MIB, peak_growth, resident
from tensorizer import TensorDeserializer, TensorSerializer
path = sys.argv[2]
TensorSerializer(io.BytesIO()).write_state_dict({"a": torch.ones(3)})  # what the first use costs is not measured
TensorDeserializer(sys.argv[3], device="cpu").close()
gc.collect()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def measure(folder, fresh_process):
    """Runs a program in a process of its own, in which ``path`` is its file; gives what it printed, as numbers."""
    small = samples.write_state_dict(folder / "small", {"a": torch.ones(3)})

    def run(path, program):
        result = fresh_process(PRELUDE + textwrap.dedent(program), HELPERS, path, small, timeout=120)
        assert result.returncode == 0, result.stderr
        return [float(word) for word in result.stdout.split()]

    return run


@pytest.fixture(scope="module")
def large(folder):
    """256 MiB in tensors of many sizes, one of them of 100 MiB."""
    values = {f"small.{i}": torch.zeros(1000 + i) for i in range(2000)}
    values |= {f"middle.{i}": torch.zeros((4 + i % 3) * MIB, dtype=torch.uint8) for i in range(30)}
    values["large"] = torch.zeros(100 * MIB, dtype=torch.uint8)
    return samples.write_state_dict(folder / "large", values, fsync=False)


@pytest.mark.parametrize(
    "arguments",
    ["path", "path, verify_hash=True", "path, lazy_load=True", "path, num_readers=4", "io.BytesIO(data)"],
)
def test_a_load_needs_the_payload_and_at_most_64_mib(measure, large, arguments):
    program = f"""
    data = open(path, "rb").read() if {"data" in arguments} else None
    with peak_growth() as growth:
        deserializer = TensorDeserializer({arguments}, device="cpu")
        values = list(deserializer.values())
    print(growth.peak / MIB, deserializer.total_tensor_bytes / MIB)
    """
    peak, payload = measure(large, program)
    assert payload <= peak + 1
    assert peak <= payload + 64


@pytest.mark.parametrize(
    ("option", "use"), [("mmap=True", "list(deserializer.values())"), ("lazy_load=True", "'large' in deserializer")]
)
def test_a_mapped_load_and_lazy_opening_need_next_to_nothing(measure, large, option, use):
    program = f"""
    with peak_growth() as growth:
        deserializer = TensorDeserializer(path, device="cpu", {option})
        assert {use}
    print(growth.peak / MIB)
    """
    (peak,) = measure(large, program)
    assert peak < 32


@pytest.mark.parametrize("name", ["m.tensors", "m.safetensors"])
def test_a_walk_with_safe_open_keeps_none_of_the_tensors(measure, folder, name):
    save_file({f"t{i:02}": torch.full((MIB,), i, dtype=torch.float32) for i in range(24)}, folder / name)
    program = """
    from tensorizer import safe_open
    with safe_open(path) as file, peak_growth() as growth:
        for i, name in enumerate(file.keys()):
            assert int(file.get_tensor(name)[-1]) == i
    print(growth.peak / MIB)
    """
    (peak,) = measure(folder / name, program)
    assert peak < 32  # of 96


@pytest.mark.parametrize(
    "survivors", [["large"], ["middle.7"], ["small.3"], ["small.0", "small.1999", "middle.0"]], ids=" ".join
)
@pytest.mark.parametrize("lazy_load", [False, True], ids=["eager", "lazy"])
def test_a_tensor_that_stays_alive_keeps_at_most_16_mib_besides_itself(measure, large, survivors, lazy_load):
    program = f"""
    before = resident()
    with TensorDeserializer(path, device="cpu", lazy_load={lazy_load}) as deserializer:
        values = dict(deserializer.items())
    kept = [values[name] for name in {survivors}]
    del values, deserializer
    gc.collect()
    print((resident() - before) / MIB, sum(value.nbytes for value in kept) / MIB)
    """
    growth, own = measure(large, program)
    assert growth <= own + 16 * len(survivors) + 8  # the allocator of Python and C++ may keep a little


def test_streaming_without_the_cache_needs_a_bounded_amount(measure, folder):
    path = folder / "long"
    block = torch.zeros(8 * MIB, dtype=torch.uint8)
    samples.write_state_dict(path, {str(i): block for i in range(64)}, fsync=False, hashes=())
    program = """
    with peak_growth() as growth:
        deserializer = TensorDeserializer(path, device="cpu", lazy_load=True)
        for _, _, _, value in deserializer.read_tensors(cache=False):
            value.sum()
    print(growth.peak / MIB)
    """
    (peak,) = measure(path, program)
    path.unlink()
    assert peak < 256  # of 512


WIDE = "[torch.zeros(1).expand(8 * MIB // 4)] * 80"  # no memory of its own: each is copied to be written
CONTIGUOUS = "[torch.ones(16 * MIB, dtype=torch.uint8) for _ in range(25)]"


@pytest.mark.parametrize(
    ("target", "model"),
    [("path", WIDE), ("Null()", WIDE), ("path", CONTIGUOUS)],
    ids=["to a path", "to an object", "no copy of a contiguous model"],
)
def test_a_save_needs_at_most_300_mib_above_the_model(measure, folder, target, model):
    program = f"""
    class Null(io.RawIOBase):
        at = 0
        def write(self, data):
            self.at += len(memoryview(data).cast("B"))
            return len(memoryview(data).cast("B"))
        def seek(self, position, whence=0):
            self.at = position
            return position
        def tell(self):
            return self.at
        def readable(self):
            return True
        writable = seekable = readable
    values = {{str(i): value for i, value in enumerate({model})}}
    with peak_growth() as growth:
        serializer = TensorSerializer({target}, fsync=False, hashes="crc32")
        serializer.write_state_dict(values)
        serializer.close()
    print(growth.peak / MIB)
    """
    (peak,) = measure(folder / "saved", program)
    (folder / "saved").unlink(missing_ok=True)
    assert peak < 300


def test_repeated_loads_and_saves_do_not_grow(measure, folder):
    values = {f"t{i}": torch.zeros(1000) for i in range(500)} | {"large": torch.zeros(8 * MIB, dtype=torch.uint8)}
    path = samples.write_state_dict(folder / "again", values, fsync=False)
    program = """
    def once():
        with TensorDeserializer(path, device="cpu") as deserializer:
            deserializer.tree()
            list(deserializer.read_tensors())
            TensorSerializer(path + ".copy", fsync=False).write_state_dict(deserializer)
        with TensorDeserializer(path, device="cpu", mmap=True) as deserializer:
            dict(deserializer)
        try:
            TensorDeserializer(io.BytesIO(b"|TZR|" + bytes(200)), device="cpu")
        except ValueError:
            pass
    for _ in range(5):
        once()
    gc.collect()
    before = resident()
    for _ in range(30):
        once()
    gc.collect()
    print((resident() - before) / MIB)
    """
    (growth,) = measure(path, program)
    assert growth < 20


def test_twenty_thousand_small_tensors_stay_small(measure, folder):
    values = {f"model.layers.{i}.weight": torch.ones(4) for i in range(20_000)}
    path = samples.write_state_dict(folder / "many", values, fsync=False)
    program = """
    with peak_growth() as growth:
        values = list(TensorDeserializer(path, device="cpu").values())
    print(growth.peak / MIB)
    """
    (peak,) = measure(path, program)
    assert peak < 64


def test_the_memory_of_a_loaded_tensor_is_aligned_for_vector_code():
    data = samples.state_dict_bytes({str(i): tensor((i,), torch.uint8) for i in range(1, 40)})
    for value in samples.load(samples.io.BytesIO(data)).values():
        assert value.data_ptr() % 16 == 0

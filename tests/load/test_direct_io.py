"""Local files that are read past the page cache: when, of which kinds, and what the cache has of them afterwards."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import samples
import torch
from safetensors.torch import save_file

import tensorizer.torch
from tensorizer import _C, DecryptionParams, EncryptionParams, TensorDeserializer
from tensorizer._load import page_cache

PAGE = mmap.PAGESIZE
NOTHING = 0.02
TRIED_PAGES = 40  # whether a file is cached is tried at some place, and the kernel reads what is around it


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(3000, 1111), (5,), (257, 129), (2_500_001,), (0,), (70_000,)]
    return {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(sizes)}


def write(path: Path, encryption: object = None) -> Path:
    return samples.write_state_dict(path, state(), encryption=encryption)


def cached_pages(path: Path) -> list[int]:
    """Which pages of a file of ours are in the page cache. Reads that do not wait would make the kernel read ahead."""
    nbytes = os.path.getsize(path)
    resident = (ctypes.c_ubyte * -(-nbytes // PAGE))()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, mmap.MAP_PRIVATE) as mapped:
        view = (ctypes.c_char * nbytes).from_buffer(mapped)
        error = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(view), ctypes.c_size_t(nbytes), resident)
        del view
    if error:
        raise OSError(ctypes.get_errno(), "mincore")
    return [page & 1 for page in resident]


def cached_share(*paths: Path) -> float:
    """How much of these files is in the page cache. What is tried can be all of a small file."""
    pages = [cached_pages(path) for path in paths]
    return sum(max(0, sum(file) - TRIED_PAGES) for file in pages) / sum(map(len, pages))


@pytest.fixture
def drop(tmp_path):
    """Empties the cache of a file; skips the test where that is not possible."""

    def drop(path: Path) -> None:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            for _ in range(50):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if cached_share(path) == 0:
                    break
            else:
                pytest.skip("a file system that keeps its files in memory")
            source = _C.FileSource(file.fileno(), "f")
            source.set_direct(True)
            if source.in_memory:
                pytest.skip("a file system without O_DIRECT")

    try:
        drop(write(tmp_path / "try"))
    except (OSError, AttributeError):
        pytest.skip("a file system that does not tell what is cached")
    return drop


def assert_same(found, wanted=None) -> None:
    samples.assert_same(found, state() if wanted is None else wanted)


KEY = b"0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("kind", ["tensors", "safetensors", "encrypted", "verified", "shards"])
def test_always_leaves_nothing_in_the_cache(kind, tmp_path, drop):
    options: dict = {}
    if kind == "shards":
        tensorizer.torch.save_file(state(), tmp_path / "model.tensors", max_shard_size=8 << 20)
        paths = sorted(tmp_path.glob("model-*.tensors"))
        assert len(paths) > 1
        opened: Path = tmp_path / "model.tensors.index.json"
    else:
        opened = tmp_path / f"f.{kind}"
        if kind == "safetensors":
            save_file(state(), opened)
        else:
            write(opened, EncryptionParams(KEY) if kind == "encrypted" else None)
        paths = [opened]
    if kind == "encrypted":
        options = {"encryption": DecryptionParams.from_key(KEY)}
    if kind == "verified":
        options = {"verify_hash": True}
    for path in paths:
        drop(path)
    with TensorDeserializer(opened, device="cpu", direct_io="always", **options) as found:
        assert_same(found, dict(sorted(state().items())) if kind == "shards" else None)
    assert cached_share(*paths) < NOTHING


def test_parts_and_single_tensors_too(tmp_path, drop):
    path = write(tmp_path / "f")
    drop(path)
    with TensorDeserializer(path, device="cpu", direct_io="always", lazy_load=True) as found:
        assert torch.equal(found.get_slice("t0")[17:40, 3:1000], state()["t0"][17:40, 3:1000])
        assert torch.equal(found["t3"].detach(), state()["t3"])
        out = torch.empty(100, 1111)
        found.get_slices({"t0": slice(100, 200)}, out={"t0": out})
        assert torch.equal(out, state()["t0"][100:200])
    assert cached_share(path) < NOTHING


def test_never_fills_the_cache(tmp_path, drop, monkeypatch):
    monkeypatch.setattr(page_cache, "_LARGE_NBYTES", 1)
    path = write(tmp_path / "f")
    drop(path)
    assert_same(TensorDeserializer(path, device="cpu", direct_io="never"))
    assert cached_share(path) > 0.9


class TestAuto:
    """Direct where a load is large, the file is not cached, and no other rank of the node reads it too."""

    @pytest.fixture(autouse=True)
    def large(self, monkeypatch):
        monkeypatch.setattr(page_cache, "_LARGE_NBYTES", 20 << 20)

    def load(self, path, **options) -> float:
        assert_same(TensorDeserializer(path, device="cpu", **options))
        return cached_share(path)

    def test_reads_a_large_file_past_the_cache(self, tmp_path, drop):
        path = write(tmp_path / "f")
        drop(path)
        assert self.load(path) < 0.1  # the index alone: it says how large the load is

    def test_so_do_shards_that_are_large_together(self, tmp_path, drop):
        tensorizer.torch.save_file(state(), tmp_path / "model.tensors", max_shard_size=14 << 20)
        paths = sorted(tmp_path.glob("model-*.tensors"))
        for path in paths:
            drop(path)
        tensorizer.torch.load_file(tmp_path / "model.tensors.index.json")
        assert len(paths) > 1
        assert cached_share(*paths) < 0.1

    def test_a_quarter_of_the_memory_is_large(self, tmp_path, drop, monkeypatch):
        monkeypatch.setattr(page_cache, "_LARGE_NBYTES", 1 << 40)
        path = write(tmp_path / "f")
        nbytes = sum(tensor.nbytes for tensor in state().values())
        for available, direct in ((4 * nbytes, True), (4 * nbytes + 4, False)):
            monkeypatch.setattr(page_cache.cgroup, "available_nbytes", lambda available=available: available)
            drop(path)
            assert (self.load(path) < 0.1) == direct

    def test_reads_what_is_cached_from_the_cache(self, tmp_path, drop):
        path = write(tmp_path / "f")
        path.read_bytes()
        with TensorDeserializer(path, device="cpu", lazy_load=True) as found:
            assert_same(dict(found))
            assert found._open_file.source.in_memory  # it would not be, read past the cache

    def test_leaves_what_several_ranks_read_in_the_cache(self, tmp_path, drop, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        path = write(tmp_path / "f")
        drop(path)
        assert self.load(path) > 0.9

    def test_reads_little_of_a_large_file_through_the_cache(self, tmp_path, drop):
        path = write(tmp_path / "f")
        drop(path)
        TensorDeserializer(path, device="cpu", filter_func={"t3"}.__contains__)
        assert cached_share(path) > 0.3


def test_a_mapping_is_made_where_nothing_is_always_read(tmp_path, drop):
    path = write(tmp_path / "f")
    drop(path)
    assert_same(TensorDeserializer(path, device="cpu", mmap=None, direct_io="always"))
    assert cached_share(path) < NOTHING
    assert_same(TensorDeserializer(path, device="cpu", mmap=True, direct_io="always"))  # of the page cache, as ever
    assert cached_share(path) > 0.9


def test_a_file_in_memory_is_read_without_a_word(recwarn):
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm")
    path = folder / f"direct-io-{os.getpid()}"
    try:
        write(path)
        assert_same(TensorDeserializer(path, device="cpu", direct_io="always"))
    finally:
        path.unlink(missing_ok=True)
    assert not recwarn.list


def test_tensors_of_odd_safetensors_are_aligned_for_their_elements(tmp_path):
    """Whatever the length of the header is: a large tensor may begin where it does in its page of the file."""
    for odd in range(1, 9):
        path = tmp_path / f"{odd}.safetensors"
        content = {"x" * odd: torch.arange(2_000_000, dtype=torch.float64), "y": torch.ones(300_001)}
        save_file(content, path)
        found = tensorizer.torch.load_file(path, direct_io="always")
        assert_same(found, content)
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in found.values())


def test_what_is_no_choice_is_refused(tmp_path):
    path = write(tmp_path / "f")
    with pytest.raises(ValueError, match=r"direct_io: expected one of 'auto', 'always', 'never', got 'yes'"):
        TensorDeserializer(path, direct_io="yes")
    with pytest.raises(TypeError, match="direct_io: expected one of 'auto', 'always', 'never', got bool"):
        tensorizer.torch.load_file(path, direct_io=True)

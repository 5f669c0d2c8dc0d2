"""Memory that dropped tensors leave to the next load of the process: what is kept, how long, and what never is."""

from __future__ import annotations

import pytest
import samples
import torch
from samples import tensor

from tensorizer._system import cgroup

PRELUDE = """
import gc, os, sys, time, torch
from tensorizer import DecryptionParams, TensorDeserializer, _C
MIB = 1 << 20
from tensorizer._load import page_cache
page_cache._KEPT_SECONDS = 60  # slow machines
def load(path, **options):
    with TensorDeserializer(path, device="cpu", **options) as deserializer:
        return dict(deserializer.items())
"""


@pytest.fixture
def run(fresh_process):
    def run(program, *arguments):
        done = fresh_process(PRELUDE + program, *arguments, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """40 MiB in one tensor, 12 in small ones, and zeros without data."""
    values = {"large": tensor((40 << 20,), torch.uint8)}
    values |= {f"small.{i}": tensor((1 << 20,), torch.uint8, seed=i) for i in range(12)}
    values |= {"zeros": torch.empty((5 << 20,), dtype=torch.uint8, device="meta")}
    values |= {"many zeros": torch.empty((9 << 20,), dtype=torch.uint8, device="meta")}
    return samples.write_state_dict(tmp_path_factory.mktemp("kept") / "f", values, fsync=False)


def test_the_memory_of_dropped_tensors_serves_the_next_load_and_its_content_is_right(run, path):
    run(
        """
first = load(sys.argv[1])
wanted = {name: value.clone() for name, value in first.items()}
assert _C.kept_nbytes() == 0
for value in first.values():
    value.data.fill_(7)  # what follows must not see it
places = {value.data_ptr() for value in first.values()}
del first, value
gc.collect()
kept = _C.kept_nbytes()
assert 50 * MIB <= kept <= 80 * MIB, kept
second = load(sys.argv[1], verify_hash=True)
assert _C.kept_nbytes() <= kept - 50 * MIB
assert second["large"].data_ptr() in places
assert all(torch.equal(second[name], wanted[name]) for name in wanted)
assert not second["zeros"].any() and not second["many zeros"].any()
        """,
        path,
    )


def test_another_model_takes_parts_of_what_one_has_left(run, path, tmp_path):
    other = samples.write_state_dict(
        tmp_path / "f", {"a": tensor((17 << 20,), torch.uint8), "b": tensor((9 << 20,), torch.uint8)}
    )
    run(
        """
load(sys.argv[1])
gc.collect()
kept = _C.kept_nbytes()
values = load(sys.argv[2], verify_hash=True)
assert kept - 28 * MIB <= _C.kept_nbytes() <= kept - 26 * MIB, (kept, _C.kept_nbytes())
        """,
        path,
        other,
    )


def test_what_nobody_took_for_a_while_goes_back_to_the_system_when_more_is_kept(run, path, tmp_path):
    small = samples.write_state_dict(tmp_path / "f", {"a": tensor((4 << 20,), torch.uint8)})
    run(
        """
load(sys.argv[1])
gc.collect()
assert _C.kept_nbytes() >= 50 * MIB
_C.keep_memory(1 << 30, 60)
values = load(sys.argv[2])
del values
gc.collect()
assert _C.kept_nbytes() >= 50 * MIB
_C.keep_memory(0, 60)
_C.keep_memory(1 << 30, 0.01)
load(sys.argv[1])
gc.collect()
time.sleep(0.1)
values = load(sys.argv[2])
del values
gc.collect()
assert 0 < _C.kept_nbytes() <= 6 * MIB, _C.kept_nbytes()
        """,
        path,
        small,
    )


def test_a_bound_holds(run, path):
    run(
        """
load(sys.argv[1])
_C.keep_memory(30 * MIB, 60)
load(sys.argv[1])
gc.collect()
assert 0 < _C.kept_nbytes() <= 30 * MIB
_C.keep_memory(0, 60)
assert _C.kept_nbytes() == 0
        """,
        path,
    )


def test_what_was_decrypted_is_not_kept(run, tmp_path):
    from tensorizer import EncryptionParams

    path = samples.write_state_dict(
        tmp_path / "f", {"a": tensor((20 << 20,), torch.uint8)}, encryption=EncryptionParams(bytes(32))
    )
    run(
        """
load(sys.argv[1], encryption=DecryptionParams.from_key(bytes(32)))
gc.collect()
assert _C.kept_nbytes() == 0
        """,
        path,
    )


def test_a_forked_child_starts_with_nothing_loads_and_ends_at_once(run, path):
    run(
        """
load(sys.argv[1])
gc.collect()
assert _C.kept_nbytes() > 0
child = os.fork()
if child == 0:
    assert _C.kept_nbytes() == 0
    for _ in range(2):
        assert load(sys.argv[1], verify_hash=True)
        gc.collect()
    assert _C.kept_nbytes() > 0
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert _C.kept_nbytes() > 0
assert load(sys.argv[1], verify_hash=True)
        """,
        path,
    )


def test_the_limit_of_the_container_is_the_smallest_of_its_groups(tmp_path):
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (tmp_path / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n")
    assert cgroup.memory_limit(tmp_path) is None
    (group / "memory.max").write_text("max\n")
    assert cgroup.memory_limit(tmp_path) is None
    (group.parent / "memory.max").write_text("5000\n")
    assert cgroup.memory_limit(tmp_path) == 5000
    (group / "memory.max").write_text("4000\n")
    assert cgroup.memory_limit(tmp_path) == 4000

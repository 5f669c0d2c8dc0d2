"""Publishers and followers that are killed in the middle: what is there afterwards."""

from __future__ import annotations

import random

import pytest
import torch
from sync_tools import change, copy_of, files_in, pointer_of, same

from tensorizer.weight_sync import WeightFollower, WeightPublisher

ROUNDS = [
    pytest.param(range(begin, begin + count), marks=marks, id=f"{count}-from-{begin}")
    for begin, count, marks in ((0, 20, ()), *((20 + 45 * i, 45, pytest.mark.slow) for i in range(4)))
]

# Ends the process, without any clean-up, at the n-th call of one of some functions.
KILL_AT = """
import os, sys
def die_at(n, *places):
    left = [n]
    def wrap(owner, name):
        real = getattr(owner, name)
        def function(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            result = real(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return result
        setattr(owner, name, function)
    for owner, name in places:
        wrap(owner, name)
"""

FOLLOW = (
    KILL_AT
    + """
import random, threading, torch
from tensorizer.weight_sync import WeightFollower
folder, memory, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
flat = torch.from_file(memory, shared=True, size=4 * 60_000, dtype=torch.uint8)
target = {"a": flat[:160_000].view(torch.float32), "b": flat[160_000:].view(torch.float32)}
follower = WeightFollower(folder, target)
assert follower.fetch() or follower.version == follower.latest()
print(follower.version, flush=True)
# Any moment of an apply, of which nothing but memory is left.
threading.Timer(random.Random(seed).uniform(0, 0.004), os._exit, [9]).start()
follower.apply()
print(follower.version, flush=True)
os._exit(0)
"""
)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_follower_that_is_killed_in_an_apply_never_tells_a_wrong_version(tmp_path, fresh_process, rounds):
    torch.manual_seed(rounds[0])
    folder, memory = tmp_path / "weights", tmp_path / "memory"
    memory.write_bytes(bytes(4 * 60_000))
    model = {"a": torch.randn(40_000), "b": torch.randn(20_000)}
    with WeightPublisher(folder, anchor_every=7, keep=3) as publisher:
        publisher.publish(model)
        flat = torch.from_file(str(memory), shared=True, size=4 * 60_000, dtype=torch.uint8)
        target = {"a": flat[:160_000].view(torch.float32), "b": flat[160_000:].view(torch.float32)}
        published = {}
        WeightFollower(folder, target)
        for seed in rounds:
            change(model["a"], random.Random(seed).choice([0.01, 0.5, 1.0]))
            change(model["b"], 0.02)
            version = publisher.publish(model).version
            published[version] = copy_of(model)
            result = fresh_process(FOLLOW, folder, memory, seed)
            assert result.returncode in (0, 9), result.stderr
            told = result.stdout.split()
            if result.returncode == 0:
                assert told[-1] == str(version)
                assert same(target, model)
            if seed % 3 == 0:
                follower = WeightFollower(folder, target)
                assert follower.version == version
                assert same(target, model)
    follower = WeightFollower(folder, target)
    assert same(target, model)
    follower.verify()


PUBLISH = (
    KILL_AT
    + """
import torch
from tensorizer import _C
from tensorizer._io import new_files
from tensorizer._sync import files
from tensorizer._sync.stores import FolderStore
from tensorizer.weight_sync import WeightPublisher
folder, n, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)
model = {"a": torch.randn(3000), "b": torch.randn(50)}
publisher = WeightPublisher(folder, anchor_every=2, keep=1)
die_at(n, (_C.SaveSession, "begin_call"), (_C.SaveSession, "write_payloads"), (_C.SaveSession, "finish_call"),
       (_C.SaveSession, "finish"), (FolderStore, "write_pointer"), (new_files.NewFile, "complete"),
       (new_files.NewFile, "publish"), (os, "unlink"), (os, "fsync"), (os, "replace"))
for step in range(3):
    model["a"][step] += 1
    print(publisher.publish(model, metadata={"seed": str(seed), "step": str(step)}).version, flush=True)
os._exit(0)
"""
)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_publisher_that_is_killed_leaves_whole_versions_and_the_next_one_goes_on(tmp_path, fresh_process, rounds):
    folder = tmp_path / "weights"
    with WeightPublisher(folder) as publisher:
        publisher.publish({"a": torch.zeros(3000), "b": torch.zeros(50)})
    follower, last, killed = WeightFollower(folder, None), 0, 0
    for seed in rounds:
        result = fresh_process(PUBLISH, folder, random.Random(seed).randrange(1, 60), seed)
        assert result.returncode in (0, 9), result.stderr
        killed += result.returncode == 9
        told = [int(line) for line in result.stdout.split()]
        version = pointer_of(folder)["version"]
        assert version - last in (len(told), len(told) + 1)
        if told:
            assert told == list(range(last + 1, last + 1 + len(told)))
        assert set(pointer_of(folder)["nbytes"]) <= set(files_in(folder))
        follower.update()
        assert follower.version == version
        if version > last and "seed" in follower.metadata:
            torch.manual_seed(int(follower.metadata["seed"]))
            model = {"a": torch.randn(3000), "b": torch.randn(50)}
            model["a"][: int(follower.metadata["step"]) + 1] += 1
            assert same(follower.tensors, model)
        last = version
    assert killed > len(rounds) // 4
    with WeightPublisher(folder) as publisher:
        assert publisher.publish({"a": torch.ones(3000), "b": torch.ones(50)}).version == last + 1
    assert set(pointer_of(folder)["nbytes"]) == set(files_in(folder))


def test_a_full_disk_leaves_the_version_before(tmp_path, monkeypatch):
    from tensorizer import _C

    folder = tmp_path / "weights"
    model = {"a": torch.randn(3000)}
    with WeightPublisher(folder) as publisher:
        publisher.publish(model)
        before, files = pointer_of(folder), files_in(folder)
        write = _C.SaveSession.write_payloads

        def full(self, *args, **kwargs):
            write(self, *args, **kwargs)
            raise OSError(28, "No space left on device")

        change(model["a"])
        with monkeypatch.context() as patch:
            patch.setattr(_C.SaveSession, "write_payloads", full)
            with pytest.raises(OSError, match="No space"):
                publisher.publish(model)
        assert (pointer_of(folder), files_in(folder)) == (before, files)
        assert publisher.publish(model)[:2] == (1, "anchor")
    assert same(WeightFollower(folder, None).tensors, model)

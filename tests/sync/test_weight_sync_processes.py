"""A follower in a process of its own: over S3, at its own pace; memory of both; very large tensors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from servers.s3_recorder import S3Recorder
from sync_tools import change, copy_of, delta, same

from tensorizer.weight_sync import WeightFollower, WeightPublisher

FOLLOW = """
import json, random, sys, time, torch
from tensorizer.weight_sync import WeightFollower
uri, options, last = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
target = {"a": torch.zeros(200, 100, dtype=torch.bfloat16), "b": torch.zeros(100, dtype=torch.bfloat16)}
follower = WeightFollower(uri, target, stream_options=options, timeout=60)
addresses = [tensor.data_ptr() for tensor in target.values()]
while True:
    numbers = {name: torch.arange(tensor.numel()).view(tensor.shape) for name, tensor in target.items()}
    found = {name: int(tensor.view(torch.int16).long().mul(numbers[name]).sum()) for name, tensor in target.items()}
    print(follower.version, json.dumps(found), flush=True)
    assert [tensor.data_ptr() for tensor in target.values()] == addresses
    if follower.version == last:
        break
    assert follower.wait(60, poll=0.005)
    time.sleep(random.uniform(0, 0.05))
    follower.update()
follower.verify()
"""


def fingerprint(tensor) -> int:
    bits = tensor.view(torch.int16).long()
    return int(bits.mul(torch.arange(tensor.numel()).view(tensor.shape)).sum())


def test_a_hundred_versions_of_a_training_are_followed_over_s3_in_another_process():
    pytest.importorskip("boto3")
    torch.manual_seed(6)
    parameters = {"a": torch.randn(200, 100).bfloat16(), "b": torch.randn(100).bfloat16()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-5)
    published = []
    with S3Recorder() as store:
        uri, last = "s3://bucket/run", 99
        command = [sys.executable, "-c", FOLLOW, uri, json.dumps(store.arguments), str(last)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process, WeightPublisher(uri, anchor_every=10, stream_options=store.arguments) as publisher:
            for _ in range(last + 1):
                x = torch.randn(8, 200).bfloat16()
                (x @ parameters["a"] + parameters["b"]).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                publisher.publish(parameters)
                published.append({name: fingerprint(tensor.detach()) for name, tensor in parameters.items()})
            out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    lines = [line.split(" ", 1) for line in out.splitlines()]
    assert int(lines[-1][0]) == last
    for version, found in lines:
        assert json.loads(found) == published[int(version)], version


MEMORY = """
import os, sys, torch
from tensorizer import _C
from tensorizer.weight_sync import WeightFollower, WeightPublisher
def rss():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
kind, folder = sys.argv[1:]
N = 128 << 20  # so that what torch and malloc keep does not count
tensors = {f"t{i}": torch.zeros(N // 4, dtype=torch.bfloat16) for i in range(4)}
for tensor in tensors.values():
    tensor.view(torch.int16).random_()
payload = 2 * N
with WeightPublisher(os.path.join(folder, "small")) as first:  # what the first use costs is not measured
    first.publish({"a": torch.zeros(10)})
base = rss() - payload
def change(share):
    for tensor in tensors.values():
        flat = tensor.view(torch.int16)
        flat[torch.randint(0, flat.numel(), (int(flat.numel() * share),))] ^= 1
publisher = WeightPublisher(folder)
publisher.publish(tensors)
if kind == "publisher":
    change(0.01)
    reset()
    publisher.publish(tensors)
    print((rss() - base) / payload)
    for tensor in tensors.values():
        tensor.view(torch.int16).add_(1)
    reset()
    publisher.publish(tensors)
    print((rss() - base) / payload)
else:
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    base += payload  # of the publisher's tensors and its copy; the target takes their place
    reset()
    follower = WeightFollower(folder, target)
    print((rss() - base) / payload - 1)
    change(0.01)
    publisher.publish(tensors)
    publisher.close()
    tensors.clear()
    reset()
    follower.update()
    print((rss() - base) / payload + 1)
"""


@pytest.mark.parametrize(("kind", "bounds"), [("publisher", (2.1, 2.1)), ("follower", (1.6, 1.6))])
def test_memory_is_bounded(tmp_path, fresh_process, kind, bounds):
    result = fresh_process(MEMORY, kind, tmp_path)
    assert result.returncode == 0, result.stderr
    for found, bound in zip(map(float, result.stdout.split()), bounds):
        assert found <= bound, result.stdout


@pytest.mark.slow
def test_positions_beyond_two_gigabytes_are_followed(tmp_path):
    size = (1 << 31) + 1
    path = tmp_path / "sparse"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(size)
    source = torch.from_file(str(path), shared=True, size=size, dtype=torch.int8)
    with WeightPublisher(tmp_path / "weights", hashes="sha256") as publisher:
        publisher.publish({"w": source})
        follower = WeightFollower(tmp_path / "weights", None)
        source[-1], source[5] = 7, 3
        assert publisher.publish({"w": source}).changed == 2
        assert (tmp_path / "weights" / delta(1)).stat().st_size < 10_000
        assert follower.update().elements == 2
        assert (int(follower.tensors["w"][-1]), int(follower.tensors["w"][5])) == (7, 3)
        follower.verify()


def test_a_follower_that_is_far_behind_reads_the_fewest_bytes(tmp_path):
    pytest.importorskip("boto3")
    with S3Recorder() as store:
        model = {"w": torch.randn(20_000)}
        options = {"stream_options": store.arguments}
        with WeightPublisher("s3://bucket/run", anchor_every=50, keep=10, **options) as publisher:
            publisher.publish(model)
            with WeightFollower("s3://bucket/run", None, **options) as follower:
                for _ in range(310):
                    change(model["w"], 0.01)
                    publisher.publish(model)
                    before = copy_of(model)
                store.requests.clear()
                assert follower.update().version == 310
                assert same(follower.tensors, before)
                names = {r.path.rpartition("/")[2] for r in store.of("GetObject")} - {"latest.json"}
                assert names == {"anchor-000000000300.tensors", *map(delta, range(301, 311))}

"""What a version costs: ``python -m benchmarks.weight_sync [elements] [folder]``; 10^9 bfloat16 elements by default.

Changes 1 % of the elements, publishes and applies that on the host, and catches up 20 versions at once. Beside times
stands the limit, reading both copies once on all processors, and beside the bytes a sparse ``.safetensors`` file with
32-bit positions. Use a folder in memory (``/dev/shm``).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from tensorizer import _C
from tensorizer.torch import save_file
from tensorizer.weight_sync import WeightFollower, WeightPublisher

TENSORS = 8
SHARE = 0.01
RUNS = 3
BEHIND = 20


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def change(tensors: dict[str, torch.Tensor], share: float = SHARE) -> dict[str, torch.Tensor]:
    """Changes elements at random; their numbers."""
    numbers = {}
    for name, tensor in tensors.items():
        count = int(tensor.numel() * share)
        numbers[name] = torch.randint(0, tensor.numel(), (count,)).unique()
        tensor.view(torch.int16)[numbers[name]] ^= 1
    return numbers


def read_both(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Reads every byte of two copies, on all processors."""
    torch.set_num_threads(1)
    workers = int(_C.cpu_quota())
    step = 1 << 20
    parts = [
        (tensor[begin : begin + step], other[name][begin : begin + step])
        for name, tensor in one.items()
        for begin in range(0, tensor.numel(), step)
    ]
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(lambda pair: torch.equal(pair[0].view(torch.int64), pair[1].view(torch.int64)), parts))


def main() -> None:
    elements = int(float(sys.argv[1])) if len(sys.argv) > 1 else 10**9
    folder = tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else "/dev/shm")
    try:
        measure(elements // TENSORS // 4 * 4, os.path.join(folder, "weights"))
    finally:
        shutil.rmtree(folder)


def measure(elements: int, folder: str) -> None:
    tensors = {f"t{i}": torch.zeros(elements, dtype=torch.bfloat16) for i in range(TENSORS)}
    for tensor in tensors.values():
        tensor.view(torch.int16).random_()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with WeightPublisher(folder, anchor_every=10**6) as publisher:
        publisher.publish(tensors)
        follower = WeightFollower(folder, {name: tensor.clone() for name, tensor in tensors.items()})
        os.unlink(os.path.join(folder, "anchor-000000000000.tensors"))  # room in memory
        limits, publishes, fetches, applies = [], [], [], []
        sent = 0
        for _ in range(RUNS):
            limits.append(seconds(lambda: read_both(tensors, follower.tensors)))
            numbers = change(tensors)
            begin = time.perf_counter()
            sent = publisher.publish(tensors).nbytes
            publishes.append(time.perf_counter() - begin)
            fetches.append(seconds(follower.fetch))
            applies.append(seconds(follower.apply))
        sparse = {}
        for name, of_tensor in numbers.items():
            sparse[f"{name}.positions"] = of_tensor.to(torch.int32)
            sparse[f"{name}.values"] = tensors[name][of_tensor]
        path = os.path.join(folder, "sparse.safetensors")
        save_file(sparse, path)
        sparse_nbytes = os.path.getsize(path)
        for _ in range(BEHIND):
            change(tensors)
            publisher.publish(tensors)
        fetch = seconds(follower.fetch)
        behind = seconds(follower.apply)
    limit, publish, apply = min(limits), min(publishes), min(applies)
    print(f"{nbytes / 1e9:.1f} GB, {int(_C.cpu_quota())} processors, best of {RUNS}")
    print(f"read both copies once (limit)   {limit * 1e3:8.0f} ms  {2 * nbytes / limit / 1e9:.1f} GB/s")
    print(f"publish                         {publish * 1e3:8.0f} ms  {publish / limit:.2f} x the limit")
    print(f"fetch                           {min(fetches) * 1e3:8.0f} ms")
    print(f"apply, both passes              {apply * 1e3:8.0f} ms")
    print(f"bytes                           {sent / nbytes:8.2%}     sparse safetensors {sparse_nbytes / nbytes:.2%}")
    print(
        f"{BEHIND} versions: fetch {fetch * 1e3:.0f} ms, apply {behind * 1e3:.0f} ms  {behind / apply:.1f} x one apply"
    )


if __name__ == "__main__":
    main()

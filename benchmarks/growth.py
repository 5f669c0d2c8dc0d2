"""What a tensor costs by itself, however many there are: ``python -m benchmarks.growth``.

Prints processor time per tensor of 64 bytes, index included, for loads of files in memory.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tensorizer import TensorDeserializer, TensorSerializer

COUNTS = (1_000, 10_000, 100_000)
RUNS = 9


def microseconds_per_tensor(path: Path, count: int) -> float:
    """Of one load."""
    gc.collect()
    begin = time.process_time()
    with TensorDeserializer(path, device="cpu"):
        return (time.process_time() - begin) / count * 1e6


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for count in COUNTS:
            path = Path(folder) / f"{count}.tensors"
            with TensorSerializer(path) as file:
                file.write_state_dict({f"layers.{i}.weight": torch.zeros(16) for i in range(count)})
            found = sorted(microseconds_per_tensor(path, count) for _ in range(RUNS))
            print(f"{count:7,} tensors: {statistics.median(found):.2f} us each ({found[0]:.2f} to {found[-1]:.2f})")


if __name__ == "__main__":
    main()

"""Write a checkpoint in another process while this one continues to compute.

    python subprocess_serialization.py --output ./checkpoint.tensors

Runs offline, on a small network. The tensors are copied once, to shared memory on the CPU; the child gets handles, not
copies. The child is spawned, not forked: a forked process cannot use CUDA, and inherits locks that other threads held.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.multiprocessing as multiprocessing

from tensorizer import TensorSerializer
from tensorizer.utils import convert_bytes


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict in shared memory, which later training steps do not change."""
    return {name: tensor.detach().to("cpu", copy=True).share_memory_() for name, tensor in module.state_dict().items()}


def write(state_dict: dict[str, torch.Tensor], path: str) -> None:
    """The work of the child process."""
    serializer = TensorSerializer(path)
    serializer.write_state_dict(state_dict)
    serializer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="checkpoint.tensors", help="local path or s3:// URI")
    parser.add_argument("--width", type=int, default=512, help="size of the sample network")
    args = parser.parse_args()

    model = torch.nn.Sequential(*(torch.nn.Linear(args.width, args.width) for _ in range(4)))

    start = time.perf_counter()
    state_dict = snapshot(model)
    child = multiprocessing.get_context("spawn").Process(target=write, args=(state_dict, args.output))
    child.start()
    print(f"Training goes on after {time.perf_counter() - start:.3f} s")

    steps = 0
    while child.is_alive():
        with torch.no_grad():
            model(torch.rand(8, args.width))
        steps += 1
        child.join(timeout=0.01)  # stands for the time that a real step takes
    child.join()
    if child.exitcode != 0:
        raise SystemExit(f"the writing process ended with status {child.exitcode}")
    nbytes = sum(tensor.nbytes for tensor in state_dict.values())
    print(f"Wrote {convert_bytes(nbytes)} to {args.output} during {steps} steps")


if __name__ == "__main__":
    main()

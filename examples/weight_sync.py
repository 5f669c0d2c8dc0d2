"""New weights for a model in another process: ``python examples/weight_sync.py [folder]``.

This process trains a small network in bfloat16 with AdamW and publishes its weights after each step. A second process
follows them in place, at its own pace, and compares its copy with the sums of the publisher. At the end both print what
was sent, beside the bytes of the model.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import torch

from tensorizer.weight_sync import WeightFollower, WeightPublisher

STEPS = 20


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 256)).bfloat16()


def train(folder: str) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)  # as in fine-tuning: most steps round away
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    print(f"{'version':>7} {'kind':6} {'bytes sent':>10} {'of the model':>12} {'changed':>8}")
    server = None
    with WeightPublisher(folder, anchor_every=10) as publisher:
        for step in range(STEPS):
            x = torch.randn(32, 256, dtype=torch.bfloat16)
            (model(x) - x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent = publisher.publish(model, metadata={"step": str(step)})
            share, changed = sent.nbytes / total, sent.changed / sent.total
            print(f"{sent.version:7} {sent.kind:6} {sent.nbytes:10,} {share:12.2%} {changed:8.2%}")
            if server is None:
                server = subprocess.Popen([sys.executable, __file__, "--follow", folder])
        assert server is not None
        if server.wait(60) != 0:
            raise SystemExit("the follower failed")


def follow(folder: str) -> None:
    model = make_model()
    follower = WeightFollower(folder, model, timeout=30)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    versions = 1
    while follower.version != STEPS - 1:
        if follower.wait(30, poll=0.01) and follower.fetch():  # the model is not touched yet
            follower.apply()  # now it is, in place
            versions += 1
    follower.verify()
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == addresses
    print(f"follower: version {follower.version} (step {follower.metadata['step']}) is equal", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--follow"]:
        follow(sys.argv[2])
    elif len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(folder)


if __name__ == "__main__":
    main()

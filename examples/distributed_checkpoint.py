"""Trains on several ranks, stops, and continues from a checkpoint, also with another number of ranks.

    torchrun --nproc-per-node 2 examples/distributed_checkpoint.py run/checkpoint 4
    torchrun --nproc-per-node 3 examples/distributed_checkpoint.py run/checkpoint 8

The second run finds the checkpoint of the first one and continues at step 4. To load the weights into the plain model,
write them to a file of their own:

    dcp_to_files("run/checkpoint", "model.safetensors", prefix="training.model.")
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tensorizer.distributed import TensorizerReader, TensorizerWriter, is_complete


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


class Training(dcp.stateful.Stateful):
    """Model, optimizer and step, as ``dcp`` saves and loads them."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = make_model().to(device)
        fully_shard(self.model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.device, self.step = device, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def run(self, until: int) -> list:
        """Every rank sees the same batch, so the losses do not depend on their number."""
        losses = []
        while self.step < until:
            batch = torch.sin(torch.arange(8 * 16, dtype=torch.float32, device=self.device) + self.step).view(8, 16)
            loss = (self.model(batch) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses


def main(checkpoint: str, steps: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Plans are exchanged on the CPU: over NCCL they would take memory of the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    training = Training(device)
    if is_complete(checkpoint):
        dcp.load({"training": training}, storage_reader=TensorizerReader(checkpoint))
    losses = training.run(steps)
    dcp.save({"training": training}, storage_writer=TensorizerWriter(checkpoint))
    if dist.get_rank() == 0:
        print(f"step {training.step}:", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

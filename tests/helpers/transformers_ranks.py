"""Programs for ``fresh_process``: models of transformers from slices, in one process and with tensor parallelism."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import samples
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from tiny_models import agree, llama, llama_config, transformers
from torch.distributed.tensor import DTensor

from tensorizer import TensorDeserializer
from tensorizer.torch import save_model


def from_slices(file: Path, config, **options):
    with TensorDeserializer(file, device="cpu", lazy_load=True) as d:
        index = d.total_bytes_read
        model = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=d.slices(), **options)
        return model.eval(), d.total_bytes_read - index


def load_models(folder: Path) -> None:
    torch.set_num_threads(1)  # before ranks are forked
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "tie_word_embeddings": False}
    reference = llama(**sizes)
    config = llama_config(**sizes)
    nbytes = sum(p.numel() * p.element_size() for p in reference.parameters())
    x = torch.arange(8).reshape(1, 8)
    expected = reference(x).logits.detach()
    for name in ("m.tensors", "m.safetensors"):
        save_model(reference, folder / name)
        model, read = from_slices(folder / name, config)
        assert read <= 1.02 * nbytes, (read, nbytes)
        for key, value in reference.state_dict().items():
            assert samples.same(model.state_dict()[key], value), key
        assert agree(model(x).logits, expected)

    def work(rank: int) -> None:
        from transformers.distributed import DistributedConfig

        distributed = DistributedConfig(tp_size=2, tp_plan="auto")
        model, read = from_slices(folder / "m.tensors", config, distributed_config=distributed)
        assert any(isinstance(p, DTensor) for p in model.parameters())
        assert torch.allclose(model(x).logits, expected, atol=1e-5)
        assert read <= 0.6 * nbytes, (read, nbytes)
        dist.barrier()

    if importlib.util.find_spec("accelerate") is not None:  # transformers wants it for tensor parallelism
        run_ranks(2, work)

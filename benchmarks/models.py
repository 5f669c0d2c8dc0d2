"""The data: state dicts with the shapes of real networks, made once from a fixed seed and kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MANY_TENSORS = 18_867
#: Encrypts the files of the encrypted cases; it protects nothing.
KEY = bytes(range(32))


@dataclass(frozen=True)
class Manifest:
    """Facts about a state dict.

    Attributes:
        model: ``"llm"``, ``"many"`` or ``"tiny"``.
        nbytes: Payload of all tensors.
        tensors: How many there are.
        one: Name of the tensor that the case of a single tensor loads (a feed-forward matrix in the middle).
        one_nbytes: Its bytes.
        checksum: Sum of all elements taken as 16-bit integers.
    """

    model: str
    nbytes: int
    tensors: int
    one: str
    one_nbytes: int
    checksum: int


def llm_shapes(nbytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama-like network in fp16 of about ``nbytes``: width 2048, or 512 for less than 500 MB."""
    width, hidden, vocabulary = (2048, 5632, 32_000) if nbytes >= 500_000_000 else (512, 1408, 8_000)
    layer = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width // 8, width),
        "self_attn.v_proj": (width // 8, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    of_layer = sum(2 * _elements(shape) for shape in layer.values())
    of_rest = 2 * (2 * vocabulary * width + width)
    yield "model.embed_tokens.weight", (vocabulary, width)
    for index in range(max(1, round((nbytes - of_rest) / of_layer))):
        for name, shape in layer.items():
            yield f"model.layers.{index}.{name}.weight", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocabulary, width)


def llama_config(manifest: Manifest) -> dict[str, Any]:
    """What ``config.json`` of ``transformers`` says about the large model."""
    width, hidden, vocabulary = (2048, 5632, 32_000) if manifest.one_nbytes > 10_000_000 else (512, 1408, 8_000)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": (manifest.tensors - 3) // 9,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64 // 8,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": "float16",
    }


def many_shapes(nbytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """18,867 fp16 tensors between 64 bytes and a few hundred KiB that add up to about ``nbytes``."""
    generator = random.Random(20)
    weights = [generator.lognormvariate(0, 1.5) for _ in range(MANY_TENSORS)]
    scale = nbytes / 2 / sum(weights)
    for index, weight in enumerate(weights):
        yield f"blocks.{index // 64}.unit.{index % 64}.weight", (max(32, round(weight * scale)),)


def tiny_shapes(_: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Eight small tensors, for one unmeasured round that wakes every library up."""
    for index in range(8):
        yield f"layer.{index}.weight", (128, 256)


SHAPES = {"llm": llm_shapes, "many": many_shapes, "tiny": tiny_shapes}


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


def checksum(state: Mapping[str, torch.Tensor]) -> int:
    """Sum of all elements taken as 16-bit integers: tells whether a load delivered the bytes that were written."""
    import torch

    return sum(int(tensor.detach().view(torch.int16).sum(dtype=torch.int64)) for tensor in state.values())


def make(model: str, nbytes: int, folder: Path) -> Manifest:
    """Make the state dict and its manifest in ``folder``, unless they are there."""
    import torch

    manifest, base = folder / "manifest.json", folder / "base.pt"
    if manifest.exists() and base.exists():
        return read_manifest(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(shape, generator=generator).mul_(0.02).half() for name, shape in SHAPES[model](nbytes)}
    torch.save(state, base)
    names = [name for name in state if "mlp.up_proj" in name] or list(state)
    one = names[len(names) // 2]
    facts = Manifest(
        model=model,
        nbytes=sum(tensor.nbytes for tensor in state.values()),
        tensors=len(state),
        one=one,
        one_nbytes=state[one].nbytes,
        checksum=checksum(state),
    )
    manifest.write_text(json.dumps(asdict(facts), indent=2) + "\n")
    return facts


def read_manifest(folder: Path) -> Manifest:
    """The facts that :func:`make` left in the folder."""
    return Manifest(**json.loads((folder / "manifest.json").read_text()))


def read_base(folder: Path) -> dict[str, torch.Tensor]:
    """The state dict in memory of its own."""
    import torch

    state: dict[str, torch.Tensor] = torch.load(folder / "base.pt", weights_only=True)
    return state

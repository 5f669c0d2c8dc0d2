"""Uses packages that this environment lacks, in a process with another PYTHONPATH.

``python hf_worker.py exchange FOLDER`` with another release of transformers: loads FOLDER/new, writes FOLDER/old, and
prints JSON. ``python hf_worker.py quantise FOLDER`` with bitsandbytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tiny_models
import torch
import transformers

from tensorizer.errors import LoadError
from tensorizer.integrations.huggingface import from_pretrained, save_pretrained

FAMILIES = ("llama", "gpt2", "t5", "bert", "mixtral", "vit")


def write(folder: Path) -> None:
    """Writes a model of every family three times: by us, by us under the library's names, and by the library."""
    for name in FAMILIES:
        model = getattr(tiny_models, name)()
        save_pretrained(model, folder / name / "model")
        save_pretrained(model, folder / name / "library", names="library")
        model.save_pretrained(folder / name / "safetensors")
        torch.save(tiny_models.output_of(model), folder / name / "output.pt")


def differences(folder: Path) -> dict:
    """Maps family and kind of file to the difference between loaded and written model, or to the text of an error."""
    found = {}
    for name in FAMILIES:
        wanted = torch.load(folder / name / "output.pt", weights_only=True)
        for kind in ("model", "library", "safetensors"):
            try:
                model = from_pretrained(folder / name / kind)
            except LoadError as error:
                found[f"{name} {kind}"] = f"{type(error).__name__}: {error}"
                continue
            found[f"{name} {kind}"] = (tiny_models.output_of(model) - wanted).abs().max().item()
    return found


def exchange(folder: Path) -> dict:
    write(folder / "old")
    found = {
        "version": transformers.__version__,
        "old": differences(folder / "old"),
        "new": differences(folder / "new"),
    }
    model, info = from_pretrained(folder / "old" / "llama" / "model", output_loading_info=True)
    _, wanted = type(model).from_pretrained(folder / "old" / "llama" / "safetensors", output_loading_info=True)
    found["information is equal"] = info == wanted
    found["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
    untied = tiny_models.llama(tie_word_embeddings=False)
    untied.config.tie_word_embeddings = True
    save_pretrained(untied, folder / "old" / "untied")
    loaded = from_pretrained(folder / "old" / "untied")
    found["another head is kept"] = torch.equal(loaded.lm_head.weight, untied.lm_head.weight)
    return found


def quantise(folder: Path) -> dict:
    model = tiny_models.llama(hidden_size=64, intermediate_size=128)
    model.save_pretrained(folder / "plain")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    found = {}
    for what, keywords in {"4 bit": four, "8 bit": {"load_in_8bit": True}}.items():
        config = transformers.BitsAndBytesConfig(**keywords)
        theirs = type(model).from_pretrained(folder / "plain", quantization_config=config)
        wanted = tiny_models.output_of(theirs)
        ours = from_pretrained(folder / "plain", quantization_config=config)
        found[f"{what}, while loading"] = tiny_models.agree(tiny_models.output_of(ours), wanted)
        theirs.save_pretrained(folder / what / "library")
        save_pretrained(theirs, folder / what / "ours")
        again = tiny_models.output_of(type(model).from_pretrained(folder / what / "library"))
        for kind in ("library", "ours"):
            loaded = from_pretrained(folder / what / kind)
            layer = type(loaded.model.layers[0].self_attn.q_proj).__name__
            same = tiny_models.agree(tiny_models.output_of(loaded), again)
            found[f"{what}, {kind}"] = same and layer.startswith("Linear")
            found[f"{what}, {kind}, layer"] = layer
    return found


if __name__ == "__main__":
    print(json.dumps({"exchange": exchange, "quantise": quantise}[sys.argv[1]](Path(sys.argv[2]))))

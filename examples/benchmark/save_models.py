"""Write one model in the three forms that deserialize_benchmark.py loads. See README.md for the variables."""

from __future__ import annotations

import argparse

import settings
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tensorizer import TensorSerializer


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    model = AutoModelForCausalLM.from_pretrained(settings.MODEL_ID, dtype=settings.DTYPE)
    settings.MODEL_FOLDER.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(settings.HF_FOLDER)
    # one copy per name, as in the .tensors file: safetensors refuses tied weights
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, settings.SAFETENSORS_FILE)
    with TensorSerializer(settings.TENSORS_FILE) as serializer:
        serializer.write_module(model)
    print(f"Wrote {settings.MODEL_FOLDER}")


if __name__ == "__main__":
    main()

"""Load a causal language model from a .tensors file and let it speak.

    python serialize.py && python deserialize-simple.py    # a small random model, offline: it speaks nonsense
    python deserialize-simple.py --source s3://bucket/name/model.tensors --model-ref org/name

deserialize.py does the same in one line; this one shows each step.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tensorizer import TensorDeserializer
from tensorizer.utils import convert_bytes, get_device, get_mem_usage, no_init_or_tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", default="model-tensors/model.tensors", help="path, or https://, s3://, redis:// URI"
    )
    parser.add_argument("--model-ref", default="model-tensors", help="name or folder with the configuration")
    parser.add_argument("--prompt", default="¡Hola! Encantado de conocerte. hoy voy a")
    parser.add_argument("--max-new-tokens", type=int, default=50)
    args = parser.parse_args()

    device = get_device()
    config = AutoConfig.from_pretrained(args.model_ref)
    # Buffers that are made at run time land on the device too; parameters take no memory and no time here.
    with torch.device(device), no_init_or_tensor():
        model = AutoModelForCausalLM.from_config(config)

    before = get_mem_usage()
    start = time.perf_counter()
    deserializer = TensorDeserializer(args.source, device=device)
    deserializer.load_into_module(model)
    seconds = time.perf_counter() - start
    deserializer.close()

    nbytes = deserializer.total_tensor_bytes
    print(f"Loaded {convert_bytes(nbytes)} in {seconds:.2f} s, {convert_bytes(nbytes / seconds)}/s")
    print(f"Memory before: {before}")
    print(f"Memory after:  {get_mem_usage()}")

    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model_ref)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=args.max_new_tokens,
            do_sample=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    print(f"Output: {tokenizer.decode(output[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()

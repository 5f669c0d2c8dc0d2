"""Write a causal language model as one .tensors file.

python serialize.py --model-ref EleutherAI/gpt-j-6B --output s3://bucket/gpt-j-6B/model.tensors
python serialize.py --model-ref ./my-model --output ./my-model.tensors
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

from tensorizer import TensorSerializer
from tensorizer.utils import convert_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-ref", default="EleutherAI/gpt-j-6B", help="model name or local folder")
    parser.add_argument("--output", default="gpt-j-6B.tensors", help="local path or s3:// URI")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model_ref, dtype=getattr(torch, args.dtype))

    start = time.perf_counter()
    serializer = TensorSerializer(args.output)
    serializer.write_module(model)
    serializer.close()
    seconds = time.perf_counter() - start

    nbytes = serializer.total_tensor_bytes
    print(f"Wrote {convert_bytes(nbytes)} in {seconds:.2f} s, {convert_bytes(nbytes / seconds)}/s")


if __name__ == "__main__":
    main()

"""Write a causal language model and its tokenizer as a folder with a .tensors file.

python serialize.py --model-ref EleutherAI/gpt-j-6B --output s3://bucket/gpt-j-6B
python serialize.py --model-ref ./my-model --output ./my-model-tensors
"""

from __future__ import annotations

import argparse
import time

from transformers import AutoTokenizer

from tensorizer.integrations.huggingface import from_pretrained, save_pretrained
from tensorizer.utils import convert_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-ref", default="EleutherAI/gpt-j-6B", help="model name or local folder")
    parser.add_argument("--output", default="gpt-j-6B", help="local folder or s3:// prefix")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    args = parser.parse_args()

    model = from_pretrained(None, args.model_ref, dtype=args.dtype)
    start = time.perf_counter()
    save_pretrained(model, args.output, tokenizer=AutoTokenizer.from_pretrained(args.model_ref))
    seconds = time.perf_counter() - start
    nbytes = model.get_memory_footprint()
    print(f"Wrote {convert_bytes(nbytes)} in {seconds:.2f} s, {convert_bytes(nbytes / seconds)}/s")


if __name__ == "__main__":
    main()

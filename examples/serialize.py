"""Write a causal language model and its tokenizer as a folder with a .tensors file.

python serialize.py                                                  # a small random model, made here, offline
python serialize.py --model-ref ./my-model --output ./my-model-tensors
python serialize.py --model-ref org/name --output s3://bucket/name   # from the hub
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from small_model import save_small_model
from transformers import AutoTokenizer

from tensorizer.integrations.huggingface import from_pretrained, save_pretrained
from tensorizer.utils import convert_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-ref", help="name on the hub or local folder; default: a small random model")
    parser.add_argument("--output", default="model-tensors", help="local folder or s3:// prefix")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        model_ref = args.model_ref or save_small_model(Path(folder))
        model = from_pretrained(model_ref, dtype=args.dtype)
        start = time.perf_counter()
        save_pretrained(model, args.output, tokenizer=AutoTokenizer.from_pretrained(model_ref))
        seconds = time.perf_counter() - start
    nbytes = model.get_memory_footprint()
    print(f"Wrote {convert_bytes(nbytes)} in {seconds:.2f} s, {convert_bytes(nbytes / seconds)}/s")


if __name__ == "__main__":
    main()

"""Load a causal language model from a folder, bucket or the hub, say how fast that was, and let it speak.

    python serialize.py && python deserialize.py        # a small random model, offline: it speaks nonsense
    python deserialize.py --source s3://bucket/name --verify-hash

With --encryption the passphrase is read from the environment variable MODEL_PASSPHRASE. With
TENSORIZER_ENABLE_PERF_STATS=1 set, the time spent reading and copying to the device is shown as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from transformers import AutoTokenizer

from tensorizer import DecryptionParams, serialization
from tensorizer.integrations.huggingface import from_pretrained
from tensorizer.utils import convert_bytes, get_device, get_gpu_name, get_mem_usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", default="model-tensors", help="local folder, s3:// or https:// prefix, or name on the hub"
    )
    parser.add_argument("--model-ref", help="name or folder of the tokenizer; default: the source")
    parser.add_argument("--verify-hash", action="store_true", help="compare every tensor with its stored digests")
    parser.add_argument("--encryption", action="store_true", help="decrypt with MODEL_PASSPHRASE")
    parser.add_argument("--prompt", default="In a shocking finding, scientists discovered")
    args = parser.parse_args()

    passphrase = os.environ.get("MODEL_PASSPHRASE")
    if args.encryption and not passphrase:
        sys.exit("--encryption: set MODEL_PASSPHRASE to the passphrase")
    key = DecryptionParams.from_string(passphrase) if args.encryption else None

    device = get_device()
    start = time.perf_counter()
    model = from_pretrained(args.source, device=device, verify=args.verify_hash, encryption=key)
    seconds = time.perf_counter() - start
    nbytes = model.get_memory_footprint()
    print(f"Loaded {convert_bytes(nbytes)} in {seconds:.3f} s, {convert_bytes(nbytes / seconds)}/s")
    print(f"GPU: {get_gpu_name()}; {get_mem_usage()}")
    if serialization._enable_perf_stats:
        for name, value in serialization._get_perf_stats().items():
            print(f"{name}: {convert_bytes(value) if name.endswith('bytes') else f'{value:.3f} s'}")

    tokenizer = AutoTokenizer.from_pretrained(args.model_ref or args.source)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    print(f"Output: {tokenizer.decode(output[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()

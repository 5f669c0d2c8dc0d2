"""Load a causal language model in every way the library offers, and say how fast that was.

    python deserialize.py --source ./model.tensors --model-ref ./my-model --verify-hash --num-readers 4

With --encryption the passphrase is read from the environment variable SUPER_SECRET_STRONG_PASSWORD. With
TENSORIZER_ENABLE_PERF_STATS=1 set, the time spent reading and copying to the device is shown as well.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tensorizer import DecryptionParams, TensorDeserializer, serialization
from tensorizer.utils import convert_bytes, get_device, get_gpu_name, get_mem_usage, no_init_or_tensor


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="local path, http(s)://, s3:// or redis:// URI")
    parser.add_argument("--model-ref", default="EleutherAI/gpt-j-6B", help="name or folder with the configuration")
    parser.add_argument("--no-plaid", action="store_true", help="accepted for old scripts; plaid mode has no effect")
    parser.add_argument("--lazy-load", action="store_true", help="read while placing tensors, not before")
    parser.add_argument("--verify-hash", action="store_true", help="compare every tensor with its stored digests")
    parser.add_argument("--encryption", action="store_true", help="decrypt with SUPER_SECRET_STRONG_PASSWORD")
    parser.add_argument("--viztracer", action="store_true", help="trace the load with the viztracer package")
    parser.add_argument("--num-readers", type=int, default=None, help="at most this many reading threads")
    parser.add_argument("--prompt", default="In a shocking finding, scientists discovered")
    return parser.parse_args()


def decryption_params() -> DecryptionParams:
    passphrase = os.environ.get("SUPER_SECRET_STRONG_PASSWORD")
    if not passphrase:
        sys.exit("--encryption: set SUPER_SECRET_STRONG_PASSWORD to the passphrase")
    return DecryptionParams.from_string(passphrase)


def tracer(wanted: bool) -> contextlib.AbstractContextManager:
    if not wanted:
        return contextlib.nullcontext()
    try:
        import viztracer
    except ImportError:
        sys.exit("--viztracer: pip install viztracer")
    return viztracer.VizTracer(pid_suffix=True)


def load(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(args.model_ref)
    with torch.device(device), no_init_or_tensor():
        model = AutoModelForCausalLM.from_config(config)

    start = time.perf_counter()
    with tracer(args.viztracer):
        deserializer = TensorDeserializer(
            args.source,
            device=device,
            plaid_mode=not args.no_plaid,
            lazy_load=args.lazy_load,
            verify_hash=args.verify_hash,
            encryption=decryption_params() if args.encryption else None,
            num_readers=args.num_readers,
        )
        deserializer.load_into_module(model)
    seconds = time.perf_counter() - start
    deserializer.close()

    nbytes = deserializer.total_tensor_bytes
    print(f"Loaded {convert_bytes(nbytes)} in {seconds:.3f} s, {convert_bytes(nbytes / seconds)}/s")
    print(f"Read {convert_bytes(deserializer.total_bytes_read)}; GPU: {get_gpu_name()}; {get_mem_usage()}")
    if serialization._enable_perf_stats:
        for name, value in serialization._get_perf_stats().items():
            print(f"{name}: {convert_bytes(value) if name.endswith('bytes') else f'{value:.3f} s'}")
    return model.eval()


def main() -> None:
    args = parse_args()
    device = get_device()
    model = load(args, device)

    tokenizer = AutoTokenizer.from_pretrained(args.model_ref)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    with torch.no_grad():
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

"""Write a Hugging Face model or pipeline to a folder or bucket with .tensors files, and load it back.

    python hf_serialization.py ./my-llama s3://bucket/my-llama --model-type transformers --validate
    python hf_serialization.py ./my-stable-diffusion ./out --model-type diffusers

INPUT is a model name or a local folder. A transformers model is written in half precision, a diffusers pipeline with
all its components as it is. Credentials for S3 come from S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY and S3_ENDPOINT_URL, or
else from where tensorizer.stream_io finds them.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch

from tensorizer import stream_io
from tensorizer.integrations.huggingface import from_pretrained, save_pretrained

logger = logging.getLogger("hf_serialization")


class ValidationError(Exception):
    """What was read back is not what was written."""


def stream_options() -> dict[str, Any]:
    """Keywords for open_stream from the environment. A caching endpoint (accel-...) may serve what was there before."""
    endpoint = os.environ.get("S3_ENDPOINT_URL")
    return {
        "s3_access_key_id": os.environ.get("S3_ACCESS_KEY_ID") or None,
        "s3_secret_access_key": os.environ.get("S3_SECRET_ACCESS_KEY") or None,
        "s3_endpoint": endpoint.replace("accel-", "", 1) if endpoint else None,
        "force_http": True if endpoint and endpoint.startswith("http://") else None,
    }


def exists(uri: str) -> bool:
    """Whether there is a file that is not empty."""
    try:
        with stream_io.open_stream(uri, "rb", **stream_options()) as stream:
            return bool(stream.read(1))
    except OSError:
        return False


def validate(written: torch.nn.Module, loaded: torch.nn.Module) -> None:
    """Raise a ValidationError unless both have the same tensors, byte for byte."""
    wanted, found = written.state_dict(), loaded.state_dict()
    if wanted.keys() != found.keys():
        raise ValidationError(f"tensors that only one side has: {sorted(wanted.keys() ^ found.keys())[:10]}")
    for name, tensor in wanted.items():
        other = found[name].to(tensor.device)
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise ValidationError(f"{name}: wanted {tensor.dtype}, {tensor.shape}, found {other.dtype}, {other.shape}")
        raw, other_raw = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (tensor, other))
        if not torch.equal(raw, other_raw):
            raise ValidationError(f"{name}: the contents differ")


def read(args: argparse.Namespace) -> tuple[Any, Any]:
    """The object by its own library, and its tokenizer if that is not part of it."""
    if args.model_type == "diffusers":
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.from_pretrained(args.input_directory), None
    from transformers import AutoTokenizer

    return from_pretrained(None, args.input_directory, dtype=torch.float16), AutoTokenizer.from_pretrained(
        args.input_directory
    )


def modules_of(obj: Any) -> dict[str, torch.nn.Module]:
    """The model itself, or those of a pipeline, by name."""
    parts = getattr(obj, "components", {"model": obj})
    return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input_directory", metavar="INPUT", help="model name or local folder")
    parser.add_argument("output_prefix", metavar="OUTPUT", help="local folder or s3://bucket/prefix")
    parser.add_argument("--model-type", choices=("transformers", "diffusers"), required=True)
    parser.add_argument("--validate", action="store_true", help="load the result and compare every tensor")
    parser.add_argument("--force", action="store_true", help="write again what exists")
    parser.add_argument("-q", "--quiet", action="count", default=0, help="say less (repeat for still less)")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="say more")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    levels = [logging.CRITICAL, logging.WARNING, logging.INFO, logging.DEBUG]
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(levels[max(0, min(3, 2 + args.verbose - args.quiet))])

    output = args.output_prefix.rstrip("/")
    last = "model_index.json" if args.model_type == "diffusers" else "config.json"  # written behind the weights
    obj, tokenizer = read(args)
    if exists(f"{output}/{last}") and not args.force:
        logger.info("%s exists; --force writes it again", output)
    else:
        logger.info("writing %s", output)
        save_pretrained(obj, output, tokenizer=tokenizer, stream_options=stream_options())
    if args.validate:
        loaded = modules_of(from_pretrained(None, output, stream_options=stream_options()))
        for name, module in modules_of(obj).items():
            validate(module, loaded[name])
        logger.info("validated")


if __name__ == "__main__":
    main()

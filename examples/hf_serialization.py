"""Write a Hugging Face model or pipeline to a folder or bucket with .tensors files, and load it back.

    python hf_serialization.py --validate                       # a small random model, made here, offline
    python hf_serialization.py ./my-llama s3://bucket/my-llama --model-type transformers --validate
    python hf_serialization.py ./my-stable-diffusion ./out --model-type diffusers

INPUT is a model name or a local folder. For a transformers model, hf_main() writes model.tensors in half precision, its
configuration and its tokenizer. For a diffusers pipeline, df_main() writes a folder for each of its parts. Credentials
for S3 come from S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY and S3_ENDPOINT_URL, or else from where tensorizer.stream_io
finds them.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from tensorizer import stream_io
from tensorizer.integrations.huggingface import from_pretrained, save_pretrained

logger = logging.getLogger("hf_serialization")


class ValidationError(Exception):
    """What was read back is not what was written."""


def stream_options() -> dict[str, Any]:
    """Keywords for open_stream from the environment. A caching endpoint (accel-...) may return the previous object."""
    endpoint = os.environ.get("S3_ENDPOINT_URL")
    return {
        "s3_access_key_id": os.environ.get("S3_ACCESS_KEY_ID") or None,
        "s3_secret_access_key": os.environ.get("S3_SECRET_ACCESS_KEY") or None,
        "s3_endpoint": endpoint.replace("accel-", "", 1) if endpoint else None,
        "force_http": True if endpoint and endpoint.startswith("http://") else None,
    }


def exists(uri: str) -> bool:
    """Whether a file exists and is not empty."""
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
            raise ValidationError(f"{name}: expected {tensor.dtype}, {tensor.shape}, got {other.dtype}, {other.shape}")
        raw, other_raw = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (tensor, other))
        if not torch.equal(raw, other_raw):
            raise ValidationError(f"{name}: the contents differ")


def hf_main(args: argparse.Namespace) -> None:
    """Write a transformers model, its configuration and its tokenizer; load it back with --validate."""
    from transformers import AutoTokenizer

    model = from_pretrained(args.input_directory, dtype=torch.float16)
    output, options = args.output_prefix, stream_options()
    if must_write(args, "config.json"):  # it is written behind the weights
        tokenizer = AutoTokenizer.from_pretrained(args.input_directory)
        save_pretrained(model, output, tokenizer=tokenizer, stream_options=options)
    if args.validate:
        validate(model, from_pretrained(output, stream_options=options))


def df_main(args: argparse.Namespace) -> None:
    """Write a diffusers pipeline, each part in a folder of its own; load it back with --validate."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(args.input_directory)
    output, options = args.output_prefix, stream_options()
    if must_write(args, "tensorizer_files.json"):  # it is written last
        save_pretrained(pipeline, output, stream_options=options)
    if args.validate:
        loaded = from_pretrained(output, stream_options=options)
        for name, part in pipeline.components.items():
            if isinstance(part, torch.nn.Module):
                validate(part, getattr(loaded, name))


def must_write(args: argparse.Namespace, last: str) -> bool:
    """Whether to write: the file that is written last is missing, or --force is given."""
    if exists(f"{args.output_prefix}/{last}") and not args.force:
        logger.info("%s exists; --force writes it again", args.output_prefix)
        return False
    logger.info("writing %s", args.output_prefix)
    return True


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "input_directory", metavar="INPUT", nargs="?", help="model name or local folder; default: a small random model"
    )
    parser.add_argument(
        "output_prefix", metavar="OUTPUT", nargs="?", default="out", help="local folder or s3://bucket/prefix"
    )
    parser.add_argument(
        "--model-type",
        choices=("transformers", "diffusers"),
        default="transformers",
        help="transformers: hf_main, diffusers: df_main",
    )
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

    args.output_prefix = args.output_prefix.rstrip("/")
    with tempfile.TemporaryDirectory() as folder:
        if args.input_directory is None:
            from small_model import save_small_model

            args.input_directory = save_small_model(Path(folder))
        {"transformers": hf_main, "diffusers": df_main}[args.model_type](args)
    if args.validate:
        logger.info("validated")


if __name__ == "__main__":
    main()

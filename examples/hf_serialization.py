"""Write a Hugging Face model to a folder or bucket as .tensors files, and load it back.

    python hf_serialization.py ./my-llama s3://bucket/my-llama --model-type transformers --validate
    python hf_serialization.py ./my-stable-diffusion ./out --model-type diffusers

INPUT is a model name or a local folder. A transformers model becomes model.tensors and model-config.json, in half
precision; a Stable Diffusion pipeline becomes pairs named encoder, vae and unet, and the zipped tokenizer and
scheduler. Credentials for S3 come from S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY and S3_ENDPOINT_URL, or else from where
tensorizer.stream_io finds them.

The functions here can be imported: load_model and load_pretrained read from local folders, S3 and HTTP(S).
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
from tensorizer.integrations import huggingface
from tensorizer.utils import convert_bytes, get_device, get_mem_usage

logger = logging.getLogger("hf_serialization")


class ValidationError(Exception):
    """What was read back is not what was written."""


class NameMismatchError(ValidationError):
    """A tensor is missing or surplus."""


class ValueMismatchError(ValidationError):
    """A tensor has another dtype, shape or content."""


class ComponentMismatchError(ValidationError):
    """A tokenizer or scheduler has other files, or the same with other content."""


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


def serialize_model(
    model: torch.nn.Module, config: Any, model_directory: str, model_prefix: str = "model", force: bool = False
) -> None:
    """Write a model and its configuration, unless both are there already."""
    wanted = [f"{model_directory}/{model_prefix}.tensors"]
    wanted += [] if config is None else [f"{model_directory}/{model_prefix}-config.json"]
    if not force and all(exists(uri) for uri in wanted):
        logger.info("%s exists; --force writes it again", wanted[0])
        return
    logger.info("writing %s", wanted[0])
    huggingface.serialize_model(model, config, model_directory, model_prefix, stream_options=stream_options())


def load_model(
    path_uri: str,
    model_class: Any,
    config_class: Any = None,
    model_prefix: str = "model",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Load what serialize_model wrote; by default onto the GPU, if there is one."""
    device = get_device() if device is None else device
    logger.info("loading %s/%s.tensors to %s; %s", path_uri, model_prefix, device, get_mem_usage())
    return huggingface.load_model(
        path_uri, model_class, config_class, model_prefix, device, dtype, stream_options=stream_options()
    )


def serialize_pretrained(component: Any, zip_directory: str, prefix: str = "pretrained", force: bool = False) -> None:
    """Write a tokenizer or scheduler as a zip file, unless it is there already."""
    uri = f"{zip_directory}/{prefix}.zip"
    if not force and exists(uri):
        logger.info("%s exists; --force writes it again", uri)
        return
    logger.info("writing %s", uri)
    huggingface.serialize_pretrained(component, zip_directory, prefix, stream_options=stream_options())


def load_pretrained(component_class: Any, path_uri: str, prefix: str = "pretrained") -> Any:
    """Load what serialize_pretrained wrote."""
    return huggingface.load_pretrained(component_class, path_uri, prefix, stream_options=stream_options())


def validate_model(model: torch.nn.Module, loaded: torch.nn.Module) -> None:
    """Raise a ValidationError unless both have the same tensors, byte for byte."""
    wanted, found = model.state_dict(), loaded.state_dict()
    if wanted.keys() != found.keys():
        raise NameMismatchError(f"tensors that only one side has: {sorted(wanted.keys() ^ found.keys())[:10]}")
    for name, tensor in wanted.items():
        other = found[name].to(tensor.device)
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise ValueMismatchError(
                f"{name}: wanted {tensor.dtype} {tuple(tensor.shape)}, found {other.dtype} {tuple(other.shape)}"
            )
        raw, other_raw = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (tensor, other))
        if not torch.equal(raw, other_raw):
            raise ValueMismatchError(f"{name}: the contents differ")


def validate_pretrained(component: Any, loaded: Any) -> None:
    """Raise a ValidationError unless both components save the same files."""
    with tempfile.TemporaryDirectory() as wanted, tempfile.TemporaryDirectory() as found:
        component.save_pretrained(wanted)
        loaded.save_pretrained(found)
        names = [{path.name for path in Path(folder).iterdir()} for folder in (wanted, found)]
        if names[0] != names[1]:
            raise ComponentMismatchError(f"files that only one side has: {sorted(names[0] ^ names[1])}")
        for name in sorted(names[0]):
            if Path(wanted, name).read_bytes() != Path(found, name).read_bytes():
                raise ComponentMismatchError(f"{name}: the contents differ")


def hf_main(args: argparse.Namespace) -> None:
    """Write (and validate) a transformers model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    output = args.output_prefix.rstrip("/")
    config = AutoConfig.from_pretrained(args.input_directory)
    model = AutoModelForCausalLM.from_pretrained(args.input_directory, config=config, dtype=torch.float16)
    config.dtype = torch.float16
    logger.info("%s of parameters", convert_bytes(sum(p.nbytes for p in model.parameters())))
    serialize_model(model, config, output, force=args.force)
    if args.validate:
        validate_model(model, load_model(output, type(model), type(config), device="cpu"))
        logger.info("validated")


def df_main(args: argparse.Namespace) -> None:
    """Write (and validate) the parts of a Stable Diffusion pipeline."""
    from diffusers import StableDiffusionPipeline

    output = args.output_prefix.rstrip("/")
    pipeline = StableDiffusionPipeline.from_pretrained(args.input_directory, safety_checker=None)
    models = {"encoder": pipeline.text_encoder, "vae": pipeline.vae, "unet": pipeline.unet}
    components = {"tokenizer": pipeline.tokenizer, "scheduler": pipeline.scheduler}
    for prefix, model in models.items():
        serialize_model(model, model.config, output, prefix, force=args.force)
    for prefix, component in components.items():
        serialize_pretrained(component, output, prefix, force=args.force)
    if args.validate:
        for prefix, model in models.items():
            config_class = type(model.config) if prefix == "encoder" else None
            validate_model(model, load_model(output, type(model), config_class, prefix, device="cpu"))
        for prefix, component in components.items():
            validate_pretrained(component, load_pretrained(type(component), output, prefix))
        logger.info("validated")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input_directory", metavar="INPUT", help="model name or local folder")
    parser.add_argument("output_prefix", metavar="OUTPUT", help="local folder or s3://bucket/prefix")
    parser.add_argument("--model-type", choices=("transformers", "diffusers"), required=True)
    parser.add_argument("--validate", action="store_true", help="load the result and compare every tensor")
    parser.add_argument("--force", action="store_true", help="write files again that exist")
    parser.add_argument("-q", "--quiet", action="count", default=0, help="say less (repeat for still less)")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="say more")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    levels = [logging.CRITICAL, logging.WARNING, logging.INFO, logging.DEBUG]
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logger.setLevel(levels[max(0, min(3, 2 + args.verbose - args.quiet))])
    {"transformers": hf_main, "diffusers": df_main}[args.model_type](args)


if __name__ == "__main__":
    main()

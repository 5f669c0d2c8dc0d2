"""Load one model with transformers, safetensors and tensorizer in turn, and read a file from any source.

    python benchmark.py                                     # a small random model, made here, offline
    python benchmark.py --model-ref ./my-model --trials 5 --dtype float16
    python benchmark.py --sources https://host/model.tensors s3://bucket/model.tensors --buffer-sizes 262144 16777216

Each load of a model runs in a process of its own, the libraries take turns, and the time includes building the model.
The page cache stays warm. With --sources, each file is read with each size of buffer, as bytes ("raw") and as tensors
("load"). --json prints one JSON object per measurement. `make bench` is the project's own, thorough benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream
from tensorizer.utils import convert_bytes, get_device, no_init_or_tensor

READ_SIZE = 16 << 20


def write_forms(model_ref: str, folder: Path, dtype: torch.dtype) -> None:
    """The model as transformers, safetensors and tensorizer read it."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_ref, dtype=dtype)
    model.save_pretrained(folder)
    # one copy per name, as in the .tensors file: safetensors refuses tied weights
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "flat.safetensors")
    with TensorSerializer(folder / "model.tensors") as serializer:
        serializer.write_module(model)


def load_transformers(folder: Path, device: torch.device) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)


def empty_model(folder: Path, device: torch.device) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device(device), no_init_or_tensor():
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype)


def load_safetensors(folder: Path, device: torch.device) -> torch.nn.Module:
    from safetensors.torch import load_file

    model = empty_model(folder, device)
    state_dict = load_file(folder / "flat.safetensors", device=str(device))
    model.load_state_dict(state_dict, strict=False, assign=True)
    model.tie_weights()
    return model


def load_tensorizer(folder: Path, device: torch.device) -> torch.nn.Module:
    model = empty_model(folder, device)
    with TensorDeserializer(folder / "model.tensors", device=device) as tensors:
        tensors.load_into_module(model)
    model.tie_weights()
    return model


LOADERS = {"transformers": load_transformers, "safetensors": load_safetensors, "tensorizer": load_tensorizer}


def measure(loader: str, folder: Path) -> dict[str, Any]:
    """One load in this process, and a forward pass that proves that the model computes."""
    device = get_device()
    torch.zeros(1, device=device)  # the device's own start-up is not part of the load
    start = time.perf_counter()
    model = LOADERS[loader](folder, device).eval()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        logits = model(torch.arange(8, device=device)[None]).logits
    if not torch.isfinite(logits).all():
        raise SystemExit(f"{loader}: the loaded model does not compute")
    return {"loader": loader, "seconds": seconds, "bytes": sum(p.nbytes for p in model.parameters())}


def read_source(uri: str, kind: str, buffer_size: int) -> dict[str, Any]:
    """All bytes of a file ("raw"), or all tensors in host memory ("load")."""
    start = time.perf_counter()
    with open_stream(uri, "rb", buffer_size=buffer_size) as stream:
        if kind == "load":
            tensors = TensorDeserializer(stream, device="cpu")
            nbytes = tensors.total_tensor_bytes
            tensors.close()
        else:
            buffer, nbytes = bytearray(READ_SIZE), 0
            while count := stream.readinto(buffer):
                nbytes += count
    seconds = time.perf_counter() - start
    return {"source": uri, "kind": kind, "buffer_size": buffer_size, "seconds": seconds, "bytes": nbytes}


def show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    rate = f"{result['seconds']:.3f} s, {convert_bytes(result['bytes'] / result['seconds'])}/s"
    if "loader" in result:
        print(f"{result['loader']:12} {rate}", flush=True)
    else:
        size = convert_bytes(result["buffer_size"], decimal=False)
        print(f"{result['kind']:4} buffer {size:>10}: {rate}  {result['source']}", flush=True)


def compare_loaders(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if args.model_ref is None:
            from small_model import save_small_model

            args.model_ref = save_small_model(folder / "small")
        write_forms(args.model_ref, folder, getattr(torch, args.dtype))
        seconds: dict[str, list[float]] = {loader: [] for loader in args.loaders}
        for _ in range(args.trials):
            for loader in args.loaders:
                command = [sys.executable, __file__, "--measure", loader, text]
                child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                result = json.loads(child.stdout.splitlines()[-1])
                seconds[loader].append(result["seconds"])
                show(result, args.json)
    if not args.json:
        medians = {loader: f"{statistics.median(found):.3f} s" for loader, found in seconds.items()}
        print("medians:", ", ".join(f"{loader} {median}" for loader, median in medians.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-ref", help="name on the hub or local folder; default: a small random model")
    parser.add_argument("--dtype", default="float32", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--loaders", nargs="+", default=list(LOADERS), choices=LOADERS)
    parser.add_argument("--trials", type=int, default=3, help="loads per library, or reads per source and size")
    parser.add_argument("--sources", nargs="+", default=[], metavar="URI", help="read these files instead")
    parser.add_argument("--buffer-sizes", nargs="+", type=int, default=[256 << 10, 16 << 20], metavar="BYTES")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.trials, *args.buffer_sizes) < 1:
        parser.error("--trials, --buffer-sizes: expected 1 or more")
    if args.measure:
        print(json.dumps(measure(args.measure[0], Path(args.measure[1]))))
        return
    for uri in args.sources:
        for buffer_size in args.buffer_sizes:
            for _ in range(args.trials):
                for kind in ("raw", "load"):
                    show(read_source(uri, kind, buffer_size), args.json)
    if not args.sources:
        compare_loaders(args)


if __name__ == "__main__":
    main()

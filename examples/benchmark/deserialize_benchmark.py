"""Load a model with each library in turn and write the times to RES_PATH. See README.md for the variables."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from typing import Any

import settings
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tensorizer import TensorDeserializer
from tensorizer.utils import get_device, get_gpu_name, no_init_or_tensor


def load_hf(device: torch.device) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(settings.HF_FOLDER, dtype=settings.DTYPE).to(device)


def empty_model(device: torch.device) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(settings.HF_FOLDER)
    with torch.device(device), no_init_or_tensor():
        return AutoModelForCausalLM.from_config(config, dtype=settings.DTYPE)


def load_safetensors(device: torch.device) -> torch.nn.Module:
    from safetensors.torch import load_file

    model = empty_model(device)
    state_dict = load_file(settings.SAFETENSORS_FILE, device=str(device))
    model.load_state_dict(state_dict, strict=False, assign=True)
    model.tie_weights()
    return model


def load_tensorizer(device: torch.device) -> torch.nn.Module:
    model = empty_model(device)
    TensorDeserializer(settings.TENSORS_FILE, device=device).load_into_module(model)
    model.tie_weights()
    return model


LOADERS = {"hf": load_hf, "safetensors": load_safetensors, "tensorizer": load_tensorizer}


def measure(name: str) -> dict[str, Any]:
    """One load in this process."""
    device = get_device()
    torch.zeros(1, device=device)  # the device's own start-up is nobody's merit
    start = time.perf_counter()
    model = LOADERS[name](device).eval()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    result = {"loader": name, "seconds": seconds, "bytes": sum(p.nbytes for p in model.parameters())}
    if not settings.SKIP_INFERENCE:
        start = time.perf_counter()
        with torch.no_grad():
            logits = model(torch.arange(8, device=device)[None]).logits
        if not torch.isfinite(logits).all():
            raise SystemExit(f"{name}: the loaded model does not compute")
        result["inference_seconds"] = time.perf_counter() - start
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=LOADERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return

    results = []
    for trial in range(settings.NUM_TRIALS):
        for name in LOADERS:
            if name in settings.SKIPPED:
                continue
            child = subprocess.run(
                [sys.executable, __file__, "--measure", name], stdout=subprocess.PIPE, text=True, check=True
            )
            result = {"trial": trial, **json.loads(child.stdout.splitlines()[-1])}
            print(f"{trial + 1}/{settings.NUM_TRIALS} {name}: {result['seconds']:.3f} s")
            results.append(result)

    now = datetime.now(timezone.utc)
    report = {
        "model": settings.MODEL_NAME,
        "time": now.isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "gpu": get_gpu_name(), "torch": torch.__version__},
        "results": results,
    }
    settings.RES_PATH.mkdir(parents=True, exist_ok=True)
    output = settings.RES_PATH / f"{settings.MODEL_NAME}-{now:%Y%m%dT%H%M%S}.json"
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()

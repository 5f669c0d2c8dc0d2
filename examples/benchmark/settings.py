"""What the benchmark reads from the environment."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def _flag(name: str, default: str = "0") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true", "yes")


MODEL_NAME = os.environ.get("MODEL_NAME", "model")
MODEL_ID = os.environ.get("MODEL_ID", "EleutherAI/gpt-neo-125M")
MODEL_FOLDER = Path(os.environ.get("MODEL_PATH", "models")) / MODEL_NAME
RES_PATH = Path(os.environ.get("RES_PATH", "results"))
NUM_TRIALS = int(os.environ.get("NUM_TRIALS", "5"))
DTYPE = torch.float16 if _flag("USE_FP16", "1") else torch.float32
SKIPPED = {
    name for name, flag in (("hf", "SKIP_HF"), ("safetensors", "SKIP_ST"), ("tensorizer", "SKIP_TZR")) if _flag(flag)
}
SKIP_INFERENCE = _flag("SKIP_INFERENCE")

HF_FOLDER = MODEL_FOLDER / "hf"
SAFETENSORS_FILE = MODEL_FOLDER / "model.safetensors"
TENSORS_FILE = MODEL_FOLDER / "model.tensors"

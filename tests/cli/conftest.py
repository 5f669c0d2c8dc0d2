"""A model and a key for the commands."""

from __future__ import annotations

import pytest
import samples
import torch
from command_line import KEY, write


@pytest.fixture
def tensors():
    return {
        "embed.weight": samples.tensor((64, 32), torch.float16, 1),
        "layers.0.weight": torch.arange(1024.0).reshape(32, 32),
        "layers.1.weight": samples.tensor((32, 32), torch.float32, 3),
        "steps": torch.tensor(7),
    }


@pytest.fixture
def model(tmp_path, tensors):
    return write(tmp_path / "model.tensors", tensors)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path

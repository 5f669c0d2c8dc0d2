"""The CUDA device that is measured: the first one, or the fake driver of the tests where ``BENCH_FAKE_CUDA=1``.

On the fake driver the figures mean nothing; it shows that the command works before a machine with a GPU is at hand.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEVICE = "cuda:0"
_fake: Any = None


def is_fake() -> bool:
    """Whether the fake driver stands in for a device."""
    return os.environ.get("BENCH_FAKE_CUDA") == "1"


def require_device() -> None:
    """Make sure that there is something to measure.

    Raises:
        RuntimeError: There is no CUDA device.
    """
    import torch

    if not is_fake() and not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device (BENCH_FAKE_CUDA=1 tries the command out over the fake driver)")


def fake_device() -> Any:
    """The stand-in, installed in this process: see ``tests/helpers/accelerators.py``."""
    global _fake
    if _fake is None:
        path = Path(__file__).resolve().parents[1] / "tests" / "helpers" / "accelerators.py"
        spec = importlib.util.spec_from_file_location("accelerators", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _fake = module.FakeDevice(module.fake_driver())
        _fake.install(_Setter())
    return _fake


class _Setter:
    """As much of pytest's ``monkeypatch`` as a process needs that ends soon."""

    setattr = staticmethod(setattr)


def put(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict on the device."""
    if is_fake():
        return {name: fake_device().put(tensor) for name, tensor in state.items()}
    return {name: tensor.to(DEVICE) for name, tensor in state.items()}


def fetch(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict on the host."""
    if is_fake():
        return {name: fake_device().fetch(tensor) for name, tensor in state.items()}
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def settle() -> None:
    """Wait until the device has done everything."""
    if is_fake():
        fake_device().driver.wait(None, 0)
    else:
        import torch

        torch.cuda.synchronize()

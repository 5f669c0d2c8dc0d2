"""Removes the wrappers of ``torch.compile`` from models, because no loader knows the names that they add."""

from __future__ import annotations

import sys
from typing import TypeVar

import torch

_Module = TypeVar("_Module", bound=torch.nn.Module)


def unwrapped(module: _Module) -> _Module:
    """The module that was compiled, with its original class and names.

    Args:
        module: Any module. It is not changed. If parts of it are compiled, the result is a shallow copy that shares
            the parameters and buffers of `module`.
    """
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if wrapper is None:  # then nothing was compiled
        return module
    while isinstance(module, wrapper):
        module = module._orig_mod
    if not any(isinstance(part, wrapper) for part in module.modules()):
        return module
    found = object.__new__(type(module))
    found.__dict__.update(module.__dict__)
    found.__dict__["_modules"] = {
        name: None if part is None else unwrapped(part) for name, part in module._modules.items()
    }
    return found

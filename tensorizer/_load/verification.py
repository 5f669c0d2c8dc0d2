"""Comparing the tensors of a module with the digests in the file."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tensorizer._format.names import Name
from tensorizer._load.container import Container
from tensorizer._load.digests import holds
from tensorizer._load.modules import live_tensors

__all__ = ["verify_module"]


def verify_module(container: Container, module: torch.nn.Module) -> list[tuple[Name, bool]]:
    """Whether each stored tensor is the one in the module, as ``TensorDeserializer.verify_module`` says.

    Raises:
        RuntimeError: A tensor of the file was not read yet, so that its digests are unknown.
        NotImplementedError: A tensor of the module is on the meta device.
    """
    unread = [container.names[i] for i in container.selection if not container.has_header(i)]
    if unread:
        raise RuntimeError(
            f"the hashes of {len(unread)} tensors (first: {unread[0]!r}) are known only after they were loaded; "
            "load the file before verifying"
        )
    live = live_tensors(module)
    return [(container.names[i], _matches(container, i, live)) for i in container.selection]


def _matches(container: Container, i: int, live: Mapping[str, torch.Tensor]) -> bool:
    name = container.names[i]
    if not isinstance(name, str):
        return False
    tensor = live.get(name)
    if tensor is None and name.startswith("."):
        tensor = live.get(name[1:])
    if tensor is None:
        return False
    if tensor.is_meta:
        raise NotImplementedError(f"tensor {name!r} of the module is on the meta device: it has no data to compare")
    return holds(container, i, tensor) is True

"""Putting tensors into a module on the way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Optional, cast

import torch

from tensorizer._format.entries import FilterFuncType, TensorType
from tensorizer._load.container import Container
from tensorizer._load.loaded_tensors import LoadedTensors
from tensorizer._system.devices import ordinary_tensors

__all__ = ["insert_into_module", "live_tensors", "load_into_module"]


def load_into_module(
    container: Container,
    loaded: LoadedTensors,
    module: torch.nn.Module,
    filter_func: Optional[FilterFuncType],
    verify_hash: Optional[bool],
) -> int:
    """Places the tensors that the filter wants, as ``TensorDeserializer.load_into_module`` says."""
    chosen = container.accepted_by(filter_func)
    modules = dict(module.named_modules())
    for i in chosen:
        _check_placeable(container, i, modules)
    for i, tensor in zip(chosen, loaded.load(chosen, verify_hash)):
        is_buffer = container.type(i) is TensorType.BUFFER
        insert_into_module(modules, cast(str, container.names[i]), is_buffer, tensor)
    return len(chosen)


def _check_placeable(container: Container, i: int, modules: Mapping[str, torch.nn.Module]) -> None:
    name = container.names[i]
    if not isinstance(name, str) or container.type(i) is TensorType.STATE_DICT:
        raise NotImplementedError(
            f"tensor {name!r} was written from a state dict, which has no modules to load into; "
            "use module.load_state_dict(deserializer) or deserializer.tree()"
        )
    path = name.rpartition(".")[0]
    if path not in modules:
        raise KeyError(f"{name}: the module has no submodule {path!r}")


def insert_into_module(
    modules: Mapping[str, torch.nn.Module], name: str, is_buffer: bool, tensor: torch.Tensor
) -> None:
    """Registers `tensor` under its stored name; what was registered there before is replaced.

    Buffers become plain tensors and keep their persistence; a buffer that did not exist becomes persistent.

    Raises:
        KeyError: No module of that path, or the attribute exists as the other kind.
    """
    path, _, attribute = name.rpartition(".")
    module = modules.get(path)
    if module is None:
        raise KeyError(f"{name}: the module has no submodule {path!r}")
    if is_buffer:
        # Persistence is named only where it is not the default: subclasses may have a register_buffer without it.
        options = {"persistent": False} if attribute in module._non_persistent_buffers_set else {}
        with ordinary_tensors():
            plain = tensor.detach()
        module.register_buffer(attribute, plain, **options)
    else:
        if not isinstance(tensor, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
        module.register_parameter(attribute, tensor)


def live_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a module by state-dict name: its state dict plus every named buffer, and every tied name."""
    tensors = _with_ties(module.named_buffers)
    tensors.update(_with_ties(module.named_parameters))
    tensors.update((name, value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor))
    return tensors


def _with_ties(listing: Callable[..., Iterator[tuple[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """What a module lists; every tied name too, unless its class overrides the method with fewer arguments."""
    try:
        return dict(listing(remove_duplicate=False))
    except TypeError:
        return dict(listing())

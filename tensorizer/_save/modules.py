"""The tensors of a module, as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tensorizer._format.extra_state import gives_state
from tensorizer._format.names import modules_of

__all__ = ["ModuleTensor", "extra_states", "modules_with_extra_state", "walk_module"]


class ModuleTensor(NamedTuple):
    """One parameter or buffer of a module, as it is stored."""

    module: torch.nn.Module  # the one that holds it
    attribute: str  # its name there
    module_idx: int  # position in named_modules()
    name: str  # "<module path>.<attribute>"; a tensor of the root starts with a dot
    is_buffer: bool
    tensor: torch.Tensor
    is_further: bool = False  # another name of what its module has already, or of a module that was there already


def walk_module(
    root: torch.nn.Module, include_non_persistent_buffers: bool, every_name: bool = False
) -> Iterator[ModuleTensor]:
    """Every tensor of `root` in file order: per module its parameters, then its buffers, in registration order.

    A module registered under two names appears once, a tensor registered twice in one module too; tensors shared by
    different modules appear once per name (docs/format.md, "Modules"). With `every_name` all of them appear under each
    of their names, as in the state dict.
    """
    positions = {id(module): position for position, (_, module) in enumerate(root.named_modules())}
    passed: set[int] = set()
    for path, module in modules_of(root).items() if every_name else root.named_modules():
        listed: set[int] = set()
        for attribute, tensor, is_buffer in _tensors_of(module, every_name):
            is_further = id(module) in passed or id(tensor) in listed
            listed.add(id(tensor))
            if not is_buffer or include_non_persistent_buffers or attribute not in module._non_persistent_buffers_set:
                name = f"{path}.{attribute}"
                module_idx = positions.get(id(module), 0)
                yield ModuleTensor(module, attribute, module_idx, name, is_buffer, tensor, is_further)
        passed.add(id(module))


def _tensors_of(module: torch.nn.Module, every_name: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, tensor and whether it is a buffer, of a module itself."""
    if every_name:
        for registered, is_buffer in ((module._parameters, False), (module._buffers, True)):
            yield from ((name, tensor, is_buffer) for name, tensor in registered.items() if tensor is not None)
        return
    yield from ((name, parameter, False) for name, parameter in module.named_parameters(recurse=False))
    yield from ((name, buffer, True) for name, buffer in module.named_buffers(recurse=False))


def modules_with_extra_state(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules below `root`, by path, whose class has state beyond tensors."""
    return {path: module for path, module in root.named_modules() if gives_state(module)}


def extra_states(root: torch.nn.Module) -> dict[str, Any]:
    """The extra states of the modules that have any, by path."""
    states = {path: module.get_extra_state() for path, module in modules_with_extra_state(root).items()}
    return {path: state for path, state in states.items() if state is not None}

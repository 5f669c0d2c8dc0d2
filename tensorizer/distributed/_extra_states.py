"""Extra state of modules: which modules have it, under which names, without asking them for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tensorizer._format.extra_state import gives_state, is_without_state, state_name, takes_state
from tensorizer._format.names import modules_of

__all__ = ["ModuleState", "is_state_name", "state_of"]


class ModuleState(NamedTuple):
    """What the state dict of a module consists of."""

    #: As ``state_dict(keep_vars=True)`` has them, without extra states.
    tensors: dict[str, Any]
    #: The modules that take extra state, by its name.
    takers: dict[str, torch.nn.Module]

    def lacking(self, supplied: Mapping[str, Any]) -> list[str]:
        """Names of the extra states that no name of their module supplies, but of those that are ``None``."""
        names: dict[int, list[str]] = {}
        for name, module in self.takers.items():
            names.setdefault(id(module), []).append(name)
        lacking = [group for group in names.values() if supplied.keys().isdisjoint(group)]
        return [name for group in lacking if not is_without_state(self.takers[group[0]]) for name in group]


def is_state_name(name: str) -> bool:
    """Whether state dicts call extra state so."""
    return name.rpartition(".")[2] == state_name("")


def state_of(module: torch.nn.Module) -> ModuleState:
    """The state dict of a module, apart from extra states, which are not made."""
    modules = modules_of(module)
    with _unasked(modules.values()):
        values = module.state_dict(keep_vars=True)
    # Wrappers leave themselves out of the names.
    found = {name: value.module for name, value in values.items() if isinstance(value, _Unasked)}
    known = {id(owner) for owner in found.values()}
    paths = {state_name(path): child for path, child in modules.items() if gives_state(child) or takes_state(child)}
    takers = {name: m for name, m in paths.items() if id(m) not in known} | found
    tensors = {name: value for name, value in values.items() if name not in found and name not in paths}
    return ModuleState(tensors, {name: m for name, m in takers.items() if takes_state(m)})


class _Unasked:
    """In place of the extra state of a module in a state dict."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


@contextlib.contextmanager
def _unasked(modules: Any) -> Iterator[None]:
    """Keeps ``state_dict`` from calling ``get_extra_state``, which may be slow, or fail before there is a state."""
    with contextlib.ExitStack() as restored:
        for module in {id(m): m for m in modules if gives_state(m)}.values():
            attributes = vars(module)
            if "get_extra_state" in attributes:
                restored.callback(attributes.__setitem__, "get_extra_state", attributes["get_extra_state"])
            else:
                restored.callback(attributes.pop, "get_extra_state", None)
            attributes["get_extra_state"] = _answer(module)
        yield


def _answer(module: torch.nn.Module) -> Callable[[], _Unasked]:
    return lambda: _Unasked(module)

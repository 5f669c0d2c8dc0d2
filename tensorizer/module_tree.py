"""Walking a module or a nested object on the way out, and putting tensors back into one on the way in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer._system.devices import ordinary_tensors

__all__ = [
    "ModuleTensor",
    "Path",
    "branch",
    "check_module",
    "display",
    "flatten",
    "insert_into_module",
    "live_tensors",
    "walk_module",
]

Path = tuple[Union[str, int], ...]


class ModuleTensor(NamedTuple):
    """One parameter or buffer of a module, as it is stored."""

    module: torch.nn.Module  # the one that holds it
    attribute: str  # its name there
    module_idx: int  # position in named_modules()
    name: str  # "<module path>.<attribute>"; a tensor of the root starts with a dot
    is_buffer: bool
    tensor: torch.Tensor


def check_module(module: object) -> None:
    """Refuses what is no module; an object that answers ``named_modules()`` with modules counts as one.

    Raises:
        TypeError: Another type.
    """
    if not isinstance(module, torch.nn.Module) and not callable(getattr(module, "named_modules", None)):
        raise TypeError(f"wanted a torch.nn.Module, found {type(module).__name__}")


def walk_module(root: torch.nn.Module, include_non_persistent_buffers: bool) -> Iterator[ModuleTensor]:
    """Every tensor of `root` in file order: per module its parameters, then its buffers, in registration order.

    A module registered under two names appears once, a tensor registered twice in one module too; tensors shared by
    different modules appear once per name (docs/format.md, "Modules").
    """
    for module_idx, (path, module) in enumerate(root.named_modules()):
        for attribute, parameter in module.named_parameters(recurse=False):
            yield ModuleTensor(module, attribute, module_idx, f"{path}.{attribute}", False, parameter)
        for attribute, buffer in module.named_buffers(recurse=False):
            if include_non_persistent_buffers or attribute not in module._non_persistent_buffers_set:
                yield ModuleTensor(module, attribute, module_idx, f"{path}.{attribute}", True, buffer)


def flatten(structure: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of nested mappings and sequences with their paths, depth first in iteration order.

    Raises:
        TypeError: A mapping key that is not a ``str``, a leaf that is not a tensor (text and bytes included), a
            structure that contains itself, or a top level that is neither mapping nor sequence.
    """
    if isinstance(structure, torch.Tensor) or not isinstance(structure, (Mapping, Sequence)):
        raise TypeError(f"wanted a mapping or a sequence of tensors, found {type(structure).__name__}")
    # An explicit stack: nesting is bounded by memory, not by the interpreter's recursion limit.
    stack: list[Iterator[tuple[Path, Any]]] = [_children((), structure)]
    open_ids = [id(structure)]
    while stack:
        item = next(stack[-1], None)
        if item is None:
            stack.pop()
            open_ids.pop()
            continue
        path, value = item
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, (Mapping, Sequence)):
            raise TypeError(f"wanted a tensor at {display(path)}, found {type(value).__name__}")
        elif id(value) in open_ids:
            raise TypeError(f"the structure at {display(path)} contains itself")
        else:
            stack.append(_children(path, value))
            open_ids.append(id(value))


def _children(path: Path, container: Union[Mapping[Any, Any], Sequence[Any]]) -> Iterator[tuple[Path, Any]]:
    if isinstance(container, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"wanted a mapping or a sequence of tensors, found {type(container).__name__}")
    if isinstance(container, Mapping):
        for key, value in container.items():
            if not isinstance(key, str):
                raise TypeError(f"wanted str keys at {display(path)}, found {type(key).__name__} ({key!r:.100})")
            yield (*path, key), value
    else:
        for index, value in enumerate(container):
            yield (*path, index), value


def display(path: Path) -> str:
    """A path for messages, cut to 200 characters."""
    return "the top level" if not path else "/".join(map(str, path))[:200]


def branch(paths: Iterable[tuple[Path, Any]], prune_empty: bool = True) -> Any:
    """Rebuilds containers from (path, leaf) pairs: dicts for string keys, for integer keys lists ordered by index.

    Gaps in the integers close up. A single pair with an empty path is the leaf itself.
    """
    root: dict[Union[str, int], Any] = {}
    for path, leaf in paths:
        if not path:
            return leaf
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Layer())
        node[path[-1]] = leaf
    return _finish(root)


class _Layer(dict[Union[str, int], Any]):
    """A layer under construction, told apart from leaves that are mappings."""


def _finish(root: dict[Union[str, int], Any]) -> Any:
    # Children before parents, without recursion.
    order: list[tuple[dict[Union[str, int], Any], Union[str, int], _Layer]] = []
    pending: list[dict[Union[str, int], Any]] = [root]
    while pending:
        node = pending.pop()
        for key, value in node.items():
            if isinstance(value, _Layer):
                order.append((node, key, value))
                pending.append(value)
    for parent, key, layer in reversed(order):
        parent[key] = _container(layer)
    return _container(root)


def _container(layer: dict[Union[str, int], Any]) -> Any:
    if layer and all(isinstance(key, int) for key in layer):
        return [layer[key] for key in sorted(layer)]
    return dict(layer)


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


FilterFunction = Callable[[Union[str, Path]], Any]


def accepts(filter_func: Optional[FilterFunction], name: Union[str, Path]) -> bool:
    """Whether a filter (``None``: everything) wants the tensor of this name."""
    return filter_func is None or bool(filter_func(name))

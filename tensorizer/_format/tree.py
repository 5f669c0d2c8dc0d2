"""Flattens nested containers to (path, tensor) pairs, and rebuilds containers from names."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union, cast

import numpy as np
import torch

from tensorizer._format.names import Key, Name, Path, display

#: A level of the tree of names; a leaf is the number of its entry.
Node = dict[Key, Any]


def build_tree(names: Sequence[Name], selection: Sequence[int]) -> Node:
    chosen = [names[i] for i in selection]
    if set(map(type, chosen)) <= {str}:  # as in nearly all files
        return dict(zip(cast("list[str]", chosen), selection))
    root: Node = {}
    for name, i in zip(chosen, selection):
        if isinstance(name, str):
            root[name] = i
            continue
        node = root
        for key in name[:-1]:
            node = node.setdefault(key, {})
        node[name[-1]] = i
    return root


def leaves(node: Node) -> list[int]:
    """Entries below a branch, in file order."""
    found: list[int] = []
    pending = [node]
    while pending:
        for child in pending.pop().values():
            if isinstance(child, int):
                found.append(child)
            else:
                pending.append(child)
    return sorted(found)


def read_only(node: Node, tensors: Mapping[int, torch.nn.Parameter]) -> types.MappingProxyType[Key, Any]:
    """Nested read-only mappings of a branch, made from the children up, without recursion."""
    order: list[Node] = []
    pending = [node]
    while pending:
        current = pending.pop()
        order.append(current)
        pending.extend(child for child in current.values() if not isinstance(child, int))
    finished: dict[int, types.MappingProxyType[Key, Any]] = {}
    for current in reversed(order):
        finished[id(current)] = types.MappingProxyType(
            {key: tensors[child] if isinstance(child, int) else finished[id(child)] for key, child in current.items()}
        )
    return finished[id(node)]


def flatten(structure: Any, empty: Optional[list[Path]] = None) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of nested mappings and sequences with their paths, depth first in iteration order.

    Empty containers leave no pair; their paths are appended to `empty`.

    Raises:
        TypeError: A mapping key is not a ``str``, a leaf is not a tensor (texts and bytes are not), the structure
            contains itself, or the top level is neither a mapping nor a sequence.
    """
    if isinstance(structure, torch.Tensor) or not _is_container(structure):
        raise TypeError(
            f"expected a mapping or a sequence of tensors, got {type(structure).__name__}{_method_for(structure)}"
        )
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
        elif not _is_container(value):
            raise TypeError(f"expected a tensor at {display(path)}, got {type(value).__name__}; {_instead_of(value)}")
        elif id(value) in open_ids:
            raise TypeError(f"the structure at {display(path)} contains itself")
        else:
            if len(value) == 0 and empty is not None:
                empty.append(path)
            stack.append(_children(path, value))
            open_ids.append(id(value))


def _is_container(value: object) -> bool:
    return isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes, bytearray, memoryview))


_WHOLE_CHECKPOINT = "torch.save within torch_compat.tensorizer_saving() keeps whole checkpoints, values and all"


def _method_for(value: object) -> str:
    if isinstance(value, torch.nn.Module):
        return "; write_module writes modules"
    return "; write_tensor writes single tensors" if isinstance(value, torch.Tensor) else ""


def _instead_of(value: object) -> str:
    """The advice of the error for a leaf that is not a tensor."""
    if isinstance(value, (bool, int, float, complex)):
        return f"store it as torch.tensor({value!r}), or keep it elsewhere; {_WHOLE_CHECKPOINT}"
    if isinstance(value, np.ndarray):
        return "torch.from_numpy(array) makes a tensor of it"
    if isinstance(value, torch.nn.Module):
        return "its state_dict() is a mapping of tensors"
    return f"keep it elsewhere; {_WHOLE_CHECKPOINT}"


def _children(path: Path, container: Union[Mapping[Any, Any], Sequence[Any]]) -> Iterator[tuple[Path, Any]]:
    if isinstance(container, Mapping):
        for key, value in container.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"expected str keys at {display(path)}, got {type(key).__name__} ({key!r:.100}); "
                    f"{_WHOLE_CHECKPOINT}"
                )
            yield (*path, key), value
    else:
        for index, value in enumerate(container):
            yield (*path, index), value


def branch(paths: Iterable[tuple[Path, Any]]) -> Any:
    """Rebuilds containers from (path, leaf) pairs: dicts for string keys, for integer keys lists ordered by index.

    Gaps in the integers are closed. A single pair with an empty path gives the leaf itself.
    """
    root: Node = {}
    layers: list[tuple[Node, Key, Node]] = []  # each container with its path; outer ones come first
    for path, leaf in paths:
        if not path:
            return leaf
        node = root
        for key in path[:-1]:
            if key not in node:
                node[key] = {}
                layers.append((node, key, node[key]))
            node = node[key]
        node[path[-1]] = leaf
    for parent, key, layer in reversed(layers):
        parent[key] = _container(layer)
    return _container(root)


def _container(layer: Node) -> Any:
    if layer and all(isinstance(key, int) for key in layer):
        return [layer[key] for key in sorted(layer)]
    return layer

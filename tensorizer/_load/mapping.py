"""A container as a mapping from names to tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping
from typing import Any, Optional

from tensorizer._format.entries import FilterFuncType
from tensorizer._format.names import Key, path_of
from tensorizer._format.tree import Node, branch, leaves, read_only
from tensorizer._load.container import Container
from tensorizer._load.loaded_tensors import LoadedTensors

__all__ = ["TensorMapping"]


class TensorMapping(Mapping[Key, Any]):
    """The mapping half of ``TensorDeserializer``: top-level keys to tensors or nested read-only mappings."""

    _container: Container
    _loaded: LoadedTensors
    _root: Node

    def keys(self) -> KeysView[Key]:
        """The keys of the top level, in file order."""
        return self._root.keys()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._root)

    def __len__(self) -> int:
        return len(self._root)

    def __contains__(self, key: object) -> bool:
        return key in self._root

    def __getitem__(self, key: Key) -> Any:
        node = self._root[key]
        if isinstance(node, int):
            return self._loaded.load_one(node)
        below = leaves(node)
        return read_only(node, dict(zip(below, self._loaded.load(below))))

    def tree(
        self,
        prefix: Optional[Iterable[Key]] = None,
        *,
        default: Any = None,
        filter_func: Optional[FilterFuncType] = None,
    ) -> Any:
        """The subtree at `prefix` with real containers: ``dict``, ``list``, parameters as leaves.

        Args:
            prefix: Path to the subtree, as an iterable of keys; ``None`` or empty is everything.
            default: Returned when nothing matches.
            filter_func: Narrows within the subtree; gets full paths from the root.

        Raises:
            TypeError: `prefix` is a single ``str`` or ``int``; write ``("a",)``.
        """
        if isinstance(prefix, (str, int)):
            raise TypeError(f"prefix: wanted a sequence of keys, found {type(prefix).__name__}; write ({prefix!r},)")
        wanted = () if prefix is None else tuple(prefix)
        container = self._container
        chosen = [i for i in container.selection if path_of(container.names[i])[: len(wanted)] == wanted]
        if filter_func is not None:
            chosen = [i for i in chosen if filter_func(container.names[i])]
        if not chosen:
            return default
        tensors = self._loaded.load(chosen)
        return branch((path_of(container.names[i])[len(wanted) :], t) for i, t in zip(chosen, tensors))

"""Lets the ranks of a group work on one checkpoint together, and tells all of them if one fails."""

from __future__ import annotations

import builtins
import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Optional

import torch.distributed as dist

from tensorizer import errors

# For groups of other backends: a gloo group of the same ranks, made once.
_STATUS_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def caught() -> Iterator[list[BaseException]]:
    """Catches the error of a block, so that :meth:`Ranks.agree` can pass it to all ranks."""
    errors: list[BaseException] = []
    try:
        yield errors
    except BaseException as error:
        errors.append(error)


class Ranks:
    """The ranks of a process group; a single rank if there is no group.

    Methods marked "collective" must be called by all ranks in the same order. A rank that has failed calls them, too,
    with its error, so that the others do not wait for it.
    """

    def __init__(self, group: Optional[Any]) -> None:
        self.group: Optional[Any] = None
        self.rank, self.size = 0, 1
        if group is None and not dist.is_initialized():
            return
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("group: this process is not one of its ranks")
        self._status = _status_group(self.group) if self.size > 1 else None

    def agree(self, errors: Sequence[BaseException] = (), value: Any = None) -> list[Any]:
        """Collective: returns the values of all ranks, by rank. If a rank has an error, all ranks raise the first one.

        Raises:
            Exception: An error of the same class, whose text names the rank; the rank itself raises its own error.
        """
        error = errors[0] if errors else None
        if self.size == 1:
            if error is not None:
                raise error
            return [value]
        mine = (None, value) if error is None else ((type(error).__name__, str(error)), None)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._status)
        if error is not None:
            raise error
        for rank, (failure, _) in enumerate(found):
            if failure is not None:
                _raise_as(rank, *failure)
        return [value for _, value in found]

    @contextlib.contextmanager
    def together(self, value: Any = None) -> Iterator[None]:
        """Collective: if the block fails on one rank, all ranks raise after it, as in :meth:`agree`.

        Raises:
            ValueError: `value`, the arguments of the call, differs between ranks.
        """
        with caught() as errors:
            yield
        values = self.agree(errors, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(f"expected the same arguments on all ranks, got others on rank {rank} than on rank 0")


def _status_group(group: Any) -> Any:
    """A group of the same ranks on the CPU. If the group has another backend, this is a collective."""
    if "gloo" in str(dist.get_backend(group)):
        return group
    if group not in _STATUS_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        _STATUS_GROUPS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _STATUS_GROUPS[group]


def _raise_as(rank: int, kind: str, text: str) -> NoReturn:
    """Raises an error of another rank, with its class if this process can find the class."""
    found = getattr(errors, kind, None) or getattr(builtins, kind, None)
    message = f"rank {rank}: {text}"
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            error = found(message)
        except TypeError:  # its constructor needs more than a text
            error = RuntimeError(f"rank {rank}: {kind}: {text}")
        raise error
    raise RuntimeError(f"rank {rank}: {kind}: {text}")

"""Upper bounds for threads, as callers give them."""

from __future__ import annotations

from typing import Optional

from tensorizer._system.config import env_int

__all__ = ["ranks_of_node", "share_of_node", "thread_limit"]

_MORE_THAN_THERE_WILL_EVER_BE = 0xFFFF


def thread_limit(name: str, limit: Optional[int]) -> int:
    """The bound that the extension takes for the argument `name`: 0, as many as are useful, for ``None``.

    Raises:
        TypeError: Not an int.
        ValueError: Below 1.
    """
    if limit is None:
        return 0
    if not isinstance(limit, int):
        raise TypeError(f"{name}: wanted an int, found {type(limit).__name__}")
    if limit < 1:
        raise ValueError(f"{name}: wanted 1 or more, found {limit}")
    return min(int(limit), _MORE_THAN_THERE_WILL_EVER_BE)


def share_of_node(most: int, least: int) -> int:
    """This process's share of what the ranks of one machine have together: `most`, or fewer, but not below `least`."""
    ranks = ranks_of_node()
    return most if ranks == 1 else max(least, most // ranks)


def ranks_of_node() -> int:
    """How many ranks this machine has: ``LOCAL_WORLD_SIZE``, which torchrun and its like set; without it 1."""
    return env_int("LOCAL_WORLD_SIZE", 1) or 1

"""What a load of several ranks did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadReport", "RankReport"]


@dataclass(frozen=True)
class RankReport:
    """The part of one rank."""

    #: Bytes that came from storage, the index included.
    bytes_read: int
    #: Bytes of tensors that came from other ranks.
    bytes_received: int
    #: From the call to its last byte.
    seconds: float


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank, and on the others."""

    #: In the group of the load.
    rank: int
    #: ``"none"`` or ``"all_gather"``: what ``exchange="auto"`` chose.
    exchange: str
    #: By rank.
    ranks: tuple[RankReport, ...]
    #: Names that the target has and the file lacks; they are as they were.
    missing: tuple[str, ...] = ()
    #: Names that the file has and the target lacks.
    unexpected: tuple[str, ...] = ()

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank got from storage, the index included."""
        return self.ranks[self.rank].bytes_read

    @property
    def bytes_received(self) -> int:
        """Bytes of tensors that this rank got from others."""
        return self.ranks[self.rank].bytes_received

    @property
    def seconds(self) -> float:
        """Of this rank, from the call to its last byte."""
        return self.ranks[self.rank].seconds

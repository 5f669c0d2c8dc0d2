"""What a case is: one row of the table, measured on every contender that can do it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

from benchmarks import gpu, memory, models
from benchmarks.contender import Contender, State

READY_NBYTES = 1 << 30  # small models too find enough of what was freed last, wherever the system takes it from


@dataclass(frozen=True)
class Goal:
    """What the project wants of itself in a case.

    Attributes:
        versus: A contender's name for a ratio of speeds, or ``None`` for an absolute bound.
        at_least: Lowest ratio ``time(versus) / time(who)`` that meets the goal.
        at_most: Highest own value that meets the goal, in the case's unit.
        who: Name of the contender that is judged.
    """

    versus: Optional[str] = None
    at_least: float = 0.0
    at_most: float = 0.0
    who: str = "ours"


class Unavailable(RuntimeError):
    """A case lacks something on this machine; the message says what."""


@dataclass(frozen=True)
class Stage:
    """What a service finds.

    Attributes:
        cache: The folder of everything that is kept between runs, the models among it.
        folders: The case's model and the tiny one, in ``cache``.
        files: Of those who take part, in these folders.
    """

    cache: Path
    folders: tuple[Path, ...]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: For the command line and JSON.
        title: For the table.
        needs: What of :class:`~benchmarks.contender.Contender` the case calls; who lacks it does not take part.
        measure: Runs in the contender's process; returns seconds, or bytes where ``unit`` is ``"MB"``.
        model: Which data set, of ``models.SHAPES``.
        unit: ``"GB/s"`` (from seconds and payload), ``"ms"``, ``"MB"`` or ``"requests"``.
        limit: Name of the contender that is the limit: ``"machine"`` (the measurement calls its own ``limits.cpp``
            then) or another without files; empty where there is none.
        goals: What the project wants here.
        largest: Bytes of the model are at most so many, whatever was asked for; 0 for no bound.
        locate: What the contender's method is given for a file of its own: its path, or where a server has it.
        service: Starts what the case needs beside the contenders (a server), yields settings for the workers.
        variant: Which of their files of the model the contenders read: of ``prepare``, or of ``prepare_<variant>``.
        family: Name of several cases that are one chart of lines; empty for a panel of its own.
        at: Where on the axis of that chart the case is.
    """

    name: str
    title: str
    needs: str
    measure: Callable[[Bench], float]
    model: str = "llm"
    unit: str = "GB/s"
    limit: str = ""
    goals: tuple[Goal, ...] = ()
    largest: int = 0
    locate: Callable[[Bench, Path], Any] = lambda bench, path: path
    service: Callable[[Stage], AbstractContextManager[dict[str, str]]] = lambda stage: nullcontext({})
    variant: str = ""
    family: str = ""
    at: int = 0

    def takes(self, contender: Contender) -> bool:
        """Whether the contender takes part."""
        return contender.name == self.limit if contender.role == "limit" else contender.can(self.needs)


@dataclass
class Bench:
    """Everything a measurement may use, inside the contender's process."""

    contender: Contender
    case: Case
    folder: Path
    tiny: Path
    scratch: Path
    threads: int
    settings: dict[str, str]
    manifest: models.Manifest = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.manifest = models.read_manifest(self.folder)

    @property
    def path(self) -> Path:
        """The contender's own file of the case's model."""
        return self.folder / self.contender.file_name(self.case.variant)

    @property
    def place(self) -> Any:
        """Where that file is, as the contender's method wants it."""
        return self.case.locate(self, self.path)

    @property
    def target(self) -> Path:
        """Where a save case writes."""
        return self.scratch / f"bench-save-{self.contender.name}{self.contender.suffix}"

    def wake_up(self) -> None:
        """Import, and do the case's own call once on a tiny file, so that nothing is measured the first time."""
        self.contender.import_library()
        if not self.contender.can(self.case.needs):
            return
        path = self.tiny / self.contender.file_name(self.case.variant)
        if self.case.needs.startswith("stream") and path.exists():
            for _ in getattr(self.contender, self.case.needs)(self.case.locate(self, path)):
                pass
        elif self.case.needs.startswith(("load", "open")) and path.exists():
            arguments = (models.read_manifest(self.tiny).one,) if self.case.needs == "load_one" else ()
            getattr(self.contender, self.case.needs)(self.case.locate(self, path), *arguments)
        elif self.case.needs.startswith("save"):
            target = self.target.with_name(self.target.name + "-tiny")
            state = models.read_base(self.tiny)
            getattr(self.contender, self.case.needs)(gpu.put(state) if "gpu" in self.case.needs else state, target)
            target.unlink()

    @contextmanager
    def clock(self, page_cache_nbytes: int = 0) -> Iterator[None]:
        """Measure the block, with memory ready for it: for the tensors, and for pages of files that it fills."""
        gc.collect()
        tensors_nbytes = self.manifest.nbytes + self.manifest.nbytes // 10 + (64 << 20)
        memory.fault_in_and_free(max(READY_NBYTES, tensors_nbytes + page_cache_nbytes))
        begin = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - begin

    def check(self, state: State) -> None:
        """Make sure that the bytes are those that were written.

        Raises:
            RuntimeError: They are not; no figure is reported then.
        """
        if not self.contender.makes_tensors:
            return
        found = models.checksum(state)
        if found != self.manifest.checksum:
            raise RuntimeError(
                f"{self.contender.label}: wrong bytes: checksum {found}, expected {self.manifest.checksum}"
            )

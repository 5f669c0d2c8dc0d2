"""Progress of a load or a save: silent by default, a bar or a callable on request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional, Union

__all__ = ["Progress", "ProgressArgument"]


class Progress(NamedTuple):
    """What a progress callable is told, about ten times a second and once at the end."""

    bytes_done: int
    bytes_total: int
    bytes_per_second: float  # average since the start


#: ``False``: silent. ``True``: a ``tqdm.auto`` bar. A callable: gets a :class:`Progress`; what it raises ends the work.
ProgressArgument = Union[bool, Callable[[Progress], object], None]


@contextlib.contextmanager
def progress_reporter(
    progress: ProgressArgument, total: int, description: str
) -> Iterator[Optional[Callable[[int], None]]]:
    """Returns the function to call with the bytes done so far, or ``None`` if nobody listens.

    Args:
        progress: What the caller asked for.
        total: Bytes that the work will move.
        description: Label of the bar.

    Raises:
        TypeError: `progress` is neither a bool nor callable.
        ImportError: A bar was asked for and ``tqdm`` is not installed.
    """
    if progress is None or progress is False:
        yield None
        return
    if progress is True:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress=True needs the package tqdm (pip install tqdm); a function does not") from error

        with tqdm(total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1024) as bar:

            def advance(done: int) -> None:
                bar.update(done - bar.n)

            yield advance
        return
    if not callable(progress):
        raise TypeError(f"progress: expected a bool or a callable, got {type(progress).__name__}")
    listener = progress
    begin = time.monotonic()

    def report(done: int) -> None:
        elapsed = time.monotonic() - begin
        listener(Progress(done, total, done / elapsed if elapsed > 0 else 0.0))

    yield report

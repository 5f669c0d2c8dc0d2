"""Progress of a load or a save: silent by default, a bar or a callable on request."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional, Union

from tensorizer._system.config import env_text


class Progress(NamedTuple):
    """What a progress callable is told, about ten times a second and once at the end.

    Examples:
        >>> told = []
        >>> tensors = tensorizer.load_file("model.tensors", progress=told.append)
        >>> told[-1].bytes_done == told[-1].bytes_total
        True
    """

    bytes_done: int
    bytes_total: int
    bytes_per_second: float  # average since the start


Progress.__module__ = "tensorizer.progress"  # where users import it from


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


def bars(delay: float) -> Callable[[Progress], None]:
    """Shows a bar on standard error for each piece of work that takes longer than `delay` seconds.

    Raises:
        ImportError: ``tqdm`` is not installed.
    """
    from tqdm import tqdm

    bar: Any = None

    def show(progress: Progress) -> None:
        nonlocal bar
        done, total = progress.bytes_done, progress.bytes_total
        if bar is None:
            bar = tqdm(total=total, unit="B", unit_scale=True, delay=delay, file=sys.stderr)
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
            bar = None

    return show


def terminal_bar() -> ProgressArgument:
    """Shows users of a terminal who did not ask for progress a bar after one second; nothing without ``tqdm``."""
    if env_text("TERM") == "dumb":
        return False
    try:
        return bars(delay=1.0)
    except ImportError:
        return False

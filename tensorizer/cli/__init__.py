"""The command line, ``tensorizer`` or ``python -m tensorizer``: it parses and prints, and no more.

Nothing here imports torch before a command needs it, so that ``--help`` answers at once.

KeyboardInterrupt in the import of a compiled module, as torch's and numpy's, can abort the process or get lost. As
nothing is written during imports, Ctrl-C may end the process there, which a shell shows as 130.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_is_program = False  # whether this process is the command line, and its parent did not choose what interrupts do


def begin_program() -> None:
    """Says that this process is the command line; without it the other functions do nothing."""
    global _is_program
    if threading.current_thread() is threading.main_thread():
        _is_program |= signal.getsignal(signal.SIGINT) is signal.default_int_handler
        end_process()


def end_process() -> None:
    """From now on an interrupt ends the process."""
    if _is_program:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_error() -> None:
    """From now on an interrupt raises KeyboardInterrupt."""
    if _is_program:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """For a block that imports torch: an interrupt ends the process."""
    end_process()
    try:
        yield
    finally:
        raise_error()

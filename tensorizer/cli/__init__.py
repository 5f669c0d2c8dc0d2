"""The command line, ``tensorizer`` or ``python -m tensorizer``. It only parses arguments and prints.

No module here imports torch before a command needs it, so that ``--help`` answers at once.

A KeyboardInterrupt during the import of a compiled module, such as torch or numpy, can abort the process or get lost.
Since imports write no files, Ctrl-C ends the process at once during an import; a shell shows status 130.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_is_program = False  # whether this process is the command line and its parent did not choose a handler of interrupts


def begin_program() -> None:
    """Declares that this process is the command line. Without this call, the other functions do nothing."""
    global _is_program
    if threading.current_thread() is threading.main_thread():
        _is_program |= signal.getsignal(signal.SIGINT) is signal.default_int_handler
        end_process()


def end_process() -> None:
    """Makes later interrupts end the process."""
    if _is_program:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_error() -> None:
    """Makes later interrupts raise KeyboardInterrupt."""
    if _is_program:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """A block that imports torch: an interrupt in it ends the process."""
    end_process()
    try:
        yield
    finally:
        raise_error()

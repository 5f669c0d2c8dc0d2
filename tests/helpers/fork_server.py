"""Fresh processes that need not import torch: one process imports everything and forks a child for each program.

A program runs in a child of its own, which starts with one thread, runs to its end or is killed, and goes through the
interpreter's ordinary shutdown. Tests use only ``ForkServer``; the process that it starts runs the rest of this file.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple, Optional, TextIO

_MESSAGE_NBYTES = 1 << 17


class Result(NamedTuple):
    """The result of one program."""

    returncode: int
    stdout: str
    stderr: str


class Process:
    """A running program, with the part of the interface of ``subprocess.Popen`` that tests use."""

    def __init__(self, server: ForkServer, pid: int, stdout: TextIO, stderr: BinaryIO) -> None:
        self.pid, self.returncode = pid, None
        self.stdout, self._stderr = stdout, stderr
        self._server = server

    def poll(self) -> Optional[int]:
        return self.returncode if self.returncode is not None else self._wait(0)

    def wait(self, timeout: float) -> int:
        """Returns the exit code; raises TimeoutError, after killing the program, if it hangs."""
        if self.returncode is None and self._wait(timeout) is None:
            self.kill()
            self._wait(60)
            raise TimeoutError(f"still running after {timeout} s: {self._text_of_stderr()}")
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Reads all output, and waits for the end; raises TimeoutError, after killing the program, if it hangs."""
        killer = threading.Timer(timeout, self.kill)
        killer.start()
        try:
            text = self.stdout.read()
        finally:
            killer.cancel()
        self.wait(timeout)
        texts = text, self._text_of_stderr()
        self.close()
        return texts

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.stdout.close()
        self._stderr.close()

    def _wait(self, timeout: float) -> Optional[int]:
        self.returncode = self._server._ask({"wait": self.pid, "timeout": timeout})
        return self.returncode

    def _text_of_stderr(self) -> str:
        return _content(self._stderr)


def _content(file: BinaryIO) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", "replace")


class ForkServer:
    """Runs programs that find ``torch`` and ``tensorizer`` imported already."""

    def __init__(self) -> None:
        # Programs import from this folder and the one above; the processes that they start do, too.
        helpers = os.path.dirname(os.path.abspath(__file__))
        paths = [os.path.dirname(helpers), helpers, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._path = os.pathsep.join(paths)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": self._path},
            )
        self._lock = threading.Lock()  # a timer may kill a program

    def run(self, program: str, *arguments: object, stdin: object = "/dev/null", timeout: float = 120) -> Result:
        """Runs ``program`` with ``sys.argv[1:] == arguments``; raises TimeoutError, after killing it, if it hangs."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = Process(self, self._start(program, arguments, stdin, out, err), sys.stdout, err)
            try:
                returncode = process.wait(timeout)
            except TimeoutError as error:
                raise TimeoutError(f"{error}, {_content(out)}") from None
            return Result(returncode, _content(out), _content(err))

    def start(self, program: str, *arguments: object) -> Process:
        """Starts ``program``; its output can be read while it runs."""
        reading, writing = os.pipe()
        stdout = os.fdopen(reading, errors="replace")
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the process closes it
        with open(writing, "wb") as out:
            return Process(self, self._start(program, arguments, "/dev/null", out, stderr), stdout, stderr)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(20)

    def _start(self, program: str, arguments: Sequence, stdin: object, out: BinaryIO, err: BinaryIO) -> int:
        request = {
            "program": textwrap.dedent(program),
            "arguments": [str(argument) for argument in arguments],
            "environment": {**os.environ, "PYTHONPATH": self._path},
        }
        with open(stdin, "rb") as given:
            return self._ask(request, [stream.fileno() for stream in (given, out, err)])

    def _ask(self, request: dict, streams: Sequence[int] = ()) -> Optional[int]:
        message = json.dumps(request).encode()
        assert len(message) < _MESSAGE_NBYTES
        with self._lock:
            socket.send_fds(self._socket, [message], streams)
            answer = self._socket.recv(_MESSAGE_NBYTES)
        if not answer:
            raise RuntimeError("the process that starts the others ended")
        return json.loads(answer)


# --- in the process that forks ----------------------------------------------------------------------------------------


def _wait(child: int, timeout: float) -> Optional[int]:
    """The exit code of a child; ``None`` if it runs longer."""
    deadline = time.monotonic() + timeout
    delay = 0.001
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(delay)
        delay = min(0.02, delay * 1.5)


def _become(request: dict, streams: list[int]) -> str:
    """In the child: takes the streams, arguments and environment of the request, and returns the program."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.argv = ["-c", *request["arguments"]]
    os.environ.clear()
    os.environ.update(request["environment"])
    return str(request["program"])


def _serve(requests: socket.socket) -> Optional[str]:
    """Forks a child for each program. Returns the program in a child, and ``None`` at the end in the parent."""
    import torch

    import tensorizer  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # so that the collections of a child do not visit, and copy, what is imported: that halves its time
    while True:
        message, streams, _, _ = socket.recv_fds(requests, _MESSAGE_NBYTES, 3)
        if not message:
            return None
        request = json.loads(message)
        if "wait" in request:
            answer = _wait(request["wait"], request["timeout"])
        else:
            answer = os.fork()
            if answer == 0:
                requests.close()
                return _become(request, list(streams))
            for descriptor in streams:
                os.close(descriptor)
        requests.send(json.dumps(answer).encode())


if __name__ == "__main__":
    _program = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _program is not None:
        try:
            exec(compile(_program, "<program>", "exec"), {"__name__": "__main__"})
        except SystemExit:
            raise
        except BaseException:
            # As the interpreter leaves them, for hooks that programs set.
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            sys.excepthook(*sys.exc_info())
            sys.exit(1)

"""Fresh processes without the price of importing torch each time: one process imports everything and forks per program.

A program runs in a child of its own, which starts with one thread, runs to its end or is killed, and goes through the
interpreter's ordinary shutdown. Only this file's ``ForkServer`` is meant for tests; the rest is what it starts.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import NamedTuple


class Result(NamedTuple):
    """What became of one program."""

    returncode: int
    stdout: str
    stderr: str


class ForkServer:
    """Runs programs that find ``torch`` and ``tensorizer`` imported already."""

    def __init__(self) -> None:
        # What programs import lies here and beside; the processes that they start look for it, too.
        helpers = os.path.dirname(os.path.abspath(__file__))
        paths = [os.path.dirname(helpers), helpers, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def run(self, program: str, *arguments: object, stdin: object = "/dev/null", timeout: float = 120) -> Result:
        """Runs ``program`` with ``sys.argv[1:] == arguments``; raises TimeoutError, after killing it, if it hangs."""
        with tempfile.TemporaryDirectory() as folder:
            request = {
                "program": textwrap.dedent(program),
                "arguments": [str(argument) for argument in arguments],
                "stdin": str(stdin),
                "folder": folder,
                "timeout": timeout,
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError("the process that starts the others ended")
            returncode = json.loads(answer)
            texts = []
            for name in ("stdout", "stderr"):
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as stream:
                    texts.append(stream.read())
        if returncode is None:
            raise TimeoutError(f"still running after {timeout} s: {texts}")
        return Result(returncode, *texts)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def _wait(child: int, timeout: float):
    deadline = time.monotonic() + timeout
    delay = 0.001
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(delay)
        delay = min(0.02, delay * 1.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _become(request) -> str:
    """In the child: takes over the streams and the arguments of the request; gives the program."""
    for number, (name, flags) in enumerate(
        [
            (request["stdin"], os.O_RDONLY),
            (os.path.join(request["folder"], "stdout"), os.O_WRONLY | os.O_CREAT),
            (os.path.join(request["folder"], "stderr"), os.O_WRONLY | os.O_CREAT),
        ]
    ):
        descriptor = os.open(name, flags, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.argv = ["-c", *request["arguments"]]
    return str(request["program"])


def _serve():
    """Forks a child per request; returns the program in a child, None at the end in the parent."""
    import torch

    import tensorizer  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # a child neither visits nor copies what is imported when it collects garbage at its end: half its time
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return _become(request)
        print(json.dumps(_wait(child, request["timeout"])), flush=True)
    return None


if __name__ == "__main__":
    _program = _serve()
    if _program is not None:
        try:
            exec(compile(_program, "<program>", "exec"), {"__name__": "__main__"})
        except SystemExit:
            raise
        except BaseException:
            # As the interpreter leaves them behind, and hooks that programs set find them.
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            sys.excepthook(*sys.exc_info())
            sys.exit(1)

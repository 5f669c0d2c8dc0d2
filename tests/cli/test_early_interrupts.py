"""Ctrl-C while a command still imports its modules, and later."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import run

from tensorizer import TensorSerializer
from tensorizer.torch import save_file

# Both begin as the program does. The line tells when Python has started: before, it is Python that is interrupted.
PROGRAMS = {
    "module": """
import runpy, sys
print("started", flush=True)
runpy.run_module("tensorizer", run_name="__main__", alter_sys=True)
""",
    "script": """
import sys
from tensorizer.cli.main import main
print("started", flush=True)
sys.exit(main())
""",
}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.tensors"
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict({"a": torch.ones(100)})
    return path


def catches_interrupts(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught & 1 << (signal.SIGINT - 1))


def interrupted(program, arguments, seconds):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        until = time.monotonic() + 10
        while catches_interrupts(process) and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors


MANY_MOMENTS = (0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5)


@pytest.mark.parametrize("moments", [(0, 0.2, 0.5, 0.9), pytest.param(MANY_MOMENTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_an_interrupt_at_any_moment_ends_a_command_silently_and_leaves_no_part_of_a_file(
    model, tmp_path, program, moments
):
    target = tmp_path / "out" / "new.tensors"
    target.parent.mkdir()
    for seconds in moments:
        status, errors = interrupted(program, ["convert", model, target], seconds)
        assert status in (-signal.SIGINT, 130, 0), (seconds, status, errors)
        assert errors == b"", seconds
        assert seconds or status == -signal.SIGINT
        if status == 0 or target.exists():  # it was faster
            assert run("diff", model, target).returncode == 0
            target.unlink()
        assert list(target.parent.iterdir()) == [], seconds


def test_commands_leave_an_interrupt_that_is_ignored_ignored(model, tmp_path):
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + PROGRAMS["module"]
    assert interrupted(ignoring, ["convert", model, tmp_path / "new.tensors"], 0.3) == (0, b"")
    assert run("diff", model, tmp_path / "new.tensors").returncode == 0


def test_a_command_that_another_program_runs_leaves_the_handler_of_interrupts_alone(model):
    def handler(*_):
        raise AssertionError

    for before in (signal.default_int_handler, handler):
        saved = signal.signal(signal.SIGINT, before)
        try:
            assert run("inspect", model).returncode == 0
            assert signal.getsignal(signal.SIGINT) is before
        finally:
            signal.signal(signal.SIGINT, saved)


def test_inspect_new_signing_keys_and_lists_of_the_cache_need_no_torch(model, tmp_path):
    program = """
import sys
from tensorizer.cli.main import main
for line in sys.argv[1:]:
    assert main(line.split()) == 0, line
    assert not {"torch", "numpy"} & set(sys.modules), line
"""
    lines = [
        f"inspect {model}",
        f"inspect --json {tmp_path}/shards",
        f"sign --generate-key {tmp_path}/signing",
        f"cache ls --cache {tmp_path}/c",
    ]
    save_file({str(i): torch.ones(50) for i in range(9)}, tmp_path / "shards" / "m.tensors", max_shard_size=500)
    command = [sys.executable, "-c", program, *lines]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr

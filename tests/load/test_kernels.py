"""The device's kernels: the committed text is that of the sources.

The cipher is compared with libsodium by the native tests (``tests/native/test_kernels.cpp``).
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from paths import ROOT

KERNELS = ROOT / "csrc" / "device" / "cuda" / "kernels"

pytestmark = pytest.mark.skipif(not KERNELS.is_dir(), reason="the sources are not here")


def run_script(action: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "kernels.py"), action]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_committed_text_is_that_of_the_sources() -> None:
    assert "kernels.ptx" in run_script("check")


def test_the_text_asks_for_drivers_and_devices_as_old_as_promised() -> None:
    lines = (KERNELS / "kernels.ptx").read_text().splitlines()
    assert lines[0].startswith("// sources ")
    assert ".version 6.4" in lines
    assert ".target sm_70" in lines
    assert [line.split("(")[0] for line in lines if ".entry" in line] == [
        f".visible .entry {name}" for name in ("tz_mac", "tz_open")
    ]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas")
def test_every_architecture_takes_the_kernels_without_spills() -> None:
    assert run_script("report").count("/ 0 / 0") >= 2

"""``benchmarks.device_costs`` over the fake driver."""

import json
import subprocess
import sys
from pathlib import Path

from accelerators import build_fake_driver

ROOT = Path(__file__).resolve().parent.parent.parent


def test_device_costs_of_every_kind_are_measured_and_the_driver_finds_nothing_wrong(tmp_path):
    command = [sys.executable, "-m", "benchmarks.device_costs", "--library", str(build_fake_driver())]
    command += ["--rounds", "2", "--scale", "0.01", "--json", str(tmp_path / "costs.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "costs.json").read_text())
    assert found["machine"]["device"].startswith("Fake")
    rows = found["rounds"]
    kinds = ("copy up", "copy down", "copy both", "small copy, one by one", "small copy, in one call", "fault in")
    for kind in (*kinds, "register", "allocate", "make and destroy", "record", "query", "load the kernels"):
        assert any(row.startswith(kind) for row in rows), kind
    for row, values in rows.items():
        assert len(values) == 2, row
        assert min(values) > 0, row
        assert row in done.stdout

#!/usr/bin/env python3
"""The tests in a folder of their own, without the package: what they import is then the wheel that is installed.

    suite.py FOLDER [-- PYTEST ARGUMENTS]

Runs them with this Python, which has the wheel; ``FOLDER`` must not exist.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from build_wheels import ROOT, source_names

# Its tests look at the sources, the build or the documents, not at what is installed.
OF_THE_CHECKOUT = "tests/repository"
WHERE = "import tensorizer._C as module; print(module.__file__)"


def copy_tests(folder: Path) -> Path:
    """What tests need of the sources, in ``folder``: everything but the package."""
    for name in source_names():
        if not name.startswith(("tensorizer/", "setup.py")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
            shutil.copymode(ROOT / name, target)
    return folder


def run_suite(python: Path, folder: Path, arguments: list[str]) -> bool:
    """Runs the tests with the wheel that ``python`` has installed.

    Args:
        python: Of a virtual environment that has the wheel, torch and what the tests need.
        folder: Where the copy of the tests goes; must not exist yet.
        arguments: For pytest, after those that leave out slow tests and tests of the checkout.

    Raises:
        SystemExit: ``python`` would take the module from elsewhere than its own environment.
    """
    tests = copy_tests(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TENSORIZER_"))}
    asked = subprocess.run([str(python), "-c", WHERE], cwd=tests, env=environment, capture_output=True, text=True)
    module = Path(asked.stdout.strip())
    if asked.returncode != 0 or python.parents[1] not in module.parents:
        raise SystemExit(f"{python} takes the module from {module}: wanted its own environment\n{asked.stderr}")
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-n", str(os.cpu_count() or 1), "--dist", "loadgroup"]
    options += [f"--ignore={OF_THE_CHECKOUT}"]
    command = [str(python), "-m", "pytest", *options, *arguments]
    return subprocess.run(command, cwd=tests, env=environment, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="-- PYTEST ARGUMENTS")
    options = parser.parse_args()
    return 0 if run_suite(Path(sys.executable), options.folder.absolute(), options.arguments) else 1


if __name__ == "__main__":
    sys.exit(main())

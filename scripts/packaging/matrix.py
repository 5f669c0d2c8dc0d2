#!/usr/bin/env python3
"""Builds and tests with every supported Python that is here, each with the oldest and the newest torch that runs on it.

    matrix.py [--list] [--python PATH ...] [--torch oldest|newest|VERSION ...] [--wheels DIR] [-- PYTEST ARGUMENTS]

Each combination has a virtual environment of its own below ``.cache/matrix``. With ``--wheels`` the wheel of that
folder is installed, else the module is built from source. Ends with one line per combination; what cannot be had is
said, and is a failure only for a Python that was named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from suite import run_suite

ROOT = Path(__file__).resolve().parents[2]
# An index of CPU builds of torch, where the ordinary one would bring along gigabytes of CUDA libraries.
TORCH_INDEX = os.environ.get("TORCH_INDEX")
# From each supported Python to the first release of torch, 2.1 or later, that has wheels for it.
OLDEST_TORCH = {"3.9": "2.1.0", "3.10": "2.1.0", "3.11": "2.1.0", "3.12": "2.2.0", "3.13": "2.5.0", "3.14": "2.9.0"}


def version_of(python: str) -> str | None:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def pythons_here() -> dict[str, str]:
    """From each supported version to an interpreter on the path or of pyenv."""
    found = {}
    for version in OLDEST_TORCH:
        candidates = [shutil.which(f"python{version}")]
        candidates += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
        # A name on the path may be a shim that only says that its version is not chosen.
        for python in filter(None, candidates):
            if version_of(python) == version:
                found[version] = python
                break
    return found


def run(*command: str, cwd: Path = ROOT) -> bool:
    print("$", " ".join(command), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, check=False).returncode == 0


def install(python: Path, torch: str, wheels: Path | None) -> str:
    """Fills an environment; empty, or what could not be had."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # torch up to 2.2 was built for numpy 1
    numpy = "numpy<2" if torch in ("2.1.0", "2.2.0") else "numpy"
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    if not run(*pip, wanted, numpy, *(["--extra-index-url", TORCH_INDEX] if TORCH_INDEX else [])):
        return f"no {wanted}"
    if not run(*pip, "setuptools>=64", "wheel", "ninja", "--requirement", "requirements-dev.txt"):
        return "no test requirements"
    what = ["--no-index", "--find-links", str(wheels), "--pre", "tensorizer"] if wheels else ["--editable", "."]
    return "" if run(*pip, "--no-deps", "--no-build-isolation", *what) else "no tensorizer"


def try_one(version: str, interpreter: str, torch: str, wheels: Path | None, arguments: list[str]) -> str:
    wanted = OLDEST_TORCH[version] if torch == "oldest" else torch
    folder = ROOT / ".cache" / "matrix" / f"{version}-{wanted}"
    if not run(interpreter, "-m", "venv", "--clear", str(folder)):
        return "no virtual environment"
    python = folder / "bin" / "python"
    missing = install(python, wanted, wheels)
    if missing:
        return missing
    if wheels:
        shutil.rmtree(folder / "suite", ignore_errors=True)
        return "passed" if run_suite(python, folder / "suite", arguments) else "FAILED"
    tests = ["-q", "-m", "not slow", "-n", str(os.cpu_count() or 1), "--dist", "loadgroup", *arguments]
    return "passed" if run(str(python), "-m", "pytest", *tests) else "FAILED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--python", nargs="+", default=[], help="interpreters; default: all that are here")
    parser.add_argument("--torch", nargs="+", default=["oldest", "newest"])
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to test in place of the sources")
    parser.add_argument("arguments", nargs="*", metavar="-- PYTEST ARGUMENTS")
    options = parser.parse_args()
    named = {version_of(python) or python: python for python in options.python}
    pythons = named or pythons_here()
    unknown = [version for version in pythons if version not in OLDEST_TORCH]
    if unknown:
        sys.exit(f"matrix.py: not supported: Python {', '.join(unknown)}: wanted one of {', '.join(OLDEST_TORCH)}")
    results = {}
    for version, python in pythons.items():
        for torch in options.torch:
            name = f"Python {version} ({python}), torch {OLDEST_TORCH[version] if torch == 'oldest' else torch}"
            if options.list:
                print(name)
            else:
                wheels = options.wheels.resolve() if options.wheels else None
                results[name] = try_one(version, python, torch, wheels, options.arguments)
    absent = [version for version in OLDEST_TORCH if version not in pythons and not named]
    for name, result in [*results.items(), *((f"Python {version}", "not here") for version in absent)]:
        print(f"{name}: {result}")
    wrong = {"FAILED", "no tensorizer"} | (set(results.values()) - {"passed"} if named else set())
    return int(any(result in wrong for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())

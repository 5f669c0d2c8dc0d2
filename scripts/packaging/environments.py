#!/usr/bin/env python3
"""The Pythons of this machine, and virtual environments of theirs with a torch that needs no gigabytes of CUDA.

    environments.py VERSION INTERPRETER FOLDER [REQUIREMENT ...]

Makes an environment that can build wheels and has the requirements too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_without_cuda import stand_in_for_cuda

ROOT = Path(__file__).resolve().parents[2]
# An index of CPU builds of torch, where the ordinary one has builds for CUDA alone.
TORCH_INDEX = os.environ.get("TORCH_INDEX")
# From each supported Python to the first release of torch, 2.1 or later, that has wheels for it.
OLDEST_TORCH = {"3.9": "2.1.0", "3.10": "2.1.0", "3.11": "2.1.0", "3.12": "2.2.0", "3.13": "2.5.0", "3.14": "2.9.0"}
# Two releases between the oldest and the newest one.
BETWEEN_TORCH = {
    "3.9": ("2.4.1", "2.6.0"),
    "3.10": ("2.4.1", "2.8.0"),
    "3.11": ("2.4.1", "2.8.0"),
    "3.12": ("2.4.1", "2.8.0"),
    "3.13": ("2.6.0", "2.9.1"),
    "3.14": ("2.10.0", "2.12.1"),
}
# The last release for a Python that later ones left behind.
LAST_TORCH = {"3.9": "2.8.0"}
# What torch imports; it names CUDA's libraries beside them.
NEEDS_OF_TORCH = ["filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec"]
BUILD_PACKAGES = ("torch", "setuptools", "wheel", "ninja")


def newest_torch(version: str) -> str:
    """The newest torch for a Python: the one that this repository is developed with, where that one runs."""
    pinned = (ROOT / "constraints.txt").read_text().strip().partition("==")[2]
    return LAST_TORCH.get(version, pinned)


def latest_torch(version: str) -> str:
    """The latest release that the package index has for a Python; the newest one that is known, where none answers."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    asked = subprocess.run([*command, "--python-version", version], capture_output=True, text=True, check=False)
    found = re.match(r"torch \((\d[\w.]*)", asked.stdout)
    return found[1] if found else newest_torch(version)


def version_of(python: str) -> str | None:
    """Such as "3.11"; None where it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
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


def lacks(python: str) -> list[str]:
    """What ``python`` would need to build a wheel and has not."""
    code = f"import importlib.util as u; print(*[n for n in {BUILD_PACKAGES} if u.find_spec(n) is None])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def pip(python: Path, *arguments: str) -> str:
    """Runs ``pip install``; empty, or the last line of what it said."""
    # Compiling every module of torch takes longer than compiling those that are imported.
    options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    command = [str(python), "-m", "pip", "install", *options, *arguments]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if done.returncode == 0 else (done.stdout.strip().splitlines() or ["pip failed"])[-1]


def numpy_for(torch: str) -> str:
    """The requirement of a release of torch: those up to 2.2 were built for numpy 1."""
    return "numpy<2" if torch.startswith(("2.1.", "2.2.")) else "numpy"


def install_torch(python: Path, version: str) -> str:
    """Installs torch ``version``, a CPU build where one can be had; empty, or why there is none."""
    numpy = numpy_for(version)
    if TORCH_INDEX:
        return pip(python, f"torch=={version}", numpy, "--extra-index-url", TORCH_INDEX)
    if not pip(python, f"torch=={version}+cpu", numpy):
        return ""
    failed = pip(python, "--no-deps", f"torch=={version}") or pip(python, numpy, *NEEDS_OF_TORCH)
    if failed:
        return failed
    (site_packages,) = python.parents[1].glob("lib/python*/site-packages")
    stand_in_for_cuda(site_packages)
    done = subprocess.run([str(python), "-c", "import torch"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"torch {version}: {done.stderr.strip().splitlines()[-1]}"


def make_environment(interpreter: str, folder: Path) -> str:
    """An empty virtual environment; empty, or why there is none."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [interpreter, "-m", "venv", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return "" if done.returncode == 0 else f"no virtual environment: {done.stdout.strip()}"


def build_environment(version: str, interpreter: str, folder: Path) -> str:
    """Makes an environment that can build wheels, unless it is there already; empty, or why there is none."""
    stamp, wanted = folder / "stamp", f"{interpreter} torch {newest_torch(version)}\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    print(f"== environment of Python {version} with torch {newest_torch(version)}", flush=True)
    python = folder / "bin" / "python"
    failed = make_environment(interpreter, folder)
    failed = failed or install_torch(python, newest_torch(version))
    failed = failed or pip(python, "setuptools>=64", "wheel", "ninja")
    if not failed:
        stamp.write_text(wanted)
    return failed


def user_environment(version: str, interpreter: str, folder: Path, requirements: Sequence[str]) -> str:
    """The same with packages that a wheel asks for; empty, or why there is none."""
    failed = build_environment(version, interpreter, folder)
    stamp, wanted = folder / "stamp-user", "\n".join(requirements)
    if failed or (stamp.exists() and stamp.read_text() == wanted):
        return failed
    failed = pip(folder / "bin" / "python", *requirements)
    if not failed:
        stamp.write_text(wanted)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("interpreter")
    parser.add_argument("folder", type=Path)
    parser.add_argument("requirements", nargs="*", metavar="REQUIREMENT")
    options = parser.parse_args()
    sys.exit(user_environment(options.version, options.interpreter, options.folder, options.requirements) or None)


if __name__ == "__main__":
    main()

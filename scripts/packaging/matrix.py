#!/usr/bin/env python3
"""Builds and tests with every supported Python that is here, each with the oldest and the newest torch that runs on it.

    matrix.py [--list] [--python PATH ...] [--root SUITE ...] [--wheels DIR]
              [--torch oldest|between|newest|latest|VERSION ...] [-- PYTEST ARGUMENTS]

A Python that is not here and that a release of Debian has runs in that release (roots.py), with its compiler and its
libraries; ``--root`` names releases, for Pythons that are here too. Each combination has a virtual environment of its
own below ``.cache``, kept for the next time. ``between`` are two releases of torch between the oldest and the newest,
which is the one of the developers; ``latest`` is what the package index has. With ``--wheels`` the wheel of that folder
is installed, else the module is built from source. Without ``TORCH_INDEX``, an index of CPU builds, torch is that of
the package index without CUDA's libraries, and tests of frameworks that depend on torch are skipped; with releases
before 2.6 those of transformers too, which wants a later one. Ends with one line per combination; what cannot be had is
said, and is a failure only for a Python that was named.
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

from environments import (
    BETWEEN_TORCH,
    OLDEST_TORCH,
    TORCH_INDEX,
    install_torch,
    latest_torch,
    make_environment,
    newest_torch,
    numpy_for,
    pip,
    pythons_here,
    version_of,
)
from roots import PYTHON, SUITES, can_make_roots, kept_folder, packages_of, run_with_repository
from suite import run_suite

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path = ROOT) -> bool:
    print("$", " ".join(command), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, check=False).returncode == 0


# These depend on torch, so that pip would bring along the CUDA libraries that were left away.
DEPEND_ON_TORCH = ("accelerate", "peft", "sentence-transformers", "lightning")
# transformers 5 and diffusers want torch 2.6, and beside torch 2.1 an older transformers breaks even tests that never
# import it, those of fake tensors and optimizers. peft and sentence-transformers depend on transformers.
WANT_LATER_TORCH = (*DEPEND_ON_TORCH, "transformers", "diffusers")
FOR_DEVELOPERS = ("ruff", "mypy", "codespell", "clang-format", "clang-tidy", "zizmor", "pre-commit", "build")


def test_requirements(torch: str) -> list[str]:
    """What the tests need, of requirements-dev.txt; tests of frameworks that are not there are skipped."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements-dev.txt").read_text().splitlines()]
    unwanted = FOR_DEVELOPERS if TORCH_INDEX else FOR_DEVELOPERS + DEPEND_ON_TORCH
    if tuple(map(int, torch.split(".")[:2])) < (2, 6):
        unwanted += WANT_LATER_TORCH
    return [line for line in lines if line and re.split("[=><]", line)[0] not in unwanted]


def constraints(torch: str, folder: Path) -> Path:
    """``torch`` and the versions that the developers test with, but for numpy where it needs an older one."""
    lines = (ROOT / "constraints-dev.txt").read_text().splitlines()
    if numpy_for(torch) != "numpy":
        # what was compiled for numpy 2
        lines = [
            line for line in lines if not line.startswith(("numpy==", "scipy==", "scikit-learn==", "matplotlib=="))
        ]
    file = folder / "constraints.txt"
    file.write_text("\n".join([*lines, f"torch=={torch}"]) + "\n")  # nothing may bring along another torch
    return file


def fill(interpreter: str, folder: Path, torch: str) -> str:
    """An environment with torch and what the tests need, unless it is there already; empty, or what it lacks."""
    # up to torch 2.2 its builder of extensions needs the old one
    setuptools = "setuptools>=64,<70" if torch.startswith(("2.1.", "2.2.")) else "setuptools>=64"
    wanted = [setuptools, "wheel", "ninja", numpy_for(torch), *test_requirements(torch)]
    pinned = (ROOT / "constraints-dev.txt").read_text()
    stamp, text = folder / "stamp", "\n".join([f"{interpreter} torch {torch}", *wanted, pinned])
    if stamp.exists() and stamp.read_text() == text:
        return ""
    python = folder / "bin" / "python"
    failed = make_environment(interpreter, folder) or install_torch(python, torch)
    if failed:
        return f"no torch {torch}: {failed}"
    failed = pip(python, "--constraint", str(constraints(torch, folder)), *wanted)
    if failed:
        return f"no test requirements: {failed}"
    stamp.write_text(text)
    return ""


def install_tensorizer(python: Path, wheels: Path | None) -> str:
    what = ["--no-index", "--find-links", str(wheels), "--pre", "tensorizer"] if wheels else ["--editable", "."]
    failed = pip(python, "--force-reinstall", "--no-deps", "--no-build-isolation", *what)
    return failed and f"no tensorizer: {failed}"


def releases_of(version: str, torch: Sequence[str]) -> list[str]:
    """The releases that are meant by "oldest", "between", "newest", "latest" and numbers, each once."""
    named = {"oldest": [OLDEST_TORCH[version]], "between": BETWEEN_TORCH[version], "newest": [newest_torch(version)]}
    if "latest" in torch:
        named["latest"] = [latest_torch(version)]
    return list(dict.fromkeys(release for name in torch for release in named.get(name, [name])))


def try_one(version: str, interpreter: str, torch: str, options: argparse.Namespace) -> str:
    folder = options.cache.resolve() / f"{version}-{torch}"
    python = folder / "bin" / "python"
    wheels = options.wheels.resolve() if options.wheels else None
    missing = fill(interpreter, folder, torch) or install_tensorizer(python, wheels)
    if missing:
        return missing
    if wheels:
        shutil.rmtree(folder / "suite", ignore_errors=True)
        return "passed" if run_suite(python, folder / "suite", options.arguments) else "FAILED"
    tests = ["-q", "-m", "not slow", "-n", str(os.cpu_count() or 1), "--dist", "loadgroup", *options.arguments]
    return "passed" if run(str(python), "-m", "pytest", *tests) else "FAILED"


def try_in_root(suite: str, torch: str, options: argparse.Namespace) -> str:
    """This script once more, with the Python of a release of Debian."""
    command = ["python3", "scripts/packaging/matrix.py", "--python", "python3", "--torch", torch]
    command += ["--cache", str(kept_folder(suite) / "matrix")]
    if options.wheels:
        wheels = kept_folder(suite) / "wheels"
        shutil.copytree(options.wheels, wheels, dirs_exist_ok=True)
        command += ["--wheels", str(wheels)]
    packages = ["git", "ca-certificates", *PYTHON, *packages_of("test")]  # git says which files are the sources
    status = run_with_repository(suite, packages, [*command, "--", *options.arguments])
    if status is None:
        return f"no Debian {suite} could be made"
    return "FAILED" if status else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--python", nargs="+", default=[], help="interpreters; default: all that are here")
    parser.add_argument("--root", nargs="+", default=[], metavar="SUITE", help=f"of {', '.join(SUITES.values())}")
    parser.add_argument("--torch", nargs="+", default=["oldest", "newest"])
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to test in place of the sources")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "matrix", help="where environments are kept")
    parser.add_argument("arguments", nargs="*", metavar="-- PYTEST ARGUMENTS")
    options = parser.parse_args()
    named = {version_of(python) or python: python for python in options.python}
    of_root = {suite: version for version, suite in SUITES.items()}
    pythons = named or ({} if options.root else pythons_here())
    unknown = [version for version in pythons if version not in OLDEST_TORCH]
    if unknown:
        sys.exit(f"matrix.py: not supported: Python {', '.join(unknown)}: wanted one of {', '.join(OLDEST_TORCH)}")
    foreign = [suite for suite in options.root if suite not in of_root]
    if foreign:
        sys.exit(f"matrix.py: no root: {', '.join(foreign)}: wanted one of {', '.join(of_root)}")
    everything = not named and not options.root
    roots = list(options.root)
    if everything and can_make_roots():
        roots = [suite for version, suite in SUITES.items() if version not in pythons]
    results = {}
    for version, python in pythons.items():
        for torch in releases_of(version, options.torch):
            name = f"Python {version} ({python}), torch {torch}"
            results[name] = "" if options.list else try_one(version, python, torch, options)
    for suite in roots:
        for torch in releases_of(of_root[suite], options.torch):
            name = f"Python {of_root[suite]} (Debian {suite}), torch {torch}"
            results[name] = "" if options.list else try_in_root(suite, torch, options)
    tried = {*pythons, *(of_root[suite] for suite in roots)}
    if everything:
        results |= {f"Python {version}": "not here" for version in OLDEST_TORCH if version not in tried}
    for name, result in results.items():
        print(f"{name}: {result}" if result else name)
    if options.list:
        return 0
    failed = [result for result in results.values() if result.startswith(("FAILED", "no tensorizer"))]
    missing = [] if everything else [result for result in results.values() if result != "passed"]
    return int(bool(failed or missing))


if __name__ == "__main__":
    sys.exit(main())

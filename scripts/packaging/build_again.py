#!/usr/bin/env python3
"""Builds wheels once more, elsewhere and with nothing kept, and says whether they are equal byte for byte.

    build_again.py [--work DIR] WHEEL_FOLDER [PYTHON ...]

The second build has another folder of sources, another cache (libraries included), and another time zone, umask,
locale and hash seed. Exit status 1, with the files that differ, unless every wheel that was built again is equal to the
one of the same name in WHEEL_FOLDER, and there is at least one. Takes as long as the first build.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build_wheels import commit_time, copy_sources

OTHERWISE = {"TZ": "Pacific/Chatham", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "4711"}


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two wheels; empty where all bytes are equal."""
    if one.read_bytes() == other.read_bytes():
        return []
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        names = first.namelist(), second.namelist()
        differing = [name for name in names[0] if name in names[1] and first.read(name) != second.read(name)]
    only = sorted(set(names[0]) ^ set(names[1]))
    return [*(f"{name} differs" for name in differing), *(f"{name} is in one only" for name in only)] or [
        "the same files, stored in another way"
    ]


def compare(first: Path, second: Path) -> int:
    """The exit status: 0 where wheels of ``second`` have their equals in ``first``; says what of each."""
    equal = {}
    for wheel in sorted(second.glob("*.whl")):
        if not (first / wheel.name).is_file():
            print(f"{wheel.name}: was not built before")
            continue
        found = differences(first / wheel.name, wheel)
        print(f"{wheel.name}: {'; '.join(found) or 'equal'}", flush=True)
        equal[wheel.name] = not found
    return int(not equal or not all(equal.values()))


def build_again(folder: Path, pythons: list[str], downloads: Path) -> Path:
    """A folder of wheels that were built in ``folder``."""
    copy_sources(folder / "sources")
    if downloads.is_dir():  # proved by their hashes before they are used
        shutil.copytree(downloads, folder / "cache" / "sources")
    command = [sys.executable, "scripts/packaging/build_wheels.py", "--out", str(folder / "dist")]
    command += ["--cache", str(folder / "cache"), *pythons]
    environment = {**os.environ, **OTHERWISE, "SOURCE_DATE_EPOCH": commit_time()}
    umask = os.umask(0o077)
    try:
        subprocess.run(command, cwd=folder / "sources", env=environment, check=True)
    finally:
        os.umask(umask)
    return folder / "dist"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, metavar="WHEEL_FOLDER")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--work", type=Path, help="where to build, and what stays; default: a temporary folder")
    parser.add_argument("--cache", type=Path, default=Path(".cache/packaging"), help="whose downloads are used again")
    options = parser.parse_args()
    if not any(options.wheels.glob("*.whl")):
        sys.exit(f"build_again.py: no wheel in {options.wheels}: make wheels builds them")
    pythons = [os.path.abspath(python) for python in options.pythons]  # a link into an environment stays one
    downloads = options.cache.resolve() / "sources"
    if options.work:
        return compare(options.wheels, build_again(options.work.resolve(), pythons, downloads))
    with tempfile.TemporaryDirectory() as text:
        return compare(options.wheels, build_again(Path(text), pythons, downloads))


if __name__ == "__main__":
    sys.exit(main())

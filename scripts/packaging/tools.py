#!/usr/bin/env python3
"""Installs tools of the lock file into a virtual environment of this Python, each proved by its hash.

    tools.py FOLDER [NAME ...]

Without names, all of them: those that build, finish and check wheels.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from lock import LOCK_FILE, read_tools


def install_tools(folder: Path, names: Sequence[str] = ()) -> Path:
    """The Python of the environment in ``folder``; nothing is done where it has these tools already."""
    python = folder / "bin" / "python"
    chosen = [tool for tool in read_tools() if not names or tool.name in names]
    wanted = hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest() + "".join(f"\n{tool.name}" for tool in chosen)
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{tool.requirement}\n" for tool in chosen))
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    subprocess.run([str(python), "-m", "pip", "install", *options, "-r", str(requirements)], check=True)
    stamp.write_text(wanted)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *(tool.name for tool in read_tools())], metavar="NAME")
    options = parser.parse_args()
    print(install_tools(options.folder, options.names))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Says in one line why files are no release; exit status 1 then.

    check_release.py TAG FOLDER

The tag must be the version of ``tensorizer/_version.py`` after a "v", and the folder hold the source distribution of
that version and a wheel of it for every supported Python and processor, nothing else.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from environments import OLDEST_TORCH

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("x86_64", "aarch64")


def wanted_names(version: str) -> set[str]:
    """The files of a release."""
    pythons = [f"cp{python.replace('.', '')}" for python in OLDEST_TORCH]
    platforms = [f"manylinux_2_28_{machine}" for machine in MACHINES]
    wheels = {f"tensorizer-{version}-{tag}-{tag}-{platform}.whl" for tag in pythons for platform in platforms}
    return {f"tensorizer-{version}.tar.gz", *wheels}


def wrong_release(tag: str, version: str, names: set[str]) -> str:
    """What is wrong; empty where the files may be published."""
    if tag != f"v{version}":
        return f"the tag is {tag}, and tensorizer/_version.py says {version}: wanted the tag v{version}"
    wanted = wanted_names(version)
    parts = []
    if names - wanted:
        parts.append(f"does not belong to {version}: {', '.join(sorted(names - wanted))}")
    if wanted - names:
        parts.append(f"missing: {', '.join(sorted(wanted - names))}")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag", metavar="TAG")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if not options.folder.is_dir():
        sys.exit(f"check_release.py: no folder {options.folder}")
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "tensorizer" / "_version.py").read_text(), re.MULTILINE)
    wrong = wrong_release(options.tag, version, {path.name for path in options.folder.iterdir()})
    if wrong:
        sys.exit(f"check_release.py: {wrong}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""A release: what its files must be, and the text of its page.

    release.py check TAG FOLDER     says in one line why the files of FOLDER are no release; exit status 1 then
    release.py notes TAG            prints what CHANGELOG.md says of it

The tag must be the version of ``tensorizer/_version.py`` after a "v", and the folder hold the source distribution of
that version and a wheel of it for every supported Python and processor, nothing else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("x86_64", "aarch64")


def version() -> str:
    return re.findall(r'^__version__ = "(.+)"$', (ROOT / "tensorizer" / "_version.py").read_text(), re.MULTILINE)[0]


def pythons() -> list[str]:
    """Tags such as cp39 of what cibuildwheel builds."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.findall(r"(cp\d+)-\*", re.findall(r'^build = "(.+)"$', text, re.MULTILINE)[0])


def wanted_names(version: str) -> set[str]:
    """The files of a release."""
    platforms = [f"manylinux_2_28_{machine}" for machine in MACHINES]
    wheels = {f"tensorizer-{version}-{tag}-{tag}-{platform}.whl" for tag in pythons() for platform in platforms}
    return {f"tensorizer-{version}.tar.gz", *wheels}


def wrong_release(tag: str, version: str, names: set[str]) -> str:
    """What is wrong; empty where the files may be published."""
    if tag != f"v{version}":
        return f"the tag is {tag}, and tensorizer/_version.py says {version}: expected the tag v{version}"
    wanted = wanted_names(version)
    parts = []
    if names - wanted:
        parts.append(f"does not belong to {version}: {', '.join(sorted(names - wanted))}")
    if wanted - names:
        parts.append(f"missing: {', '.join(sorted(wanted - names))}")
    return "; ".join(parts)


def notes(changelog: str, tag: str) -> str:
    """The section of a version in the text of a changelog; empty where it has none."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    return next((text.partition("\n")[2].strip() for text in sections if text.split()[0].strip("[]") == tag[1:]), "")


def main() -> None:
    if sys.argv[1:2] == ["notes"] and len(sys.argv) == 3:
        text = notes((ROOT / "CHANGELOG.md").read_text(), sys.argv[2])
        print(text or sys.exit(f"release.py: CHANGELOG.md has no section ## {sys.argv[2][1:]}"))
        return
    if sys.argv[1:2] != ["check"] or len(sys.argv) != 4:
        sys.exit("usage: release.py check TAG FOLDER, or release.py notes TAG")
    folder = Path(sys.argv[3])
    if not folder.is_dir():
        sys.exit(f"release.py: no folder {folder}")
    wrong = wrong_release(sys.argv[2], version(), {path.name for path in folder.iterdir()})
    if wrong:
        sys.exit(f"release.py: {wrong}")


if __name__ == "__main__":
    main()

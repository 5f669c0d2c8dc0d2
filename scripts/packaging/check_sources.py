#!/usr/bin/env python3
"""Compares the lock file with what Debian's stable release has now; exit status 1 if a library has a later version.

    check_sources.py [--update]

Run every week: a security fix in a library that wheels hold means a rebuilt release. ``--update`` writes the latest
versions into the lock file, with the hashes that the lists of Debian name, once the files have been fetched and proved.
"""

from __future__ import annotations

import argparse
import lzma
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

from lock import LOCK_FILE, TIMEOUT_SECONDS, Library, address_of, fetch, libraries_of, read_libraries

LISTS = {
    "debian": "dists/trixie/main/source/Sources.xz",
    "debian-security": "dists/trixie-security/main/source/Sources.xz",
}


class SourcePackage(NamedTuple):
    """One paragraph of a list of Debian."""

    version: str  # without the epoch
    folder: str  # an address as the lock file has them
    sha256: dict[str, str]  # by file


def source_package(patches_file: str) -> tuple[str, str]:
    """Name and version of a Debian source package, from the name of its patches."""
    name, _, rest = patches_file.partition("_")
    return name, rest.removesuffix(".debian.tar.xz")


def read_list(text: str, place: str) -> dict[str, list[SourcePackage]]:
    """The packages of a list, by name; ``place`` is what the lock file calls the mirror."""
    packages: dict[str, list[SourcePackage]] = {}
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Directory): (.+)$", paragraph, re.MULTILINE))
        if len(fields) < 3:
            continue
        hashes = re.findall(r"^ ([0-9a-f]{64}) \d+ (\S+)$", paragraph, re.MULTILINE)
        version = fields["Version"].partition(":")[2] or fields["Version"]
        package = SourcePackage(version, f"{place}:{fields['Directory']}", {file: digest for digest, file in hashes})
        packages.setdefault(fields["Package"], []).append(package)
    return packages


def published() -> dict[str, list[SourcePackage]]:
    packages: dict[str, list[SourcePackage]] = {}
    for place, path in LISTS.items():
        with urllib.request.urlopen(address_of(f"{place}:{path}"), timeout=TIMEOUT_SECONDS) as answer:
            for name, found in read_list(lzma.decompress(answer.read()).decode(), place).items():
                packages.setdefault(name, []).extend(found)
    return packages


def is_later(version: str, than: str) -> bool:
    return subprocess.run(["dpkg", "--compare-versions", version, "gt", than], check=False).returncode == 0


def latest_of(found: list[SourcePackage], than: str) -> SourcePackage | None:
    """The latest of the packages, if it is later than a version. One that every mirror has comes before its twin."""
    latest: SourcePackage | None = None
    for package in found:
        if is_later(package.version, latest.version if latest else than):
            latest = package
    return latest


def updated(text: str, library: Library, package: SourcePackage) -> str:
    """The lock file's text with another version of one library."""
    begin = text.index(f'"name": "{library.name}"')
    end = text.find('"name": "', begin + 1)
    entry = text[begin:end]
    upstream = package.version.rpartition("-")[0]
    entry = entry.replace(library.version, upstream)  # the upstream archive, in every name and address
    for old, suffix in ((library.archive, r"\.orig\.tar\.\w+"), (library.patches, r"\.debian\.tar\.xz")):
        (file,) = (name for name in package.sha256 if re.search(suffix + "$", name))
        entry = entry.replace(old.sha256, package.sha256[file])
        entry = re.sub(r'"[^"/]+' + suffix + '"', f'"{file}"', entry)
        entry = re.sub(r'"debian[^":]*:[^"]+' + suffix + '"', f'"{package.folder}/{file}"', entry)
    return text[:begin] + entry + text[end:]


def proved(text: str, name: str) -> str:
    """Why the files that a lock file's text names for a library cannot be had; empty if they can."""
    (library,) = (library for library in libraries_of(text) if library.name == name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for file in (library.archive, library.patches):
                fetch(file, Path(folder))
        except SystemExit as error:
            return str(error)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    update = parser.parse_args().update
    packages = published()
    text = LOCK_FILE.read_text()
    late = False
    for library in read_libraries():
        name, version = source_package(library.patches.file)
        latest = latest_of(packages.get(name, []), version)
        late_before, late = late, late or latest is not None
        print(f"{library.name}: {version}" + (f", Debian has {latest.version}" if latest else ""))
        if latest and update:
            candidate = updated(text, library, latest)
            failed = proved(candidate, library.name)
            if failed:
                print(f"  left as it was: {failed}")
            else:
                text, late = candidate, late_before
    if text != LOCK_FILE.read_text():
        LOCK_FILE.write_text(text)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())

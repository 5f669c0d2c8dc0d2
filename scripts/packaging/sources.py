#!/usr/bin/env python3
"""Reads sources.json, the lock file of the libraries that wheels hold; fetches, proves and unpacks their sources.

    sources.py

says which libraries have a later release than the lock file; exit status 1 if one has. Run weekly: a security fix in a
library means a rebuilt wheel. A library is built from its newest release that can be had. Where that release lacks
security fixes, the lock file also names the ``debian.tar`` of Debian's source package, and all patches of its series
are applied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

LOCK_FILE = Path(__file__).with_name("sources.json")
DEBIAN = "https://deb.debian.org/debian"
TIMEOUT_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Library:
    """One statically linked library.

    Attributes:
        sha256: Of the archive that the project publishes, in hexadecimal.
        urls: Where the archive can be had; the first that answers with the right content is used. ``debian:PATH`` is
            a copy below this machine's mirror of Debian, for machines that reach nothing else.
        repository: The project's git repository.
        tags: How the tags of the releases begin that we would move to.
        debian: ``url`` and ``sha256`` of the archive with Debian's patches for this release; empty where it is built
            as released.
    """

    name: str
    version: str
    licence: str
    licence_file: str
    homepage: str
    sha256: str
    urls: tuple[str, ...]
    repository: str
    tags: str
    debian: dict[str, str] = dataclasses.field(default_factory=dict)


def read_libraries() -> list[Library]:
    """The libraries in the order in which they are built: each needs only those before it."""
    return [
        Library(**{**entry, "urls": tuple(entry["urls"])}) for entry in json.loads(LOCK_FILE.read_text())["libraries"]
    ]


def debian_mirror() -> str:
    """The mirror of Debian that ``DEBIAN_MIRROR`` names, or the one that this machine's apt uses, or Debian's own."""
    lists = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    words = [word for path in lists if path.is_file() for word in path.read_text(errors="replace").split()]
    for word in [os.environ.get("DEBIAN_MIRROR", ""), *words]:
        if re.match(r"https?://.*/debian/?$", word):
            return word.rstrip("/")
    return DEBIAN


def address_of(url: str, mirror: str) -> str:
    return f"{mirror}/{url[len('debian:') :]}" if url.startswith("debian:") else url


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(path: Path, sha256: str, urls: Sequence[str]) -> Path:
    """The file ``path``, fetched unless it is there already.

    Raises:
        SystemExit: No address gave the content that the lock file names; says what each one gave.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and sha256_of(path) == sha256:
        return path
    part, complaints = path.with_name(path.name + ".part"), []
    for url in urls:
        try:
            address = address_of(url, debian_mirror())
            with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer, part.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            complaints.append(f"{url}: {error}")
            continue
        if sha256_of(part) == sha256:
            return part.rename(path)
        complaints.append(f"{url}: SHA-256 {sha256_of(part)}")
        part.unlink()
    sys.exit(f"{path.name}: expected SHA-256 {sha256}, got\n  " + "\n  ".join(complaints))


def extract(path: Path, folder: Path) -> None:
    with tarfile.open(path) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def apply_series(tree: Path) -> None:
    """Applies the patches of ``debian/patches/series``, as dpkg-source does.

    Raises:
        SystemExit: One does not fit, or there is no series.
    """
    patches = tree / "debian" / "patches"
    if not (patches / "series").is_file():
        sys.exit(f"{tree.name}: no debian/patches/series, and the lock file names it")
    lines = (patches / "series").read_text().splitlines()
    for name in [line.partition("#")[0].split()[0] for line in lines if line.partition("#")[0].strip()]:
        command = ["patch", "--directory", str(tree), "-t", "-N", "-p1", "-F0", "--quiet", "--input"]
        if subprocess.run([*command, str(patches / name)], check=False).returncode != 0:
            sys.exit(f"{tree.name}: the patch {name} does not fit")


def unpack(library: Library, cache: Path, folder: Path) -> Path:
    """The sources of ``library`` in ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    extract(fetch(cache / f"{library.name}-{library.version}.tar.gz", library.sha256, library.urls), folder)
    (tree,) = folder.iterdir()
    if library.debian:
        name = library.debian["url"].rpartition("/")[2]
        extract(fetch(cache / name, library.debian["sha256"], [library.debian["url"]]), tree)
        apply_series(tree)
    return tree


def latest_release(library: Library) -> str:
    """The version of the highest tag of the project that begins as ``library.tags`` says."""
    command = ["git", "ls-remote", "--tags", "--refs", library.repository, f"{library.tags}*"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(rf"refs/tags/({re.escape(library.tags)}[\d._]+)$", listed, re.MULTILINE)
    numbers = [re.findall(r"\d+", tag.rpartition("-")[2]) for tag in found]
    return ".".join(max(numbers, key=lambda parts: [int(part) for part in parts], default=[]))


def main() -> int:
    late = False
    for library in read_libraries():
        latest = latest_release(library)
        late = late or latest != library.version
        print(f"{library.name} {library.version}" + (f": {latest} is out" if latest != library.version else ""))
    return int(late)


if __name__ == "__main__":
    sys.exit(main())

"""Reads the lock file: which sources and tools a wheel is made of, and how each file is fetched and proved.

Every file is named with its SHA-256. A file that differs ends the build, wherever it came from.
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
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

LOCK_FILE = Path(__file__).with_name("sources.json")
TIMEOUT_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class LockedFile:
    """One file to fetch.

    Attributes:
        file: Its name in the cache.
        sha256: Of its content, in hexadecimal.
        urls: Where it can be had; the first one that answers with the right content is used. ``debian:PATH`` is a path
            below this machine's mirror of Debian, ``debian-security:PATH`` below its sister for security updates.
    """

    file: str
    sha256: str
    urls: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Library:
    """One statically linked library: the upstream archive, and Debian's patches to it (the security fixes)."""

    name: str
    version: str
    licence: str
    licence_file: str
    homepage: str
    archive: LockedFile
    patches: LockedFile


@dataclasses.dataclass(frozen=True)
class Tool:
    """One package of the Python registry that builds or checks wheels."""

    name: str
    version: str
    licence: str
    homepage: str
    sha256: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """A line for ``pip install --require-hashes``."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{digest}" for digest in self.sha256)])


def _locked_file(entry: dict[str, Any]) -> LockedFile:
    return LockedFile(entry["file"], entry["sha256"], tuple(entry["urls"]))


def read_libraries() -> list[Library]:
    """The libraries in the order in which they are built: each needs only those before it."""
    return libraries_of(LOCK_FILE.read_text())


def libraries_of(text: str) -> list[Library]:
    """Those that a lock file's text names."""
    entries = json.loads(text)["libraries"]
    return [
        Library(**{**entry, "archive": _locked_file(entry["archive"]), "patches": _locked_file(entry["patches"])})
        for entry in entries
    ]


def read_tools() -> list[Tool]:
    return [Tool(**{**entry, "sha256": tuple(entry["sha256"])}) for entry in json.loads(LOCK_FILE.read_text())["tools"]]


def debian_mirror() -> str:
    """The mirror of Debian that ``DEBIAN_MIRROR`` names, or the one that this machine's apt uses.

    Raises:
        LookupError: There is neither.
    """
    named = os.environ.get("DEBIAN_MIRROR")
    if named:
        return named.rstrip("/")
    lists = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for path in lists:
        for word in path.read_text(errors="replace").split() if path.is_file() else ():
            if re.match(r"https?://", word) and word.rstrip("/").endswith("/debian"):
                return word.rstrip("/")
    raise LookupError("no mirror of Debian in the apt sources: name one with DEBIAN_MIRROR")


def address_of(url: str) -> str:
    """The URL, with ``debian:`` and ``debian-security:`` resolved.

    Raises:
        LookupError: It wants a mirror of Debian, and there is none.
    """
    place, _, path = url.partition(":")
    endings = {"debian": "", "debian-security": "-security"}
    return f"{debian_mirror()}{endings[place]}/{path}" if place in endings else url


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def fetch(wanted: LockedFile, folder: Path) -> Path:
    """The file in ``folder``, fetched unless it is there already.

    Raises:
        SystemExit: No address gave the content that the lock file names; says what each one gave.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / wanted.file
    if path.is_file() and sha256_of(path) == wanted.sha256:
        return path
    complaints = []
    for url in wanted.urls:
        part = path.with_name(path.name + ".part")
        try:
            url = address_of(url)
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer, part.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except (OSError, LookupError, urllib.error.URLError) as error:
            complaints.append(f"{url}: {error}")
            continue
        found = sha256_of(part)
        if found == wanted.sha256:
            part.rename(path)
            return path
        part.unlink()
        complaints.append(f"{url}: SHA-256 {found}")
    advice = (
        "Debian removes a file some time after a later one: check_sources.py --update, or a DEBIAN_MIRROR of that day"
    )
    sys.exit(f"{wanted.file}: wanted SHA-256 {wanted.sha256}, found\n  " + "\n  ".join([*complaints, advice]))


def unpack(library: Library, cache: Path, folder: Path) -> Path:
    """The patched sources of ``library`` in ``folder``, which is emptied first."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for locked in (library.archive, library.patches):
        with tarfile.open(fetch(locked, cache)) as archive:
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    patches = folder / "debian" / "patches"
    (tree,) = (path for path in folder.iterdir() if path.name != "debian")
    for line in (patches / "series").read_text().splitlines():
        name = line.split("#")[0].strip()
        if name:
            subprocess.run(
                ["patch", "--directory", str(tree), "-p1", "--quiet", "--input", str(patches / name)], check=True
            )
    return tree

#!/usr/bin/env python3
"""Compares the lock file with what Debian's stable release has now; exit status 1 if a library has a later version.

Run every week: a security fix in a library that wheels hold means a rebuilt release.
"""

from __future__ import annotations

import lzma
import re
import subprocess
import sys
import urllib.request

from lock import TIMEOUT_SECONDS, debian_mirror, read_libraries

# Below the mirror, and below its sister for security updates.
LISTS = ("/dists/trixie/main/source/Sources.xz", "-security/dists/trixie-security/main/source/Sources.xz")


def source_package(patches_file: str) -> tuple[str, str]:
    """Name and version of a Debian source package, from the name of its patches."""
    name, _, rest = patches_file.partition("_")
    return name, rest.removesuffix(".debian.tar.xz")


def published_versions() -> dict[str, set[str]]:
    versions: dict[str, set[str]] = {}
    mirror = debian_mirror()
    for url in (mirror + path for path in LISTS):
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            text = lzma.decompress(answer.read()).decode()
        for paragraph in text.split("\n\n"):
            fields = dict(re.findall(r"^(Package|Version): (.+)$", paragraph, re.MULTILINE))
            if len(fields) == 2:
                version = fields["Version"].partition(":")[2] or fields["Version"]
                versions.setdefault(fields["Package"], set()).add(version)
    return versions


def is_later(version: str, than: str) -> bool:
    return subprocess.run(["dpkg", "--compare-versions", version, "gt", than], check=False).returncode == 0


def main() -> int:
    published = published_versions()
    late = False
    for library in read_libraries():
        package, version = source_package(library.patches.file)
        later = sorted(found for found in published.get(package, ()) if is_later(found, version))
        late = late or bool(later)
        print(f"{library.name}: {version}" + (f", Debian has {', '.join(later)}" if later else ""))
    return int(late)


if __name__ == "__main__":
    sys.exit(main())

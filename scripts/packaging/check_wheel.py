#!/usr/bin/env python3
"""Says what is wrong with wheels, beside what auditwheel refuses; exit status 1 if anything is.

    check_wheel.py FOLDER_OR_WHEEL ...

A wheel must work beside any other copy of the libraries that it holds: its module is the only one, exports only its
init function, expects nothing of them from others, and holds no text of the machine that built it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path

from sources import read_libraries

MAX_WHEEL_NBYTES = 4_500_000
MAX_MODULE_NBYTES = 10_000_000
LIBRARY_NAMES = re.compile(
    r"(SSL|EVP|CRYPTO|X509|OPENSSL|BIO|ERR|OSSL|curl|nghttp2|sodium|crypto_\w+|redis|crc32)_?|_ZNK?(2at|3c10|5torch)|THP"
)
# Places of a machine that builds: none may be in what is built.
FORBIDDEN_TEXTS = [b"/etc/ssl", b"/etc/pki", b"/usr/lib/ssl", b"/home/", b"/root/", b"/tmp/"]
HEADERS = ("pybind11", "dlpack")
REQUIRED = ["py.typed", "_C.pyi", "tensors.proto", "__init__.py"]


def readelf(module: Path, option: str) -> str:
    return subprocess.run(["readelf", "--wide", option, str(module)], capture_output=True, text=True, check=True).stdout


def wrong_module(module: Path, forbidden: list[bytes]) -> list[str]:
    """Names that it exports or expects of other modules, texts of the machine, and what a hardened module has."""
    content, dynamic = module.read_bytes(), readelf(module, "--dynamic")
    wrong = [f"has {entry}" for entry in ("RPATH", "RUNPATH", "TEXTREL") if f"({entry})" in dynamic]
    wrong += [] if "BIND_NOW" in dynamic else ["lacks BIND_NOW"]
    stack = next((line for line in readelf(module, "--program-headers").splitlines() if "GNU_STACK" in line), "RWE")
    wrong += ["has an executable stack"] if "RWE" in stack else []
    for line in readelf(module, "--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        name = fields[7].partition("@")[0]
        if fields[6] != "UND" and name != "PyInit__C":
            wrong.append(f"exports {name}")
        elif fields[6] == "UND" and LIBRARY_NAMES.match(name):
            wrong.append(f"expects {name} of another module")
    wrong += [f"holds the text {text.decode()}" for text in [*FORBIDDEN_TEXTS, *forbidden] if text in content]
    if len(content) > MAX_MODULE_NBYTES:
        wrong.append(f"has {len(content)} bytes: expected at most {MAX_MODULE_NBYTES}")
    return wrong


def wrong_content(names: list[str], listed: Collection[str]) -> list[str]:
    """Files that are missing, and files that nobody needs who installs the wheel.

    Args:
        names: Of all files of the wheel.
        listed: Names of the components in its bill of materials.
    """
    wrong = [f"lacks tensorizer/{name}" for name in REQUIRED if f"tensorizer/{name}" not in names]
    licences = {name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name}
    held = [*(library.name for library in read_libraries()), *HEADERS, "libc++"]
    wrong += [f"does not list the component {name}" for name in held if name not in listed]
    wrong += [f"lacks the licence of {name}" for name in sorted({*held, *listed}) if f"{name}.txt" not in licences]
    unwanted = [name for name in names if name.endswith((".a", ".h", ".cpp", ".cu", ".pyc"))]
    unwanted += [name for name in names if not name.startswith("tensorizer")]
    return wrong + [f"holds {name}" for name in unwanted]


def listed_components(archive: zipfile.ZipFile) -> set[str]:
    """Names in the bills of materials of a wheel (.dist-info/sboms/, PEP 770); empty where it has none."""
    bills = [name for name in archive.namelist() if ".dist-info/sboms/" in name]
    return {component["name"] for bill in bills for component in json.loads(archive.read(bill))["components"]}


def wrong_wheel(wheel: Path, forbidden: list[bytes]) -> list[str]:
    """Everything that is wrong with one wheel; empty where it may be published."""
    wrong = [] if "-manylinux_2_28_" in wheel.name else ["its name lacks manylinux_2_28"]
    nbytes = wheel.stat().st_size
    if nbytes > MAX_WHEEL_NBYTES:
        wrong.append(f"has {nbytes} bytes: expected at most {MAX_WHEEL_NBYTES}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        wrong += wrong_content(archive.namelist(), listed_components(archive))
        modules = [name for name in archive.namelist() if name.endswith(".so") or ".so." in name]
        if len(modules) != 1 or not modules[0].startswith("tensorizer/_C."):
            wrong.append(f"has the modules {modules}: expected tensorizer/_C only")
        for name in modules:
            wrong += [f"{name} {what}" for what in wrong_module(Path(archive.extract(name, folder)), forbidden)]
    return wrong


def main() -> int:
    paths = [Path(argument) for argument in sys.argv[1:]]
    wheels = [wheel for path in paths for wheel in (sorted(path.glob("*.whl")) if path.is_dir() else [path])]
    if not wheels or not all(wheel.is_file() for wheel in wheels):
        sys.exit(f"check_wheel.py: no wheel in {', '.join(map(str, paths)) or 'no folder'}")
    found = {wheel.name: wrong_wheel(wheel, []) for wheel in wheels}
    for name, wrong in found.items():
        print(f"{name}: {'; '.join(wrong) or 'right'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())

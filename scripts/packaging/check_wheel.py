#!/usr/bin/env python3
"""Says what is wrong with wheels; exit status 1 if anything is.

    check_wheel.py [--forbid TEXT ...] FOLDER_OR_WHEEL ...

A wheel must run on every Linux with glibc 2.28 and beside any other copy of the libraries that it holds: its module
needs the C library alone, exports its init function alone, and holds no text of the machine that built it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path

from lock import read_libraries

MAX_WHEEL_NBYTES = 5_000_000
MAX_MODULE_NBYTES = 9_000_000
PLATFORM = re.compile(r"-manylinux_2_28_(x86_64|aarch64)\.whl$")
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
LIBC_FAMILY = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux[\w-]*)\.so")
LIBRARY_NAMES = re.compile(
    r"(SSL|EVP|CRYPTO|X509|OPENSSL|BIO|ERR|OSSL|curl|nghttp2|sodium|crypto_\w+|redis|crc32)_?|_ZNK?(2at|3c10|5torch)|THP"
)
# Places of a machine that builds: none may be in what is built.
FORBIDDEN_TEXTS = [b"/etc/ssl", b"/etc/pki", b"/usr/lib/ssl", b"/home/", b"/root/", b"/tmp/"]
HEADERS = ("pybind11", "dlpack")
CPP_RUNTIMES = ("libc++", "libstdc++")
REQUIRED = ["py.typed", "_C.pyi", "tensors.proto", "__init__.py"]


def readelf(module: Path, option: str) -> str:
    return subprocess.run(["readelf", "--wide", option, str(module)], capture_output=True, text=True, check=True).stdout


def wrong_dynamic_section(module: Path) -> list[str]:
    """Libraries it needs, run paths, relocations of text, writable jump tables, executable stacks."""
    dynamic = readelf(module, "--dynamic")
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    wrong = [f"needs {name}: wanted the C and C++ libraries alone" for name in needed if not LIBC_FAMILY.match(name)]
    wrong += [f"has {entry}" for entry in ("RPATH", "RUNPATH", "TEXTREL") if f"({entry})" in dynamic]
    if "BIND_NOW" not in dynamic:
        wrong.append("lacks BIND_NOW")
    stack = next((line for line in readelf(module, "--program-headers").splitlines() if "GNU_STACK" in line), "RWE")
    return wrong + (["has an executable stack"] if "RWE" in stack else [])


def wrong_symbols(module: Path) -> list[str]:
    """Names that it exports, names that it expects of others, versions that are too new."""
    wrong = []
    for line in readelf(module, "--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        name, _, version = fields[7].partition("@")
        if fields[6] != "UND" and name != "PyInit__C":
            wrong.append(f"exports {name}")
        elif fields[6] == "UND" and LIBRARY_NAMES.match(name):
            wrong.append(f"expects {name} of another module")
        family, _, number = version.lstrip("@").split(" ")[0].partition("_")
        if family in NEWEST and re.fullmatch(r"[\d.]+", number):
            found = tuple(int(part) for part in number.split("."))
            if found > NEWEST[family]:
                wrong.append(f"wants {name} of {family}_{number}, later than manylinux_2_28 has")
    return wrong


def wrong_module(module: Path, forbidden: list[bytes]) -> list[str]:
    content = module.read_bytes()
    wrong = wrong_dynamic_section(module) + wrong_symbols(module)
    wrong += [f"holds the text {text.decode()}" for text in [*FORBIDDEN_TEXTS, *forbidden] if text in content]
    if len(content) > MAX_MODULE_NBYTES:
        wrong.append(f"has {len(content)} bytes: wanted at most {MAX_MODULE_NBYTES}")
    return wrong


def wrong_content(names: list[str], listed: Collection[str]) -> list[str]:
    """Files that are missing, and files that nobody needs who installs the wheel.

    Args:
        names: Of all files of the wheel.
        listed: Names of the components in its bill of materials.
    """
    wrong = [f"lacks tensorizer/{name}" for name in REQUIRED if f"tensorizer/{name}" not in names]
    licences = {name.rpartition("/")[2] for name in names if ".dist-info/licenses/" in name}
    held = [*(library.name for library in read_libraries()), *HEADERS]
    wrong += [f"does not list the component {name}" for name in held if name not in listed]
    if not any(name in listed for name in CPP_RUNTIMES):
        wrong.append(f"lists no C++ library: wanted one of {', '.join(CPP_RUNTIMES)}")
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
    wrong = [] if PLATFORM.search(wheel.name) else ["its name lacks manylinux_2_28"]
    nbytes = wheel.stat().st_size
    if nbytes > MAX_WHEEL_NBYTES:
        wrong.append(f"has {nbytes} bytes: wanted at most {MAX_WHEEL_NBYTES}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        wrong += wrong_content(names, listed_components(archive))
        modules = [name for name in names if name.endswith(".so") or ".so." in name]
        if len(modules) != 1 or not modules[0].startswith("tensorizer/_C."):
            wrong.append(f"has the modules {modules}: wanted tensorizer/_C alone")
        for name in modules:
            path = Path(archive.extract(name, folder))
            wrong += [f"{name} {complaint}" for complaint in wrong_module(path, forbidden)]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="FOLDER_OR_WHEEL")
    parser.add_argument("--forbid", nargs="*", default=[], metavar="TEXT", help="texts that the module must not hold")
    options = parser.parse_args()
    for path in options.wheels:
        if not path.exists():
            sys.exit(f"check_wheel.py: no file or folder {path}")
    wheels = [w for path in options.wheels for w in (sorted(path.glob("*.whl")) if path.is_dir() else [path])]
    if not wheels:
        sys.exit("check_wheel.py: no wheel found")
    failed = False
    for wheel in wheels:
        wrong = wrong_wheel(wheel, [text.encode() for text in options.forbid])
        print(f"{wheel.name}: {wheel.stat().st_size} bytes, {'; '.join(wrong) or 'right'}")
        failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

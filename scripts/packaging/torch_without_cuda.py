"""Lets a torch that was built for CUDA run without CUDA's libraries, on a machine that has no GPU.

The package index has builds for CUDA alone: their libraries of several gigabytes are dependencies, without which torch
cannot be imported. ``pip install --no-deps torch`` leaves them away; here each is replaced by a small library of the
same name, whose functions all answer that there is no device. Everything on the CPU is torch's own code.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice; an error in every other library of CUDA too
# Those of the machine, which torch takes from there in any case.
OF_THE_SYSTEM = re.compile(r"(lib(c|m|dl|rt|util|pthread|stdc\+\+|gcc_s|python3[\w.]*)|ld-linux[\w-]*)\.so")


@dataclasses.dataclass
class Module:
    """What the linker knows of a shared library.

    Attributes:
        needed: Names of the libraries that it needs.
        defined: Names that it has.
        wanted: From names that it expects of others to (version or "", "data" or "function").
        homes: From versions of names to the library that has them.
    """

    needed: set[str]
    defined: set[str]
    wanted: dict[str, tuple[str, str]]
    homes: dict[str, str]


def read_module(path: Path) -> Module:
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", "--version-info", str(path)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    module = Module(set(re.findall(r"\(NEEDED\).*\[(.+)\]", listed)), set(), {}, {})
    home = ""
    for line in listed.splitlines():
        fields = line.split()
        if len(fields) >= 8 and re.fullmatch(r"\d+:", fields[0]) and fields[4] in ("GLOBAL", "WEAK", "UNIQUE"):
            name, _, version = fields[7].partition("@")
            if fields[6] != "UND":
                module.defined.add(name)
            elif fields[4] != "WEAK":  # a weak name may stay without an owner
                module.wanted[name] = (version.lstrip("@"), "data" if fields[3] == "OBJECT" else "function")
        elif "File: " in line:
            home = fields[fields.index("File:") + 1]
        elif "Name: " in line and "Flags: " in line and home:
            module.homes[fields[fields.index("Name:") + 1]] = home
    return module


def source_of(names: dict[str, str]) -> str:
    """C source of a library with these names (to "data" or "function")."""
    lines = [
        f"int no_device(void) {{ return {NO_DEVICE}; }}",
        'const char* no_text(void) { return ""; }',
    ]
    for name, kind in sorted(names.items()):
        if kind == "data":
            lines.append(f"char {name}[256];")
        else:
            text = name.endswith(("String", "ErrorName", "_string"))
            returned, body = ("const char*", "no_text") if text else ("int", "no_device")
            lines.append(f'{returned} {name}(void) __attribute__((alias("{body}")));')
    return "\n".join(lines) + "\n"


def write_library(path: Path, versions: dict[str, dict[str, str]]) -> None:
    """A shared library at ``path``: from each version (or "") to the names that have it."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        names = {name: kind for of_version in versions.values() for name, kind in of_version.items()}
        (folder / "names.c").write_text(source_of(names))
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{path.name}", "-o", str(path)]
        nodes = [
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(of_version))} }};"
            for version, of_version in sorted(versions.items())
            if version
        ]
        if nodes:
            (folder / "versions.map").write_text("\n".join(nodes) + "\n")
            command.append(f"-Wl,--version-script={folder / 'versions.map'}")
        subprocess.run([*command, str(folder / "names.c")], check=True)


def stand_in_for_cuda(site_packages: Path) -> list[str]:
    """Writes the libraries that the torch in ``site_packages`` lacks, beside its own; returns their names."""
    folder = site_packages / "torch" / "lib"
    paths = [*folder.glob("*.so*"), *(site_packages / "torch").glob("_C.*.so")]
    modules = [read_module(path) for path in paths]
    here = {path.name for path in paths}
    needed = set().union(*(module.needed for module in modules))
    missing = {name for name in needed - here if not OF_THE_SYSTEM.match(name)}
    defined = set().union(*(module.defined for module in modules))
    libraries: dict[str, dict[str, dict[str, str]]] = {name: defaultdict(dict) for name in sorted(missing)}
    for module in modules:
        for name, (version, kind) in module.wanted.items():
            home = module.homes.get(version)
            if home in missing:
                libraries[home][version][name] = kind
            elif not version and name not in defined and not name.startswith(("Py", "_Py", "_Z")):
                # Without a version any library will do: the first that this module needs. CUDA's names are those of C;
                # those of C++ belong to its own library.
                owner = min(module.needed & missing, default=None)
                if owner:
                    libraries[owner][""][name] = kind
    for name, versions in libraries.items():
        write_library(folder / name, versions)
    return list(libraries)

"""The compiler of wheels: zig's clang, told once which machine and which glibc to build for.

Build systems want a program called ``cc``, so each tool becomes a small script. The target belongs into these scripts
and not into ``CFLAGS``: the probes of configure must look at the headers of that glibc too, not at the host's.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

GLIBC = "2.28"
# The oldest processor of the architecture; everything faster is chosen at run time.
BASELINE = {"x86_64": "x86_64", "aarch64": "generic"}
LICENCE = "Apache-2.0 WITH LLVM-exception"
# Libraries of zig, parts of which end up in what it links: name, folder of its sources, licence.
RUNTIMES = [("libc++", "libcxx", LICENCE), ("libc++abi", "libcxxabi", LICENCE), ("libunwind", "libunwind", LICENCE)]


def zig_program() -> Path:
    """The zig of the package ``ziglang`` (requirements/packaging.txt) of this Python."""
    import ziglang

    return Path(ziglang.__file__).with_name("zig")


def version_of(zig: Path) -> str:
    return subprocess.run([str(zig), "version"], capture_output=True, text=True, check=True).stdout.strip()


def write_tools(zig: Path, folder: Path, machine: str = platform.machine()) -> None:
    """Scripts for ``zig`` in ``folder``: ``cc``, ``c++``, ``ar`` and ``ranlib``; setup.py looks for them there.

    For another ``machine`` than this one also ``objcopy`` and ``strip``, which are binutils' for that machine.
    """
    if machine not in BASELINE:
        raise SystemExit(f"no wheels for {machine}: expected one of {', '.join(BASELINE)}")
    folder.mkdir(parents=True, exist_ok=True)
    target = f"-target {machine}-linux-gnu.{GLIBC} -mcpu={BASELINE[machine]} -fno-sanitize=undefined"
    # The release in it makes other scripts of another zig: it is what ccache tells compilers apart by.
    cache = shlex.quote(str(folder.parent / "zig-cache"))
    first = f"#!/bin/sh\n# zig {version_of(zig)}\nexport ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache}\n"
    quoted = shlex.quote(str(zig))
    for tool in ("cc", "c++", "ar", "ranlib"):
        text = f'{first}exec {quoted} {tool} "$@"\n'
        if tool in ("cc", "c++"):
            # Asked only for its version, zig refuses the target with the glibc in it; OpenSSL picks its assembly by it.
            plain = f'[ $# = 1 ] && case $1 in -v | --version | -dump*) exec {quoted} {tool} "$@" ;; esac\n'
            text = f'{first}{plain}exec {quoted} {tool} {target} "$@"\n'
        write_script(folder / tool, text)
    for tool in ("objcopy", "strip") if machine != platform.machine() else ():
        write_script(folder / tool, f'#!/bin/sh\nexec {machine}-linux-gnu-{tool} "$@"\n')


def write_script(path: Path, text: str) -> None:
    """One that did not change keeps its time, by which make tells what is new."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        path.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """What a build needs in its environment; plain names, since OpenSSL keeps its compiler's command as a text."""
    tools = {"CC": "cc", "CXX": "c++", "AR": "ar", "RANLIB": "ranlib"}
    return {**tools, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def write_runtimes(zig: Path, prefix: Path) -> None:
    """What a module linked by ``zig`` holds of it: licences, and ``runtimes.json`` for the list of components."""
    lib = zig.parent / "lib"
    found = [(name, licence, lib / source / "LICENSE.TXT") for name, source, licence in RUNTIMES]
    components = []
    for name, licence, text in [*found, ("compiler_rt", "MIT", zig.parent / "LICENSE")]:
        shutil.copyfile(text, prefix / "licences" / f"{name}.txt")
        components.append({"name": name, "version": f"of zig {version_of(zig)}", "licence": licence})
    (prefix / "runtimes.json").write_text(json.dumps(components, indent=2) + "\n")

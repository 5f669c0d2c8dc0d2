"""The compilers that wheels are built with: zig's clang, told once which machine and which glibc to build for.

Build systems want a program called ``cc``, so each tool becomes a small script. The target belongs into these scripts
and not into ``CFLAGS``: configure's probes must look at the headers of that glibc too, not at the host's.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

GLIBC = "2.28"
# The oldest processor of the architecture; everything faster is chosen at run time.
_BASELINE = {"x86_64": "x86_64", "aarch64": "generic"}


LICENCES = Path(__file__).with_name("licences")


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A library of the compiler itself, parts of which end up in what it links."""

    name: str
    version: str
    licence: str
    licence_file: Path


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """Programs as environment variables have them, what tells this toolchain from another one, its own libraries."""

    environment: dict[str, str]
    identity: str
    runtimes: tuple[Runtime, ...] = ()


def zig_program(python: str = sys.executable) -> Path:
    """The zig that is installed as the package ``ziglang`` of ``python``."""
    code = "import ziglang, os; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{python} has no package ziglang: pip install ziglang, or give --compiler system")
    return Path(result.stdout.strip())


def zig_toolchain(zig: Path, folder: Path, machine: str = platform.machine()) -> Toolchain:
    """Scripts for ``zig`` in ``folder``: ``cc``, ``c++``, ``ar`` and ``ranlib``."""
    if machine not in _BASELINE:
        sys.exit(f"no wheels for {machine}: wanted one of {', '.join(_BASELINE)}")
    folder.mkdir(parents=True, exist_ok=True)
    version = subprocess.run([str(zig), "version"], capture_output=True, text=True, check=True).stdout.strip()
    target = f"-target {machine}-linux-gnu.{GLIBC} -mcpu={_BASELINE[machine]} -fno-sanitize=undefined"
    quoted = shlex.quote(str(zig))
    first = f"#!/bin/sh\n# zig {version}\n"  # another zig makes other scripts: what ccache tells compilers apart by
    texts = {
        # Asked for its version alone, zig refuses the target with the glibc in it; OpenSSL chooses its assembly by it.
        tool: (
            f"{first}[ $# = 1 ] && case $1 in -v | --version | -dump*) "
            f'exec {quoted} {tool} "$@" ;; esac\nexec {quoted} {tool} {target} "$@"\n'
        )
        for tool in ("cc", "c++")
    }
    texts |= {tool: f'{first}exec {quoted} {tool} "$@"\n' for tool in ("ar", "ranlib")}
    for tool, text in texts.items():
        script = folder / tool
        if not script.exists() or script.read_text() != text:
            script.write_text(text)
            script.chmod(0o755)
    # Found by their plain names: OpenSSL keeps the command line of its compiler as a text.
    environment = {"CC": "cc", "CXX": "c++", "AR": "ar", "RANLIB": "ranlib"}
    environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment["ZIG_GLOBAL_CACHE_DIR"] = str(folder.parent / "zig-cache")
    environment["ZIG_LOCAL_CACHE_DIR"] = str(folder.parent / "zig-cache")
    runtimes = [
        Runtime(
            name, f"of zig {version}", "Apache-2.0 WITH LLVM-exception", zig.parent / "lib" / source / "LICENSE.TXT"
        )
        for name, source in (("libc++", "libcxx"), ("libc++abi", "libcxxabi"), ("libunwind", "libunwind"))
    ]
    runtimes.append(Runtime("compiler_rt", f"of zig {version}", "MIT", zig.parent / "LICENSE"))
    return Toolchain(environment, f"zig {version} {target}", tuple(runtimes))


def with_ccache(toolchain: Toolchain, folder: Path, trees: Path) -> Toolchain:
    """The same compiler for C++, whose object files ccache keeps; ``toolchain`` itself where there is no ccache.

    Args:
        toolchain: Of :func:`zig_toolchain`.
        folder: For the script that calls ccache, and for what it keeps.
        trees: Copies of the same sources lie below it; two that are compiled with the same options share object files.
    """
    ccache = shutil.which("ccache")
    if ccache is None:
        return toolchain
    scripts = folder / "bin"
    scripts.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which(toolchain.environment["CXX"], path=toolchain.environment["PATH"])
    script = scripts / toolchain.environment["CXX"]
    # A script and not CXX="ccache c++", whose first word alone old releases of setuptools link with.
    script.write_text(
        f'#!/bin/sh\n# {toolchain.identity}\nexec {shlex.quote(ccache)} {shlex.quote(str(compiler))} "$@"\n'
    )
    script.chmod(0o755)
    environment = {**toolchain.environment, "PATH": f"{scripts}{os.pathsep}{toolchain.environment['PATH']}"}
    # The compiler is a script with the release of zig in it: its content tells it from another one, its name nothing.
    environment |= {"CCACHE_COMPILERCHECK": "content", "CCACHE_COMPILERTYPE": "clang"}
    environment["TORCH_NO_COMPILER_WRAPPER"] = "1"  # torch 2.13 would call ccache around ccache
    environment |= {"CCACHE_DIR": str(folder), "CCACHE_BASEDIR": str(trees), "CCACHE_NOHASHDIR": "1"}
    return dataclasses.replace(toolchain, environment=environment)


def system_toolchain() -> Toolchain:
    """The compilers of ``CC``, ``CXX``, ``AR`` and ``RANLIB``, else those of the machine."""
    defaults = {"CC": "cc", "CXX": "c++", "AR": "ar", "RANLIB": "ranlib"}
    environment = {name: os.environ.get(name, default) for name, default in defaults.items()}
    version = subprocess.run([*shlex.split(environment["CC"]), "--version"], capture_output=True, text=True, check=True)
    licence, text = "GPL-3.0-or-later WITH GCC-exception-3.1", LICENCES / "compiler" / "libstdc++.txt"
    release = subprocess.run(
        [*shlex.split(environment["CXX"]), "-dumpversion"], capture_output=True, text=True, check=True
    )
    runtime = Runtime("libstdc++", f"of the compiler {release.stdout.strip()}", licence, text)
    return Toolchain(environment, version.stdout.splitlines()[0], (runtime,))

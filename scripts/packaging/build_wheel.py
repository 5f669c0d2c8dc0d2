#!/usr/bin/env python3
"""Builds the wheel of each Python that is named, as cibuildwheel does in its container (pyproject.toml).

    build_wheel.py [--machine NAME ...] [--out DIR] [--cache DIR] [--jobs N] PYTHON ...

The Python that runs this has the packages of requirements/packaging.txt; each PYTHON has torch, setuptools, wheel and
ninja. What git tracks or would track is copied and built. Tools, libraries and object files are kept in ``--cache``.

``--machine aarch64`` builds on x86-64 the wheels of the other processor, and the other way round. A PYTHON of this
machine then builds the wheel of its own version.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import finish_wheel
import zig
from build_deps import build_all

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str) -> str | None:
    """What git says of this repository; None where there is no git, or no repository.

    Raises:
        SystemExit: There is a repository, and git refuses it.
    """
    # A checkout may belong to another user than the one of a container.
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    if asked.returncode != 0 and (ROOT / ".git").exists():
        sys.exit(f"git {arguments[0]} in {ROOT}: {asked.stderr.strip()}")
    return asked.stdout if asked.returncode == 0 else None


def source_names() -> list[str]:
    """What the sources are: the files that git tracks or would track; without git, all but hidden and built ones."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listed is not None:
        return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [str(path) for path in paths if path.parts[0] not in ("build", "dist", "site") and path.parts[0][0] != "."]


def copy_sources(tree: Path, without: tuple[str, ...] = ()) -> Path:
    """The sources in ``tree``, which is made anew, but for names that begin with one of ``without``."""
    shutil.rmtree(tree, ignore_errors=True)
    for name in source_names():
        if not name.startswith(without):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
            (tree / name).chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)
    return tree


def commit_time() -> str:
    """Seconds since 1970: what every time in the wheel is set to."""
    return os.environ.get("SOURCE_DATE_EPOCH") or (git("log", "-1", "--format=%ct") or "").strip() or "315532800"


# What pyconfig.h defines for one processor and not for the other; no other header of Python differs between them.
DEFINED = {
    "HAVE_GCC_ASM_FOR_X64": "x86_64",
    "HAVE_GCC_ASM_FOR_X87": "x86_64",
    "_Py_HACL_CAN_COMPILE_VEC128": "x86_64",
    "_Py_HACL_CAN_COMPILE_VEC256": "x86_64",
    "HAVE_USABLE_WCHAR_T": "aarch64",
}


def for_machine(pyconfig: str, machine: str) -> str:
    """The text of pyconfig.h as it is on ``machine``."""
    for name, processor in DEFINED.items():
        line = f"#define {name} 1" if machine == processor else f"/* #undef {name} */"
        pyconfig = re.sub(rf"^(/\* #undef {name} \*/|#define {name} 1)$", line, pyconfig, flags=re.MULTILINE)
    return pyconfig


def write_headers(include: Path, multiarch: str, machine: str, folder: Path) -> Path:
    """The headers of a Python of this machine in ``folder``, as they are on ``machine``.

    Args:
        include: Where they are here.
        multiarch: Debian's Python keeps its pyconfig.h in a folder of this name beside ``include``.
    """
    shutil.copytree(include, folder)
    places = [include.parent / multiarch / include.name, include]
    text = next((place / "pyconfig.h").read_text() for place in places if (place / "pyconfig.h").is_file())
    (folder / "pyconfig.h").write_text(for_machine(text, machine))
    return folder


def environment_for(machine: str, python: str, tree: Path) -> dict[str, str]:
    """What makes ``python``, of this machine, build modules for the processor ``machine``."""
    code = "import sysconfig as s; print(s.get_paths()['include'], *s.get_config_vars('MULTIARCH', 'EXT_SUFFIX'))"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    include, multiarch, suffix = said.split()
    headers = write_headers(Path(include), multiarch, machine, tree / "headers")
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",  # what sysconfig then says
        "SETUPTOOLS_EXT_SUFFIX": suffix.replace(platform.machine(), machine),
        "CPPFLAGS": f"-I{headers}",
    }


def build(python: str, machine: str, tree: Path, prefix: Path, jobs: int) -> Path:
    """The wheel as setup.py makes it, not finished yet."""
    copy_sources(tree)
    unwanted = (
        "CFLAGS",
        "CPPFLAGS",
        "CXXFLAGS",
        "LDFLAGS",
        "PYTHONPATH",
        "TENSORIZER_WERROR",
        "TENSORIZER_DEPS_PREFIX",
    )
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"TENSORIZER_STATIC_DEPS": str(prefix), "TENSORIZER_DEBUG_FILES": str(tree / "debug")}
    environment |= {"PYTHONHASHSEED": "0", "LC_ALL": "C", "MAX_JOBS": str(jobs), "CCACHE_DIR": str(prefix / "ccache")}
    environment |= environment_for(machine, python, tree) if machine != platform.machine() else {}
    environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"  # where its ninja is
    # the same command as cibuildwheel's
    command = [python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", "dist", "."]
    subprocess.run([*command, "--quiet", "--disable-pip-version-check"], cwd=tree, env=environment, check=True)
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--machine", action="append", choices=zig.BASELINE, help="a processor; default: this machine's")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/packaging"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    cache = options.cache.resolve()
    os.environ["SOURCE_DATE_EPOCH"] = commit_time()
    for machine in options.machine or [platform.machine()]:
        prefix = cache / f"prefix-{machine}"
        build_all(prefix, machine, cache, options.jobs, check=False)
        for number, name in enumerate(options.pythons):
            python = os.path.abspath(shutil.which(name) or name)  # a link into an environment stays one
            wheel = build(python, machine, cache / "trees" / f"wheel-{number}", prefix, options.jobs)
            headers = finish_wheel.headers_of_torch(python)
            finish_wheel.finish(wheel, prefix, headers, options.out, forbidden=[str(ROOT), str(cache)])


if __name__ == "__main__":
    main()

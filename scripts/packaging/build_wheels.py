#!/usr/bin/env python3
"""Builds one wheel for each Python, from a clean copy of the sources.

    build_wheels.py --out DIR [--jobs N] [PYTHON ...] [--root SUITE ...]

Without a PYTHON, every supported one of this machine builds; one that cannot is named with the reason. A PYTHON that
lacks torch, setuptools, wheel or ninja gets an environment with them (the newest torch that it can run: the wheel then
works with all). With ``--root`` the Python of a release of Debian builds in that release (roots.py). Tools,
environments, libraries and object files are kept in ``.cache/packaging``, those of a root in ``.cache/roots``, so that
the next call is quick.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import compilers
from build_deps import build_all
from environments import OLDEST_TORCH, build_environment, lacks, pythons_here, version_of
from roots import SUITES, kept_folder, packages_of_builders, run_with_repository
from tools import install_tools

ROOT = Path(__file__).resolve().parents[2]


def source_names() -> list[str]:
    """What the sources are: the files that git tracks or would track; without git, all but hidden and built ones."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listed is not None:
        return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    built = ("build", "dist", "site", "wheels")
    return [str(path) for path in paths if not path.parts[0].startswith(".") and path.parts[0] not in built]


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


def copy_sources(tree: Path) -> None:
    """The sources in ``tree``; files that did not change keep their time, so that nothing is compiled twice."""
    names = set(source_names())
    for name in sorted(names):
        source, target = ROOT / name, tree / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
    for folder in (tree / "tensorizer", tree / "csrc"):
        for path in folder.rglob("*"):
            if path.is_file() and str(path.relative_to(tree)) not in names:
                path.unlink()
    shutil.rmtree(tree / "build" / "lib", ignore_errors=True)


def commit_time() -> str:
    """Seconds since 1970: what every time in the wheel is set to."""
    return os.environ.get("SOURCE_DATE_EPOCH") or (git("log", "-1", "--format=%ct") or "").strip() or "315532800"


def builder_of(version: str, python: str, cache: Path) -> tuple[str, str]:
    """A Python of that version that has what a build needs, else the reason why there is none.

    Returns:
        ``python`` itself or the one of an environment of it, and the reason; one of the two is empty.
    """
    if not lacks(python):
        return python, ""
    folder = cache / "pythons" / version
    why = build_environment(version, python, folder)
    return ("", why) if why else (str(folder / "bin" / "python"), "")


def builders_here(cache: Path) -> list[str]:
    """A Python of every supported version that can build here; prints which ones cannot, and why."""
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    here, builders = {**pythons_here(), running: sys.executable}, []
    for version in OLDEST_TORCH:
        builder, why = builder_of(version, here[version], cache) if version in here else ("", "not on this machine")
        if why:
            print(f"left out: Python {version}: {why}", flush=True)
        else:
            builders.append(builder)
    return builders


def named_builders(pythons: list[str], cache: Path) -> list[str]:
    """The same for those that were named: one that cannot build ends the program."""
    builders = []
    for name in pythons:
        python = str(Path(shutil.which(name) or name).absolute())
        version = version_of(python)
        if version is None:
            sys.exit(f"{name} does not run")
        if version not in OLDEST_TORCH:
            sys.exit(f"{name}: Python {version}: wanted one of {', '.join(OLDEST_TORCH)}")
        builder, why = builder_of(version, python, cache)
        if why:
            sys.exit(f"{name}: {why}")
        builders.append(builder)
    return builders


def build_in_root(suite: str, options: argparse.Namespace) -> None:
    """This script once more, with the Python of a release of Debian and the libraries that are built already."""
    kept = kept_folder(suite)
    cache, out = kept / "packaging", kept / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    prefix = options.cache / "prefix"
    if prefix.is_dir() and not (cache / "prefix").exists():
        shutil.copytree(prefix, cache / "prefix")
    command = ["python3", "scripts/packaging/build_wheels.py", "--cache", str(cache), "--out", str(out)]
    command += ["--jobs", str(options.jobs), "python3"]
    status = run_with_repository(suite, packages_of_builders(), command)
    if status is None:
        sys.exit(f"no Debian {suite} could be made")
    if status != 0:
        sys.exit(f"Debian {suite}: the build ended with {status}")
    shutil.copytree(out, options.out, dirs_exist_ok=True)


def headers_of_machine(python: str, folder: Path) -> list[str]:
    """Flags for a Python of Debian, none for others.

    Its pyconfig.h includes another one, as ``<x86_64-linux-gnu/python3.11/pyconfig.h>`` of /usr/include. ``folder``
    gets a link to that one alone: the compiler of wheels must see no other header of this machine.
    """
    code = "import sysconfig as s; print(s.get_config_var('MULTIARCH') or 'none'); print(s.get_paths()['include'])"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    machine, text = asked.stdout.splitlines()
    include = Path(text)
    headers = include.parent / machine / include.name
    shutil.rmtree(folder, ignore_errors=True)
    if not (headers / "pyconfig.h").is_file():
        return []
    (folder / machine).mkdir(parents=True)
    (folder / machine / include.name).symlink_to(headers)
    return [f"-I{folder}"]


def headers_of_torch(python: str) -> str:
    """The folder with the headers of pybind11 and DLPack that an extension of ``python``'s torch is compiled with."""
    code = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('torch').origin).parent / 'include')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def build_one(python: str, tree: Path, prefix: Path, toolchain: compilers.Toolchain, jobs: int) -> Path:
    """The wheel as setup.py makes it, not finished yet."""
    copy_sources(tree)
    environment = {**os.environ, **toolchain.environment, "TENSORIZER_STATIC_DEPS": str(prefix)}
    environment |= {"TENSORIZER_DEBUG_FILES": str(tree / "debug"), "MAX_JOBS": str(jobs), "PYTHONHASHSEED": "0"}
    environment["PATH"] += f"{os.pathsep}{Path(python).parent}"  # where its ninja is
    environment |= {"SOURCE_DATE_EPOCH": commit_time(), "TORCH_DONT_CHECK_COMPILER_ABI": "1", "LC_ALL": "C"}
    # An interpreter that was built with shared libraries of its own adds their folder to what it links.
    environment |= {"LDSHARED": f"{environment['CC']} -shared", "LDCXXSHARED": f"{environment['CXX']} -shared"}
    environment["CPPFLAGS"] = " ".join(headers_of_machine(python, tree / "build" / "headers"))
    for name in ("TENSORIZER_WERROR", "TENSORIZER_DEPS_PREFIX", "TENSORIZER_SANITIZE", "CFLAGS", "CXXFLAGS", "LDFLAGS"):
        environment.pop(name, None)
    shutil.rmtree(tree / "dist", ignore_errors=True)
    log = tree.with_suffix(".log")
    with log.open("w") as file:
        command = [python, "setup.py", "bdist_wheel", "--dist-dir", "dist"]
        result = subprocess.run(command, cwd=tree, env=environment, stdout=file, stderr=file, check=False)
    if result.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        sys.exit(f"{tail}\n{log}: the build ended with {result.returncode}")
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


def build_here(options: argparse.Namespace) -> None:
    """Tools and libraries, then a wheel for each Python that was named, or that is here."""
    cache, out = options.cache, options.out
    builders = named_builders(options.pythons, cache) if options.pythons else builders_here(cache)
    tools = install_tools(cache / "tools")
    toolchain = compilers.zig_toolchain(compilers.zig_program(str(tools)), cache / "toolchain")
    prefix = cache / "prefix"
    build_all(prefix, cache, toolchain, options.jobs, check=False)
    cached = compilers.with_ccache(toolchain, cache / "ccache", cache / "trees")
    scripts = Path(__file__).parent
    for python in builders:
        name = f"cp{version_of(python).replace('.', '')}"
        built = build_one(python, cache / "trees" / name, prefix, cached, options.jobs)
        finish = [str(tools), str(scripts / "finish_wheel.py"), str(built), "--prefix", str(prefix)]
        finish += ["--headers", headers_of_torch(python), "--out", str(out)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": commit_time()}
        done = subprocess.run(finish, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        check = [sys.executable, str(scripts / "check_wheel.py"), "--forbid", str(ROOT), str(cache), "--", done]
        subprocess.run(check, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--root", nargs="+", default=[], choices=SUITES.values(), help="releases of Debian")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/packaging"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    options.cache, options.out = options.cache.resolve(), options.out.resolve()
    for suite in options.root:
        build_in_root(suite, options)
    if options.pythons or not options.root:
        build_here(options)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Builds one wheel for each Python, from a clean copy of the sources.

    build_wheels.py --out DIR [--jobs N] [PYTHON ...]

Each PYTHON has torch, setuptools, wheel and ninja installed (the newest torch that it can run: the wheel then works
with all). Without one, every supported Python of this machine gets an environment with them; one that cannot is named
with the reason. Tools, environments, libraries and object files are kept in ``.cache/packaging``, so that the next
call is quick.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import compilers
from build_deps import build_all
from environments import BUILD_PACKAGES, OLDEST_TORCH, build_environment, lacks, pythons_here, version_of
from lock import LOCK_FILE, read_tools

ROOT = Path(__file__).resolve().parents[2]


def install_tools(folder: Path) -> Path:
    """A Python that has the tools of the lock file, each proved by its hash."""
    python = folder / "bin" / "python"
    wanted = hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{tool.requirement}\n" for tool in read_tools()))
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    subprocess.run([str(python), "-m", "pip", "install", *options, "-r", str(requirements)], check=True)
    stamp.write_text(wanted)
    return python


def source_names() -> list[str]:
    """What the sources are: the files that git tracks or would track; without git, all that a sdist unpacked to."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(git, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]


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
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return os.environ.get("SOURCE_DATE_EPOCH") or result.stdout.strip() or "315532800"


def builders_here(cache: Path) -> list[str]:
    """A Python of every supported version that can build here; prints which ones cannot, and why."""
    here, builders = pythons_here(), []
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for version in OLDEST_TORCH:
        folder = cache / "pythons" / version
        if version == running and not lacks(sys.executable):
            builders.append(sys.executable)
            continue
        why = build_environment(version, here[version], folder) if version in here else "not on this machine"
        if why:
            print(f"left out: Python {version}: {why}", flush=True)
        else:
            builders.append(str(folder / "bin" / "python"))
    return builders


def build_one(python: str, tree: Path, prefix: Path, toolchain: compilers.Toolchain, jobs: int) -> Path:
    """The wheel as setup.py makes it, not finished yet."""
    missing = lacks(python)
    if missing:
        sys.exit(f"{python} lacks {', '.join(missing)}: wanted a Python with {', '.join(BUILD_PACKAGES)} installed")
    copy_sources(tree)
    environment = {**os.environ, **toolchain.environment, "TENSORIZER_STATIC_DEPS": str(prefix)}
    environment |= {"TENSORIZER_DEBUG_FILES": str(tree / "debug"), "MAX_JOBS": str(jobs), "PYTHONHASHSEED": "0"}
    environment |= {"SOURCE_DATE_EPOCH": commit_time(), "TORCH_DONT_CHECK_COMPILER_ABI": "1", "LC_ALL": "C"}
    # An interpreter that was built with shared libraries of its own adds their folder to what it links.
    environment |= {"LDSHARED": f"{environment['CC']} -shared", "LDCXXSHARED": f"{environment['CXX']} -shared"}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/packaging"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    cache, out = options.cache.resolve(), options.out.resolve()
    tools = install_tools(cache / "tools")
    toolchain = compilers.zig_toolchain(compilers.zig_program(str(tools)), cache / "toolchain")
    prefix = cache / "prefix"
    build_all(prefix, cache, toolchain, options.jobs, check=False)
    cached = compilers.with_ccache(toolchain, cache / "ccache", cache / "trees")
    scripts = Path(__file__).parent
    for python in options.pythons or builders_here(cache):
        version = version_of(python)
        if version is None:
            sys.exit(f"{python} does not run")
        if version not in OLDEST_TORCH:
            sys.exit(f"{python}: Python {version}: wanted one of {', '.join(OLDEST_TORCH)}")
        name = f"cp{version.replace('.', '')}"
        built = build_one(str(Path(python).absolute()), cache / "trees" / name, prefix, cached, options.jobs)
        finish = [str(tools), str(scripts / "finish_wheel.py"), str(built), "--prefix", str(prefix), "--out", str(out)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": commit_time()}
        done = subprocess.run(finish, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        check = [sys.executable, str(scripts / "check_wheel.py"), "--forbid", str(ROOT), str(cache), "--", done]
        subprocess.run(check, check=True)


if __name__ == "__main__":
    main()

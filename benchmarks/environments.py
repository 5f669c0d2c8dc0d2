"""The virtual environments of contenders that cannot share the project's own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.contender import Contender

ROOT = Path(__file__).resolve().parent.parent


def torch_requirement() -> str:
    """The very build of torch that this environment has, so that all contenders run on one."""
    import torch

    return f"torch=={torch.__version__}"


def python_of(contender: Contender, folder: Path, given: dict[str, Path]) -> Path:
    """The interpreter that runs this contender; its environment is made on first use.

    Args:
        contender: Who.
        folder: Where environments are kept.
        given: Interpreters that the user named (``--env reference=/path/to/python``).

    Raises:
        subprocess.CalledProcessError: pip cannot install the contender (no network, no build for this Python).
        FileNotFoundError: It is a wheel, and there is none.
    """
    if contender.owner in given:
        return given[contender.owner]
    if contender.wheel:
        return python_with(newest_wheel(), folder)
    if not contender.packages:
        return Path(sys.executable)
    requirements = [torch_requirement(), *contender.packages]
    key = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:10]
    place = folder / f"venv-{contender.owner}-{key}"
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        print(f"installing {', '.join(contender.packages)} in an environment of its own", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "-qq", "install", "-c", ROOT / "requirements" / "constraints.txt", *requirements],
            check=True,
        )
        (place / "complete").touch()
    return python


def newest_wheel() -> Path:
    """The wheel of ``dist/`` that fits this Python.

    Raises:
        FileNotFoundError: There is none.
    """
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    found = sorted((ROOT / "dist").glob(f"tensorizer-*-{tag}-*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"no wheel for {tag} in {ROOT / 'dist'}: make wheels builds it")
    return found[-1]


def python_with(wheel: Path, folder: Path) -> Path:
    """The interpreter of an environment that has ``wheel``, and everything else from this one."""
    place = folder / f"venv-wheel-{hashlib.sha256(wheel.read_bytes()).hexdigest()[:10]}"
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        venv.create(place, with_pip=True, clear=True)
        install = [python, "-m", "pip", "-qq", "install", "--no-index", "--no-deps", wheel]
        subprocess.run(install, check=True)
        (site,) = place.glob("lib/python*/site-packages")
        # A folder of the path, whose own .pth files (this project's among them) are not read.
        (site / "lent.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
        (place / "complete").touch()
    return python


def compiled(name: str, folder: Path, *libraries: str) -> Path:
    """The program of ``benchmarks/<name>.cpp``; compiled anew when the source changes.

    Raises:
        subprocess.CalledProcessError: The compiler's words are on standard error.
    """
    source = (Path(__file__).parent / name).with_suffix(".cpp")
    program = folder / f"{source.stem}-{hashlib.sha256(source.read_bytes()).hexdigest()[:10]}"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++20", "-O3", "-march=native", "-pthread", *unpacked_libraries()]
        subprocess.run(["c++", *flags, source, *libraries, "-o", program], check=True)
    return program


def unpacked_libraries() -> list[str]:
    """Flags for libraries below ``TENSORIZER_DEPS_PREFIX`` (see ``setup.py``), on machines that lack them."""
    if not os.environ.get("TENSORIZER_DEPS_PREFIX"):
        return []
    prefix = Path(os.environ["TENSORIZER_DEPS_PREFIX"]).resolve()
    folders = [prefix / "lib", prefix / "lib64", *sorted((prefix / "lib").glob("*-linux-gnu"))]
    return [f"-I{prefix / 'include'}", *(f"-L{folder}" for folder in folders if folder.is_dir())]

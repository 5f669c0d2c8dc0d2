"""Wheels and tests for every supported Python: `make wheels`, `make wheel-test` and `make matrix` call this.

nox finds the Pythons of this machine and skips, with a line, those that are missing; `--download-python auto` fetches
them. Each session has a virtual environment of its own, which `-R` uses again.
"""

import platform
import re
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
sys.path.insert(0, str(ROOT / "scripts" / "packaging"))

nox.options.default_venv_backend = "venv"
nox.options.envdir = str(ROOT / ".nox")

PINNED = (REQUIREMENTS / "constraints.txt").read_text().strip().partition("==")[2]  # the torch of the developers
# From each Python to releases of torch: the first one, 2.1 or later, with wheels for it, two between, the newest one.
TORCH = {
    "3.9": ("2.1.0", "2.4.1", "2.6.0", "2.8.0"),
    "3.10": ("2.1.0", "2.4.1", "2.8.0", PINNED),
    "3.11": ("2.1.0", "2.4.1", "2.8.0", PINNED),
    "3.12": ("2.2.0", "2.4.1", "2.8.0", PINNED),
    "3.13": ("2.5.0", "2.6.0", "2.9.1", PINNED),
    "3.14": ("2.9.0", "2.10.0", "2.12.1", PINNED),
}
FOR_DEVELOPERS = [
    "ruff",
    "mypy",
    "codespell",
    "clang-format",
    "clang-tidy",
    "zizmor",
    "pre-commit",
    "build",
    "nox",
    "cibuildwheel",
]
# These want torch 2.6: beside torch 2.1 an older transformers breaks even tests that never import it.
WANT_LATER_TORCH = ["accelerate", "peft", "sentence-transformers", "lightning", "transformers", "diffusers"]
COMPILED_FOR_NUMPY_2 = ("numpy==", "scipy==", "scikit-learn==", "matplotlib==")
CERTIFICATES = ("-m", "slow or not slow", "tests/io/test_certificates.py")


def number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])


def build_requirements(torch: str) -> list[str]:
    """Up to torch 2.2 the builder of extensions needs an old setuptools, and torch numpy 1."""
    old = number(torch) < (2, 3)
    return ["setuptools>=64,<70" if old else "setuptools>=64", "wheel", "ninja", "numpy<2" if old else "numpy"]


def test_requirements(torch: str) -> list[str]:
    """What the tests need of requirements/dev.txt; tests of frameworks that are not there are skipped."""
    lines = [line.partition("#")[0].strip() for line in (REQUIREMENTS / "dev.txt").read_text().splitlines()]
    unwanted = [*FOR_DEVELOPERS, "cibuildwheel"] + (WANT_LATER_TORCH if number(torch) < (2, 6) else [])
    return [line for line in lines if line and re.split("[=><]", line)[0] not in unwanted]


def constraints(torch: str) -> list[str]:
    """The versions that the developers test with, and ``torch``, so that nothing brings along another one."""
    lines = (REQUIREMENTS / "constraints-dev.txt").read_text().splitlines()
    unwanted = COMPILED_FOR_NUMPY_2 if number(torch) < (2, 3) else ()
    return [*(line for line in lines if not line.startswith(unwanted)), f"torch=={torch}"]


def install_torch(session: nox.Session, torch: str) -> None:
    """A CPU build where one can be had, else the default one, which is several gigabytes."""
    try:
        session.run(str(ROOT / "scripts" / "install-torch.sh"), "python", f"torch=={torch}+cpu", external=True)
    except CommandFailed:
        session.install(f"torch=={torch}")


def install_all(session: nox.Session, torch: str) -> None:
    """``torch`` and what building and testing need beside it."""
    session.install(*build_requirements(torch))
    install_torch(session, torch)
    file = Path(session.create_tmp()) / "constraints.txt"
    file.write_text("\n".join(constraints(torch)) + "\n")
    session.install("--constraint", str(file), *test_requirements(torch))


def run_suite(session: nox.Session, *arguments: str) -> None:
    """The tests with the wheel that is installed: from a folder that has everything but the package."""
    from build_wheel import copy_sources

    tree = copy_sources(Path(session.create_tmp()) / "suite", without=("tensorizer/", "setup.py", "tests/repository/"))
    with session.chdir(tree):
        session.run("python", "-m", "pytest", "-q", "-n", "auto", "--dist", "loadgroup", *arguments)


@nox.session(python=list(TORCH))
def wheel(session: nox.Session) -> None:
    """Its wheel in dist/, built with the newest torch for its Python, for use with all (`-- --machine aarch64`)."""
    torch = TORCH[session.python][-1]
    session.install(*build_requirements(torch))
    install_torch(session, torch)
    tools = ROOT / ".cache" / "packaging" / "tools" / "bin" / "python"
    python = str(Path(session.bin) / "python")
    with session.chdir(ROOT):
        session.run(str(tools), "scripts/packaging/build_wheel.py", *session.posargs, python, external=True)


@nox.session(python=list(TORCH))
def wheel_test(session: nox.Session) -> None:
    """The wheel of dist/ in a clean environment; `-- --suite`: with all tests, not only those of certificates."""
    tag = f"cp{session.python.replace('.', '')}"
    wheels = sorted((ROOT / "dist").glob(f"tensorizer-*-{tag}-{tag}-*_{platform.machine()}.whl"))
    if not wheels:
        session.skip(f"no wheel of Python {session.python} in dist/")
    install_all(session, TORCH[session.python][-1])
    session.install("--no-deps", "--force-reinstall", str(wheels[-1]))
    session.run("python", str(ROOT / "scripts/packaging/smoke.py"), session.virtualenv.location)
    run_suite(session, *(("-m", "not slow") if session.posargs == ["--suite"] else CERTIFICATES))


def combinations() -> list[nox.param]:
    """Every Python with its releases of torch; `-t oldest`, `-t between` and `-t newest` choose among them."""
    return [
        nox.param(python, torch, id=f"{python}-{torch}", tags=[age])
        for python, releases in TORCH.items()
        for torch, age in zip(releases, ("oldest", "between", "between", "newest"))
    ]


@nox.session
@nox.parametrize("python,torch", combinations())
def matrix(session: nox.Session, torch: str) -> None:
    """The tests with one Python and one torch: of the sources, or with `-- --wheel` of the wheel in dist/."""
    install_all(session, torch)
    arguments = [argument for argument in session.posargs if argument != "--wheel"]
    if "--wheel" in session.posargs:
        # An environment that is used again may have another wheel of this version.
        again = ["--force-reinstall", "--no-deps", "--no-index", "--pre"]
        session.install(*again, "--find-links", str(ROOT / "dist"), "tensorizer")
        run_suite(session, "-m", "not slow", *arguments)
    else:
        session.install("--no-build-isolation", "--no-deps", "--editable", str(ROOT))
        tests = ["-q", "-m", "not slow", "-n", "auto", "--dist", "loadgroup"]
        with session.chdir(ROOT):
            session.run("python", "-m", "pytest", *tests, *arguments)

#!/usr/bin/env python3
"""Proves wheels: installs each in a clean virtual environment and in a bare Debian, and runs smoke.py there.

The tests of certificates run with each wheel too, slow ones included: files where other distributions have them, and
settings and libraries of the host that have to change nothing.

    wheel_test.py [--require-root] [--suite [--pytest ARGUMENTS]] WHEEL_OR_FOLDER ...

Each wheel runs with its own Python: the one that runs this program, another one of this machine, or that of a release
of Debian (roots.py). torch and the other packages that the wheel asks for are lent to the environments; the servers of
``tests/servers`` run beside them, with the Python of this program, which needs the packages of the tests. With
``--suite`` the tests of the repository run with the wheel of this Python too. What cannot be started is said in one
line.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional, Union

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from environments import pythons_here, user_environment  # noqa: E402
from roots import (  # noqa: E402
    SUITES,
    can_make_roots,
    debian_root,
    kept_folder,
    packages_of_builders,
    run_in_root,
    run_with_repository,
)
from servers.certificates import make_certificates  # noqa: E402
from servers.file_server import serve_folder  # noqa: E402
from servers.http_faults import FaultyServer  # noqa: E402
from servers.redis_server import RedisServer, redis_is_installed  # noqa: E402
from servers.s3_server import S3Server, s3_is_installed  # noqa: E402
from suite import run_suite  # noqa: E402

SMOKE = Path(__file__).with_name("smoke.py")
BARE = ("python3", "python3-venv")
THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"
# The tests of certificates, slow ones included, and what they need beside the wheel's own requirements.
CERTIFICATES = ("-m", "slow or not slow", "-rs", "tests/io/test_certificates.py")
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


class Lender(NamedTuple):
    """Where packages for a Python come from, and its interpreter: None where only a release of Debian has it."""

    interpreter: Optional[str]
    folders: Sequence[str]


def packages_here() -> list[str]:
    """Folders with torch and the other packages of this Python."""
    import torch

    return list(dict.fromkeys([sysconfig.get_paths()["purelib"], str(Path(torch.__file__).parents[1])]))


def version_of_wheel(wheel: Path) -> str:
    major, minor = re.search(r"-cp(3)(\d+)-", wheel.name).groups()
    return f"{major}.{minor}"


def requirements_of(wheel: Path) -> list[str]:
    """What ``wheel`` asks for beside torch and beside its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        wanted = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [line for line in wanted if "extra ==" not in line and not line.startswith("torch")]


def lender_for(wheel: Path, cache: Path) -> Union[Lender, str]:
    """Packages that ``wheel`` can borrow, or why there are none."""
    version = version_of_wheel(wheel)
    if version == THIS:
        return Lender(sys.executable, packages_here())
    interpreter = pythons_here().get(version)
    if interpreter is not None:
        folder = cache / "pythons" / version
        failed = user_environment(version, interpreter, folder, [*requirements_of(wheel), *TEST_PACKAGES])
    elif version in SUITES and can_make_roots():
        folder = kept_folder(SUITES[version]) / "packaging" / "pythons" / version
        command = ["python3", "scripts/packaging/environments.py", version, "python3", str(folder)]
        status = run_with_repository(SUITES[version], packages_of_builders(), [*command, *requirements_of(wheel)])
        failed = "" if status == 0 else f"Debian {SUITES[version]} could not install its packages"
    else:
        return f"no Python {version} on this machine" + (
            ", which could make no root of Debian for it (wants mmdebstrap and root)" if version in SUITES else ""
        )
    return failed or Lender(interpreter, [str(path) for path in folder.glob("lib/python*/site-packages")])


def make_environment(folder: Path, wheel: Path, lender: Lender) -> Path:
    """A Python that has ``wheel`` installed by pip, and borrows the rest."""
    subprocess.run([lender.interpreter, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text("".join(f"{path}\n" for path in lender.folders))
    return python


@contextlib.contextmanager
def servers(folder: Path, model: Path) -> Iterator[list[str]]:
    """Arguments for smoke.py with the addresses of servers that have ``model``."""
    arguments: list[str] = []
    content = model.read_bytes()
    with contextlib.ExitStack() as stack:
        (folder / "public").mkdir()
        shutil.copy(model, folder / "public" / "model.tensors")
        arguments += ["--http", stack.enter_context(serve_folder(folder / "public")) + "/model.tensors"]
        certificates = make_certificates(folder)
        authority = folder / "public" / "authority.pem"
        authority.write_bytes(certificates.authority.read_bytes())
        https = stack.enter_context(FaultyServer(content, tls=certificates.context()))
        arguments += ["--https", https.url]
        if redis_is_installed():
            for name, tls in (("redis", False), ("rediss", True)):
                redis = stack.enter_context(RedisServer(tls=tls))
                redis.client().set("model:0", content)
                arguments += [f"--{name}", redis.uri("model")]
                if redis.certificate:
                    authority.write_bytes(authority.read_bytes() + redis.certificate.read_bytes())
        else:
            print("skipped: redis (no redis-server)")
        if s3_is_installed():
            s3 = stack.enter_context(S3Server())
            s3.client().create_bucket(Bucket="models")
            arguments += ["--s3", s3.endpoint, "--s3-bucket", "models"]
            arguments += ["--s3-key", s3.access_key, "--s3-secret", s3.secret_key]
        else:
            print("skipped: s3 (no Swift)")
        yield [*arguments, "--authority", str(authority)]


def run_clean(python: Path, folder: Path, arguments: list[str]) -> None:
    inside = python.parents[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TENSORIZER_"))}
    command = [str(python), str(SMOKE), "--folder", str(folder), "--inside", str(inside), *arguments]
    subprocess.run(command, check=True, cwd=folder, env=environment)


# The root sees the lent packages and the folder of the test, nothing else of this machine; it stays as it was.
IN_BARE_ROOT = """python3 -m venv /environment
/environment/bin/pip install --quiet --disable-pip-version-check --no-index --no-deps "$1"
printf "%s\\n" "$PACKAGES" >"$(echo /environment/lib/python*/site-packages)/lent.pth"
folder=$2
shift 2
exec /environment/bin/python "$@" --folder "$folder" --inside /environment
"""


def run_in_bare_root(root: Path, wheel: Path, lender: Lender, folder: Path, arguments: list[str]) -> None:
    command = ["/bin/sh", "-ec", IN_BARE_ROOT, "sh", str(wheel), str(folder), str(SMOKE), *arguments]
    lent = [*lender.folders, SMOKE.parent, wheel.parent]
    packages = {"PACKAGES": "\n".join(lender.folders)}
    if run_in_root(root, command, lent=lent, shared=[folder], environment=packages) != 0:
        sys.exit(f"{wheel.name} failed in a bare Debian")


def prove(wheel: Path, options: argparse.Namespace) -> None:
    """Everything that is promised of ``wheel``, as far as this machine can try it.

    Raises:
        SystemExit: Something that was asked for failed, or cannot be tried here.
        subprocess.CalledProcessError: smoke.py failed.
    """
    lender = lender_for(wheel, options.cache)
    if isinstance(lender, str):
        print(f"skipped: {wheel.name}: {lender}", flush=True)
        return
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.chmod(0o755)  # a test changes its user and imports on
        places: dict[str, Callable[[list[str]], None]] = {}
        if lender.interpreter is not None:
            python = make_environment(folder / "environment", wheel, lender)
            places["a clean environment"] = functools.partial(run_clean, python, folder)
        suite = SUITES.get(version_of_wheel(wheel))
        root = debian_root(suite, BARE, options.cache) if suite else None
        if root is not None:
            places[f"a bare Debian {suite}"] = functools.partial(run_in_bare_root, root, wheel, lender, folder)
        elif options.require_root:
            sys.exit(f"{wheel.name}: no bare Debian with its Python could be made (wants mmdebstrap and root)")
        else:
            print(f"skipped: {wheel.name} in a bare Debian (wants mmdebstrap, root and a release with its Python)")
        next(iter(places.values()))([])  # writes the file that the servers have
        with servers(folder, folder / "model.tensors") as arguments:
            for place, run in places.items():
                print(f"== {wheel.name} in {place}", flush=True)
                run(arguments)
        if lender.interpreter is None:
            print(f"skipped: certificates of other systems with {wheel.name}: its Python is in a root alone")
        else:
            print(f"== certificates and settings of other systems with {wheel.name}", flush=True)
            if not run_suite(python, folder / "certificates", list(CERTIFICATES)):
                sys.exit(f"{wheel.name}: the tests of certificates failed")
        if options.suite and lender.interpreter != sys.executable:
            print(f"skipped: the tests with {wheel.name}: matrix.py --wheels runs them with other Pythons")
        elif options.suite:
            print(f"== the tests with {wheel.name}", flush=True)
            if not run_suite(python, folder / "suite", shlex.split(options.pytest)):
                sys.exit(f"{wheel.name}: the tests failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL_OR_FOLDER")
    parser.add_argument("--cache", type=Path, default=Path(".cache/packaging"))
    parser.add_argument("--require-root", action="store_true", help="fail where no bare Debian can be made")
    parser.add_argument("--suite", action="store_true", help="run the tests of the repository with the wheel as well")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="more arguments for the tests, in one text")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers end with this program
    for path in options.wheels:
        if not path.exists():
            sys.exit(f"wheel_test.py: no file or folder {path}")
    wheels = [w for path in options.wheels for w in (sorted(path.glob("*.whl")) if path.is_dir() else [path])]
    if not wheels:
        sys.exit(f"no wheel in {', '.join(map(str, options.wheels))}: make wheels builds them")
    options.cache = options.cache.resolve()
    for wheel in wheels:
        prove(wheel.resolve(), options)


if __name__ == "__main__":
    main()

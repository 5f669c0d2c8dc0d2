#!/usr/bin/env python3
"""Proves wheels: installs each in a clean virtual environment and in a bare Debian, and runs smoke.py there.

    wheel_test.py [--require-root] [--suite [--pytest ARGUMENTS]] WHEEL_OR_FOLDER ...

Run with a Python that has what the tests need: its torch and other packages are lent to the environments, and the
servers of ``tests/servers`` run beside them. With ``--suite`` the tests of the repository run with the wheel too. What
cannot be started is said in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from roots import debian_root, run_in_root  # noqa: E402
from servers.certificates import make_certificates  # noqa: E402
from servers.file_server import serve_folder  # noqa: E402
from servers.http_faults import FaultyServer  # noqa: E402
from servers.redis_server import RedisServer, redis_is_installed  # noqa: E402
from servers.s3_server import S3Server, s3_is_installed  # noqa: E402
from suite import run_suite  # noqa: E402

SMOKE = Path(__file__).with_name("smoke.py")
BARE = ("python3", "python3-venv")


def lent_packages() -> list[str]:
    """Folders with torch and the other packages that tensorizer needs, for a .pth file."""
    import torch

    return list(dict.fromkeys([sysconfig.get_paths()["purelib"], str(Path(torch.__file__).parents[1])]))


def make_environment(folder: Path, wheel: Path) -> Path:
    """A Python that has ``wheel`` installed by pip, and borrows the rest."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text("".join(f"{path}\n" for path in lent_packages()))
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


# The root sees this machine's packages and the folder of the test, nothing else; it stays as it was.
IN_BARE_ROOT = """python3 -m venv /environment
/environment/bin/pip install --quiet --no-index --no-deps "$1"
printf "%s\\n" "$PACKAGES" >"$(echo /environment/lib/python*/site-packages)/lent.pth"
mkdir /result
shift
exec /environment/bin/python "$@" --folder /result --inside /environment
"""


def run_in_bare_root(root: Path, wheel: Path, folder: Path, arguments: list[str]) -> None:
    packages = lent_packages()
    command = ["/bin/sh", "-ec", IN_BARE_ROOT, "sh", str(wheel), str(SMOKE), *arguments]
    lent = [*packages, SMOKE.parent, folder / "public", wheel.parent]
    if run_in_root(root, command, lent=lent, environment={"PACKAGES": "\n".join(packages)}) != 0:
        sys.exit(f"{wheel.name} failed in a bare Debian")


def write_model(python: Path, folder: Path) -> Path:
    """The file that the servers have: made by the wheel itself."""
    run_clean(python, folder, [])
    return folder / "model.tensors"


def fits_this_python(wheel: Path) -> bool:
    return f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in wheel.name


def prove(wheel: Path, options: argparse.Namespace) -> None:
    """Everything that is promised of ``wheel``, as far as this machine can try it.

    Raises:
        SystemExit: Something that was asked for failed, or cannot be tried here.
        subprocess.CalledProcessError: smoke.py failed.
    """
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        folder.chmod(0o755)  # a test changes its user and imports on
        python = make_environment(folder / "environment", wheel)
        model = write_model(python, folder)
        with servers(folder, model) as arguments:
            print(f"== {wheel.name} in a clean environment", flush=True)
            run_clean(python, folder, arguments)
            root = debian_root("bookworm", BARE, options.cache.resolve()) if sys.version_info[:2] == (3, 11) else None
            if root is not None:
                print(f"== {wheel.name} in a bare Debian 12", flush=True)
                run_in_bare_root(root, wheel, folder, arguments)
            elif options.require_root:
                sys.exit("no bare Debian could be made (mmdebstrap, root, Python 3.11)")
            else:
                print("skipped: a bare Debian (wants mmdebstrap, root and Python 3.11)")
        if options.suite:
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
    wheels = [w for path in options.wheels for w in (sorted(path.glob("*.whl")) if path.is_dir() else [path])]
    fitting = [wheel.resolve() for wheel in wheels if fits_this_python(wheel)]
    if not fitting:
        sys.exit(f"no wheel for Python {platform.python_version()} among {[wheel.name for wheel in wheels]}")
    for wheel in fitting:
        prove(wheel, options)


if __name__ == "__main__":
    main()

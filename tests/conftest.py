"""Fixtures for all tests: devices, reference releases, fresh processes, and checks that nothing is left behind."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from servers import missing_servers, needs
from servers.s3_server import S3Server, s3_is_installed

REFERENCE_RELEASES = ("2.10.1", "2.11.1", "2.12.1")
# Every run reads golden files of all releases. Only the nightly run starts the earlier ones, too.
SAMPLED_RELEASES = [*(pytest.param(r, marks=pytest.mark.slow) for r in REFERENCE_RELEASES[:-1]), REFERENCE_RELEASES[-1]]


def pytest_collection_modifyitems(items):
    for item in items:
        if "s3_server" in item.fixturenames and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("every source"))  # which starts the server anyway
    if torch.cuda.is_available() or os.environ.get("TENSORIZER_REQUIRE_GPU") == "1":
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _gpu_is_there_when_promised(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.fail("TENSORIZER_REQUIRE_GPU=1, but there is no CUDA device")


def open_descriptors() -> set:
    """Descriptors of this process with their targets; empty if /proc is missing."""
    folder = Path("/proc/self/fd")
    names = os.listdir(folder) if folder.is_dir() else []  # the listing's own descriptor is among them
    return {(name, os.readlink(folder / name)) for name in names if os.path.lexists(folder / name)}


def tcp_sockets() -> set[str]:
    """The targets of descriptors of TCP sockets. Threads of the extension have other sockets, which wake them."""
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {f"socket:[{line.split()[9]}]" for line in lines}


def thread_count() -> int:
    """The number of threads of this process, including native ones."""
    folder = Path("/proc/self/task")
    return len(list(folder.iterdir())) if folder.is_dir() else threading.active_count()


def threads_end(most: int) -> bool:
    """Waits until at most so many threads are left, because idle threads of the extension end soon."""
    deadline = time.monotonic() + 30
    while thread_count() > most and time.monotonic() < deadline:
        time.sleep(0.02)
    return thread_count() <= most


@pytest.fixture
def leaves_no_descriptors():
    before = open_descriptors()

    def left() -> list:
        found = [item for item in open_descriptors() - before if "/proc/" not in item[1]]
        # What libcurl wakes its threads with: a pair of sockets, or an eventfd since 8.8.
        found = [item for item in found if item[1] != "anon_inode:[eventfd]"]
        return sorted(item for item in found if not item[1].startswith("socket:") or item[1] in tcp_sockets())

    yield
    deadline = time.monotonic() + 5  # idle connections end a fraction of a second after their source
    while left() and time.monotonic() < deadline:
        gc.collect()  # exceptions hold frames, and frames hold sources
        time.sleep(0.01)
    assert not left(), "descriptors left open"


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def eager_and_lazy(request, monkeypatch):
    """Runs a test once with each default of ``lazy_load``."""
    from tensorizer import TensorDeserializer

    monkeypatch.setitem(TensorDeserializer.__init__.__kwdefaults__, "lazy_load", request.param)


def _reference_folder(config, release: str) -> Path:
    named = os.environ.get("TENSORIZER_REFERENCE_VENVS")
    if named:
        return Path(named.format(release=release)) if "{release}" in named else Path(named) / release
    return Path(config.cache.mkdir("reference-venvs")) / release


def _release_of(python: Path) -> str:
    program = "import tensorizer; print(tensorizer.__version__)"
    result = subprocess.run([str(python), "-I", "-c", program], capture_output=True, text=True, check=False)
    return result.stdout.strip()


# The packages that a release imports, each with the module that shows whether the running interpreter has it.
REFERENCE_NEEDS = {
    "protobuf": "google.protobuf",
    "psutil": "psutil",
    "boto3": "boto3",
    "redis": "redis",
    "hiredis": "hiredis",
    "libnacl": "libnacl",
}


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not
        return False


def _make_reference_venv(folder: Path, release: str) -> None:
    """Makes a virtual environment with one release of the reference and the other packages of this interpreter."""
    make = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]
    subprocess.run(make, check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    pip += ["--no-compile", "--target", str(site)]
    subprocess.run([*pip, "--no-deps", f"tensorizer=={release}"], check=True, capture_output=True, timeout=300)
    missing = [requirement for requirement, module in REFERENCE_NEEDS.items() if not _is_here(module)]
    if missing:
        subprocess.run([*pip, *missing], check=True, capture_output=True, timeout=300)
    folders = {str(Path(torch.__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))}
    (site / "zz_borrowed.pth").write_text("".join(f"{path}\n" for path in sorted(folders)))


@pytest.fixture(scope="session")
def reference_python(request):
    """Returns the interpreter that runs a release. Skips the test, with the reason, if there is none.

    ``TENSORIZER_REFERENCE_VENVS`` names a folder with one virtual environment per release, or a pattern with
    ``{release}`` in it. Without it, they are made in pytest's cache folder, once.
    """
    known = {}

    def find(release: str) -> Path:
        if release not in known:
            known[release] = _find_reference(request.config, release)
        if isinstance(known[release], str):
            pytest.skip(known[release])
        return known[release]

    return find


def _find_reference(config, release: str):
    if not os.environ.get("TENSORIZER_REFERENCE_VENVS") and not hasattr(config, "cache"):
        return "pytest runs without its cache, so there is no place for virtual environments"
    folder = _reference_folder(config, release)
    python = folder / "bin" / "python"
    if python.exists() and _release_of(python) == release:
        return python
    if os.environ.get("TENSORIZER_REFERENCE_VENVS"):
        return f"TENSORIZER_REFERENCE_VENVS has no tensorizer {release} in {folder}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at the same time
        if not (python.exists() and _release_of(python) == release):
            try:
                _make_reference_venv(folder, release)
            except (subprocess.SubprocessError, OSError) as error:
                return f"tensorizer {release} cannot be installed: {error}"
        if _release_of(python) != release:
            return f"tensorizer {release} was installed and does not run"
    return python


@pytest.fixture(scope="session")
def package_folder(request):
    """Returns a folder for ``PYTHONPATH`` with the required packages; with their dependencies only if `complete`.

    The folders are made in pytest's cache, once. Skips the test, with the reason, if that fails.
    """

    def find(name: str, *requirements: str, complete: bool = False) -> Path:
        if not hasattr(request.config, "cache"):
            pytest.skip("pytest runs without its cache, so there is no place for packages")
        folder = Path(request.config.cache.mkdir("packages")) / name
        done = folder / ".done"
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                pip = [
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                    "--retries",
                    "1",
                ]
                alone = [] if complete else ["--no-deps"]
                arguments = [*pip, "--no-compile", *alone, "--upgrade", "--target", str(folder), *requirements]
                try:
                    subprocess.run(arguments, check=True, capture_output=True, timeout=280)
                except (subprocess.SubprocessError, OSError) as error:
                    pytest.skip(f"{' '.join(requirements)} cannot be installed: {error}")
                done.touch()
        return folder

    return find


def pytest_configure(config):
    missing = missing_servers()
    if missing and os.environ.get("TENSORIZER_REQUIRE_SERVERS") == "1":
        raise pytest.UsageError(f"TENSORIZER_REQUIRE_SERVERS=1, but not installed: {', '.join(missing)}")
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers fill the cores: further threads would wait in loops
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # If a shell starts this in the background, this process and its children ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # fixtures end their servers then
    config.addinivalue_line("markers", "xdist_group(name): tests that one worker of pytest-xdist runs, if it is there")
    # torch warns, once per process, when a complex32 tensor is made
    config.addinivalue_line("filterwarnings", "ignore:ComplexHalf support is experimental:UserWarning")
    # torch 2.4 and 2.5 warn at every torch.load
    config.addinivalue_line("filterwarnings", "ignore:You are using `torch.load` with:FutureWarning")


def _failure_of_torch_save() -> str:
    """The error of torch.save for any tensor, without this package; empty if it works."""
    try:
        torch.save(torch.zeros(1), io.BytesIO())
    except AttributeError as error:  # torch 2.5.0 with Python 3.13.0
        return str(error)
    return ""


_TORCH_SAVE_FAILS = _failure_of_torch_save()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    error = call.excinfo.value if call.excinfo is not None else None
    # Children and checkpoints of torch quote it.
    if _TORCH_SAVE_FAILS and report.failed and _TORCH_SAVE_FAILS in str(error):
        reason = f"torch.save itself fails with this Python: {_TORCH_SAVE_FAILS}"
        report.outcome, report.longrepr = "skipped", (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {reason}")


_SUMMED_UP = frozenset(f"Skipped: {needs(name)}" for name in missing_servers())


def pytest_report_teststatus(report):
    """Puts tests of a missing server into a category that the summary does not list one by one."""
    if report.skipped and isinstance(report.longrepr, tuple) and report.longrepr[2] in _SUMMED_UP:
        return "left out", "s", "SKIPPED"
    return None


def pytest_terminal_summary(terminalreporter):
    for name in missing_servers():
        terminalreporter.write_line(f"left out: tests with {name} (not installed)")


@pytest.fixture(scope="session")
def s3_server():
    """A real object store, which starts once per process of tests. Each test file has its own bucket in it."""
    pytest.importorskip("boto3")
    if not s3_is_installed():
        pytest.skip(needs("OpenStack Swift"))
    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def fork_server():
    """Starts programs in processes of their own, in which torch and tensorizer are imported."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def fresh_process(fork_server):
    """Runs a program in such a process: ``run(program, *argv)``."""
    return fork_server.run

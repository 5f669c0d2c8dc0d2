"""The build: what the compiled module links, what a missing library says, and every way of installing."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

import tensorizer._C

MODULE = Path(tensorizer._C.__file__)
(VERSION,) = re.findall(r'"(.+)"', (ROOT / "tensorizer" / "_version.py").read_text())


def readelf(*options: str) -> str:
    return subprocess.run(
        ["readelf", "--wide", *options, str(MODULE)], capture_output=True, text=True, check=True
    ).stdout


def dynamic_symbols() -> Iterator[tuple[str, bool]]:
    """(name, defined) of every dynamic symbol of the compiled module."""
    for line in readelf("--dyn-syms").splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            yield fields[7].split("@")[0], fields[6] != "UND"


class TestDynamicSection:
    def test_it_needs_neither_libtorch_nor_libpython(self) -> None:
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic"))
        assert any(name.startswith("libstdc++") for name in needed), "the parser found no dependency at all"
        assert [name for name in needed if re.match(r"lib(torch|c10|python|cuda|nv)", name)] == []

    def test_it_refers_to_no_symbol_of_torch(self) -> None:
        undefined = [name for name, defined in dynamic_symbols() if not defined]
        assert "PyErr_CheckSignals" in undefined, "the parser found no symbol of Python"
        assert [name for name in undefined if re.match(r"_ZNK?(2at|3c10|5torch)|THP|aoti_|cu(da)?[A-Z]", name)] == []

    def test_it_exports_its_init_function_and_nothing_else_of_ours(self) -> None:
        exported = [name for name, defined in dynamic_symbols() if defined]
        assert "PyInit__C" in exported
        assert [name for name in exported if "tensorizer" in name or "pybind11" in name] == []

    def test_it_is_hardened(self) -> None:
        dynamic, segments = readelf("--dynamic"), readelf("--program-headers")
        assert "BIND_NOW" in dynamic
        assert "GNU_RELRO" in segments
        stack = next(line for line in segments.splitlines() if "GNU_STACK" in line)
        assert "RWE" not in stack


FOREIGN = ("TENSORIZER_DEPS_PREFIX", "TENSORIZER_STATIC_DEPS", "CXX")


def run_setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def compiler_without(header: str, folder: Path) -> str:
    """A compiler that behaves like the real one except that it cannot find ``header``."""
    script = folder / "compiler"
    script.write_text(
        "#!/bin/sh\nsource=$(cat)\n"
        f'case "$source" in *"<{header}>"*) echo "fatal error: {header}: No such file" >&2; exit 1 ;; esac\n'
        'printf "%s\\n" "$source" | c++ "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


class TestMissingLibraries:
    @pytest.mark.parametrize(
        ("header", "debian", "fedora"),
        [
            ("sodium.h", "libsodium-dev", "libsodium-devel"),
            ("curl/curl.h", "libcurl4-openssl-dev", "libcurl-devel"),
            ("isa-l.h", "libisal-dev", "isa-l-devel"),
        ],
    )
    def test_one_missing_library_ends_the_build_with_one_line_that_names_its_packages(
        self, tmp_path: Path, header: str, debian: str, fedora: str
    ) -> None:
        result = run_setup("--version", CXX=compiler_without(header, tmp_path))
        assert result.returncode != 0
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert f"'apt-get install {debian}'" in result.stderr
        assert f"'dnf install {fedora}'" in result.stderr
        assert "TENSORIZER_DEPS_PREFIX" in result.stderr

    def test_all_missing_libraries_are_named_at_once(self) -> None:
        result = run_setup("--version", CXX="c++ -nostdinc")
        assert result.returncode != 0
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        for package in ("libcurl4-openssl-dev", "libsodium-dev", "libssl-dev", "libhiredis-dev", "libisal-dev"):
            assert package in result.stderr

    def test_no_compiler_or_an_old_one_ends_the_build_with_one_line_that_names_packages(self, tmp_path: Path) -> None:
        old, locked = tmp_path / "old", tmp_path / "locked"
        old.write_text("#!/bin/sh\necho \"c++: error: unrecognized command line option '-std=c++20'\" >&2\nexit 1\n")
        old.chmod(0o755)
        locked.touch(0o644)
        found = {
            str(tmp_path / "none"): "No such file or directory",
            str(locked): "Permission denied",
            str(old): "unrecognized command line option",
        }
        for compiler, reason in found.items():
            result = run_setup("--version", CXX=compiler)
            assert result.returncode != 0
            (line,) = result.stderr.strip().splitlines()
            assert line.startswith("tensorizer: an up-to-date pip (20.3 or later")
            assert "needs a compiler of C++20" in line
            assert "'apt-get install g++' or 'dnf install gcc-c++'" in line
            assert compiler in line
            assert reason in line

    def test_an_environment_without_torch_ends_the_build_with_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "torch").mkdir()  # an empty package in place of torch
        (tmp_path / "torch" / "__init__.py").touch()
        result = run_setup("--version", PYTHONPATH=str(tmp_path))
        assert result.returncode != 0
        (line,) = result.stderr.strip().splitlines()
        assert "needs the Python package torch" in line
        assert "--no-build-isolation" in line

    def test_a_prefix_that_is_not_there_is_no_reason_to_take_the_system(self, tmp_path: Path) -> None:
        for prefix in (tmp_path, tmp_path / "none"):
            result = run_setup("--version", TENSORIZER_DEPS_PREFIX=str(prefix))
            assert result.returncode != 0
            (line,) = result.stderr.strip().splitlines()
            assert f"TENSORIZER_DEPS_PREFIX: no folders include/ and lib/ in {prefix}" in line

    def test_a_prefix_stands_in_for_packages_of_the_system(self, tmp_path: Path) -> None:
        (tmp_path / "lib").mkdir()
        for header in ("curl/curl.h", "sodium.h", "openssl/evp.h", "openssl/ssl.h", "hiredis/hiredis.h", "isa-l.h"):
            path = tmp_path / "include" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        result = run_setup("--version", CXX="c++ -nostdinc", TENSORIZER_DEPS_PREFIX=str(tmp_path))
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == VERSION

    def test_the_missing_library_message_begins_with_the_way_that_needs_none(self) -> None:
        message = run_setup("--version", CXX="c++ -nostdinc").stderr
        assert message.startswith("tensorizer: an up-to-date pip (20.3 or later")

    def test_a_missing_static_archive_is_named_and_no_shared_library_taken_for_it(self, tmp_path: Path) -> None:
        (tmp_path / "lib").mkdir()
        for name in ("curl", "nghttp2", "ssl", "crypto", "hiredis", "isal"):
            (tmp_path / "lib" / f"lib{name}.a").touch()
        result = run_setup("--version", TENSORIZER_STATIC_DEPS=str(tmp_path))
        assert result.returncode != 0
        (line,) = result.stderr.strip().splitlines()
        assert f"no libsodium.a in {tmp_path / 'lib'} (TENSORIZER_STATIC_DEPS)" in line
        (tmp_path / "lib" / "libsodium.a").touch()
        assert run_setup("--version", TENSORIZER_STATIC_DEPS=str(tmp_path)).returncode == 0


class TestOldLibcurl:
    def test_one_that_is_too_old_ends_the_build_with_one_line_that_says_so(self, tmp_path: Path) -> None:
        header = tmp_path / "include" / "curl" / "curl.h"
        header.parent.mkdir(parents=True)
        header.write_text('#define LIBCURL_VERSION "7.64.0"\n#define LIBCURL_VERSION_NUM 0x074000\n')
        result = run_setup("--version", CXX=f"c++ -I{header.parent.parent}")
        assert result.returncode != 0
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert "libcurl 7.64.0 is too old: 7.68" in result.stderr

    @pytest.mark.slow
    def test_the_sources_use_nothing_that_is_newer_than_the_oldest_one(self) -> None:
        script = ROOT / "scripts" / "old_curl_check.sh"
        done = subprocess.run([str(script)], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr

    def test_a_name_that_came_later_is_noticed(self, tmp_path: Path) -> None:
        """The check above could not fail if its list named nothing that the installed headers have."""
        names = (ROOT / "scripts" / "curl-names-after-7.68.txt").read_text().split("\n")[1:]
        guarded = [path.read_text() for path in (ROOT / "csrc" / "io" / "curl").glob("*.cpp")]
        assert "CURLOPT_PROTOCOLS_STR" in names
        assert any("CURLOPT_PROTOCOLS_STR" in text for text in guarded)


class Sandbox:
    """A virtual environment that sees the packages around this test (torch, setuptools) but no tensorizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        self.site = site

    def run(self, *arguments: str, cwd: Path) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result.stdout.strip()

    def install(self, *what: str, cwd: Path) -> None:
        options = ["--no-build-isolation", "--no-deps", "--no-index", "--force-reinstall", "--quiet"]
        self.run("-m", "pip", "install", *options, *what, cwd=cwd)

    def imported_from(self) -> Path:
        code = (
            "import importlib.metadata, tensorizer._C, tensorizer._version;"
            "assert importlib.metadata.version('tensorizer') == tensorizer._version.__version__;"
            "print(tensorizer._version.__version__); print(tensorizer._C.__file__)"
        )
        version, module = self.run("-c", code, cwd=self.folder).splitlines()
        assert version == VERSION
        return Path(module)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    """One environment for all installs, each replacing the one before, so that a compiler cache can help."""
    return Sandbox(tmp_path_factory.mktemp("sandbox") / "venv")


@pytest.fixture(scope="module")
def archive(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made from a copy of the sources as a user's checkout has them."""
    folder = tmp_path_factory.mktemp("checkout")
    hidden = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "out", "site")
    shutil.copytree(ROOT, folder / "tree", ignore=hidden)
    sandbox.run("setup.py", "-q", "sdist", "--dist-dir", str(folder), cwd=folder / "tree")
    (archive,) = folder.glob("tensorizer-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def unpacked(archive: Path) -> Path:
    """What somebody has who downloaded and unpacked the source distribution."""
    with tarfile.open(archive) as content:
        content.extractall(archive.parent / "unpacked", filter="data")
    (tree,) = (archive.parent / "unpacked").iterdir()
    return tree


@pytest.mark.slow
@pytest.mark.whole_build
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("installs")
class TestInstalling:
    def test_a_source_distribution_has_the_sources_and_no_build_product(self, archive: Path) -> None:
        with tarfile.open(archive) as content:
            names = {name.partition("/")[2] for name in content.getnames()}
        sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*") if path.is_file()}
        python = {str(path.relative_to(ROOT)) for path in (ROOT / "tensorizer").rglob("*.py*") if path.suffix != ".pyc"}
        assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "tensorizer/py.typed"} <= names
        assert sources | python <= names
        assert [name for name in names if name.endswith((".so", ".pyc"))] == []

    def test_pip_install_builds_a_wheel_out_of_it(self, unpacked: Path, sandbox: Sandbox) -> None:
        sandbox.install(".", cwd=unpacked)
        assert sandbox.imported_from().parent == sandbox.site / "tensorizer"

    def test_an_editable_install_imports_from_the_tree(self, unpacked: Path, sandbox: Sandbox) -> None:
        sandbox.install("--editable", ".", cwd=unpacked)
        assert sandbox.imported_from().parent == unpacked / "tensorizer"


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("setuptools", ["setuptools==64.0.0", "setuptools"])
def test_old_and_new_setuptools_read_the_same_metadata(setuptools: str, tmp_path: Path) -> None:
    """Old ones are what the extension builder of torch 2.1 needs."""
    wheels = tmp_path / "wheels"
    fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(wheels), setuptools]
    if subprocess.run(fetch, capture_output=True, check=False, timeout=120).returncode != 0:
        pytest.skip(f"pip cannot fetch {setuptools}")
    hidden = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__", "out", "site")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=hidden)
    (tmp_path / "found").mkdir()
    code = (
        "import sys; from setuptools import build_meta;"
        "print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "found")],
        cwd=tmp_path / "tree",
        env={**os.environ, "PYTHONPATH": str(wheels)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (folder,) = (tmp_path / "found").glob("*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert (metadata["Name"], metadata["Version"], metadata["License"]) == ("tensorizer", VERSION, "MIT")
    required = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist") if "extra" not in line}
    assert required == {"torch", "numpy", "psutil", "boto3", "redis", "protobuf"}
    assert metadata["License-File"] == "LICENSE"


def test_a_setuptools_that_cannot_read_the_metadata_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "setuptools.py").write_text("__version__ = '58.1.0'\nExtension = setup = None\n")
    result = run_setup("--version", PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert result.stderr.splitlines() == [
        "tensorizer: setuptools 58.1.0 is too old; get 64 or later: pip install -U setuptools"
    ]

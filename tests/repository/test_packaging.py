"""Wheels and releases: the lock file, the check of wheels, equal bytes, and workflows that call scripts which exist."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from places import ROOT

import tensorizer._C

SCRIPTS = ROOT / "scripts" / "packaging"
PYTHONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wheels are for Linux")


@pytest.fixture
def scripts(monkeypatch):
    """Imports one of the scripts."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


# -- the lock file -----------------------------------------------------------------------------------------------------


def source_paragraph(package, version, folder, files):
    hashes = "\n".join(f" {hashlib.sha256(file.encode()).hexdigest()} 123 {file}" for file in files)
    return f"Package: {package}\nVersion: {version}\nDirectory: {folder}\nChecksums-Sha256:\n{hashes}\n"


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="compares versions as Debian does")
def test_the_lock_file_is_brought_up_to_what_the_lists_of_debian_name(scripts):
    lock, check = scripts("lock"), scripts("check_sources")
    files = ["openssl_9.1.2.orig.tar.gz", "openssl_9.1.2-1~deb13u4.debian.tar.xz", "openssl_9.1.2-1~deb13u4.dsc"]
    text = "\n".join(
        [
            source_paragraph("openssl", "1:9.1.2-1~deb13u4", "pool/updates/main/o/openssl", files),
            source_paragraph("openssl", "0.1-1", "pool/main/o/openssl", ["openssl_0.1.orig.tar.gz"]),
            "Package: nothing\n",
        ]
    )
    found = check.read_list(text, "debian-security")
    (library,) = (library for library in lock.read_libraries() if library.name == "openssl")
    latest = check.latest_of(found["openssl"], check.source_package(library.patches.file)[1])
    assert latest.version == "9.1.2-1~deb13u4"
    assert check.latest_of(found["openssl"], latest.version) is None
    before = lock.LOCK_FILE.read_text()
    after = {library.name: library for library in lock.libraries_of(check.updated(before, library, latest))}
    assert after["openssl"].version == "9.1.2"
    place = "debian-security:pool/updates/main/o/openssl/"
    for file, locked in zip(files, (after["openssl"].archive, after["openssl"].patches)):
        assert (locked.file, locked.urls[0]) == (file, place + file)
        assert locked.sha256 == hashlib.sha256(file.encode()).hexdigest()
    assert after["openssl"].archive.urls[1].endswith("/openssl-9.1.2/openssl-9.1.2.tar.gz")
    assert {n: v for n, v in after.items() if n != "openssl"} == {
        library.name: library for library in lock.read_libraries() if library.name != "openssl"
    }


def test_places_of_debian_are_below_the_mirror_that_is_named_and_a_missing_mirror_does_not_hide_other_addresses(
    scripts, tmp_path, monkeypatch
):
    lock = scripts("lock")
    monkeypatch.setenv("DEBIAN_MIRROR", "https://mirror.invalid/debian/")
    assert lock.address_of("debian:pool/a") == "https://mirror.invalid/debian/pool/a"
    assert lock.address_of("debian-security:pool/a") == "https://mirror.invalid/debian-security/pool/a"
    assert lock.address_of("https://other.invalid/a") == "https://other.invalid/a"
    (tmp_path / "there").write_bytes(b"content")

    def no_mirror():
        raise LookupError("no mirror")

    monkeypatch.setattr(lock, "debian_mirror", no_mirror)
    digest = hashlib.sha256(b"content").hexdigest()
    urls = ("debian:pool/a", (tmp_path / "there").as_uri())
    assert lock.fetch(lock.LockedFile("a", digest, urls), tmp_path / "cache").read_bytes() == b"content"
    with pytest.raises(SystemExit, match=r"no mirror\n.*check_sources.py --update"):
        lock.fetch(lock.LockedFile("b", digest, urls[:1]), tmp_path / "cache")


def test_every_locked_file_has_a_hash_and_an_address(scripts):
    lock, recipes = scripts("lock"), scripts("build_deps")
    libraries = lock.read_libraries()
    assert {library.name for library in libraries} == set(recipes.RECIPES)
    for library in libraries:
        for locked in (library.archive, library.patches):
            assert re.fullmatch(r"[0-9a-f]{64}", locked.sha256), locked.file
            assert locked.urls, locked.file
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for tool in lock.read_tools() for digest in tool.sha256)


def test_a_file_that_differs_from_the_lock_ends_the_build(scripts, tmp_path):
    lock = scripts("lock")
    (tmp_path / "source").write_bytes(b"right")
    url = (tmp_path / "source").as_uri()
    right = lock.LockedFile("file", hashlib.sha256(b"right").hexdigest(), (f"{url}.absent", url))
    assert lock.fetch(right, tmp_path / "cache").read_bytes() == b"right"
    wrong = lock.LockedFile("other", hashlib.sha256(b"wrong").hexdigest(), (url,))
    with pytest.raises(SystemExit, match=f"other: wanted SHA-256 {wrong.sha256}, found"):
        lock.fetch(wrong, tmp_path / "cache")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["file"]
    (tmp_path / "cache" / "file").write_bytes(b"damaged later")
    assert lock.fetch(right, tmp_path / "cache").read_bytes() == b"right"


def test_a_library_is_built_again_when_its_sources_its_recipe_or_its_compiler_change(scripts):
    lock, deps, compilers = scripts("lock"), scripts("build_deps"), scripts("compilers")
    libraries = {library.name: library for library in lock.read_libraries()}
    one, other = (compilers.Toolchain({}, name) for name in ("one", "other"))
    keys = {name: deps.key_of(library, one, {}) for name, library in libraries.items()}
    assert len(set(keys.values())) == len(keys)
    assert deps.key_of(libraries["hiredis"], other, {}) != keys["hiredis"]
    assert deps.key_of(libraries["curl"], one, {"openssl": "built anew"}) != keys["curl"]
    assert deps.key_of(libraries["hiredis"], one, {"openssl": "built anew"}) == keys["hiredis"]


# -- the check of wheels -----------------------------------------------------------------------------------------------


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def complete_files(scripts):
    """Names of the files of a complete wheel, and of the components that it lists."""
    check = scripts("check_wheel")
    listed = [*(library.name for library in scripts("lock").read_libraries()), *check.HEADERS, "libc++"]
    names = [f"tensorizer/{name}" for name in check.REQUIRED]
    return [*names, *(f"tensorizer-1.dist-info/licenses/{name}.txt" for name in listed)], listed


def test_a_wheel_is_refused_for_each_thing_it_lacks_or_holds_too_much(scripts, tmp_path):
    check, (good, listed) = scripts("check_wheel"), complete_files(scripts)
    assert check.wrong_content(good, listed) == []
    for name in good:
        assert len(check.wrong_content([other for other in good if other != name], listed)) == 1, name
    for name in listed:
        assert len(check.wrong_content(good, [other for other in listed if other != name])) == 1, name
    assert check.wrong_content(good, [*listed, "another"]) == ["lacks the licence of another"]
    for name in ("tensorizer/x.h", "tensorizer/libz.a", "tests/test_x.py", "tensorizer/x.pyc"):
        assert check.wrong_content([*good, name], listed) == [f"holds {name}"]
    bill = json.dumps({"components": [{"name": name} for name in listed if name != "dlpack"]})
    files = {**dict.fromkeys(good, ""), "tensorizer-1.dist-info/sboms/tensorizer.cdx.json": bill}
    wheel = write_wheel(tmp_path / "tensorizer-1-cp311-cp311-linux_x86_64.whl", files)
    complaints = check.wrong_wheel(wheel, [])
    assert {"its name lacks manylinux_2_28", "does not list the component dlpack"} <= set(complaints)
    assert any("wanted tensorizer/_C alone" in complaint for complaint in complaints)


def test_a_module_is_refused_that_needs_libraries_of_the_system(scripts):
    """The module that these tests run with is one, unless it comes from a wheel."""
    check, module = scripts("check_wheel"), Path(tensorizer._C.__file__)
    complaints = check.wrong_module(module, [b"PyInit__C"])
    assert "holds the text PyInit__C" in complaints
    if tensorizer._C.default_certificates() != ("", ""):
        assert any(complaint.startswith("needs libcurl.so.4") for complaint in complaints)
        assert any(re.match(r"expects (curl|SSL|sodium)_\w+ of another module", c) for c in complaints)
    assert not any(complaint.startswith("exports") for complaint in complaints)


def test_a_finished_wheel_has_licences_components_and_a_right_record_and_equal_bytes_each_time(
    scripts, tmp_path, monkeypatch
):
    finish = scripts("finish_wheel")
    prefix = tmp_path / "prefix" / "licences"
    prefix.mkdir(parents=True)
    for library in scripts("lock").read_libraries():
        (prefix / f"{library.name}.txt").write_text(f"licence of {library.name}")
    compilers = scripts("compilers")
    (tmp_path / "text").write_text("licence of libc++")
    runtime = compilers.Runtime("libc++", "of zig 1", "Apache-2.0 WITH LLVM-exception", tmp_path / "text")
    scripts("build_deps").write_runtimes(prefix.parent, compilers.Toolchain({}, "", (runtime,)))
    headers = Path(torch.__file__).parent / "include"
    files = {"tensorizer/__init__.py": "", "tensorizer/_C.so": "x" * 1000, "tensorizer-1.dist-info/METADATA": "m"}
    wheel = write_wheel(tmp_path / "tensorizer-1-x.whl", {**files, "tensorizer-1.dist-info/RECORD": "old"})
    reverse = dict(reversed(list(files.items())))
    same = write_wheel(tmp_path / "tensorizer-1-y.whl", {"tensorizer-1.dist-info/RECORD": "other", **reverse})
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for source, target in ((wheel, "a"), (same, "b")):
        finish.rewrite(source, tmp_path / target, prefix.parent, headers)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with zipfile.ZipFile(tmp_path / "a") as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    record = list(csv.reader(io.StringIO(content["tensorizer-1.dist-info/RECORD"].decode())))
    assert {row[0] for row in record} == set(content)
    for name, digest, nbytes in record:
        if not name.endswith("RECORD"):
            sha256 = base64.urlsafe_b64encode(hashlib.sha256(content[name]).digest()).rstrip(b"=").decode()
            assert (digest, int(nbytes)) == (f"sha256={sha256}", len(content[name])), name
    listed = json.loads(content["tensorizer-1.dist-info/sboms/tensorizer.cdx.json"])
    versions = {component["name"]: component["version"] for component in listed["components"]}
    for library in scripts("lock").read_libraries():
        assert versions[library.name] == library.version
        assert content[f"tensorizer-1.dist-info/licenses/{library.name}.txt"].decode().endswith(library.name)
    assert versions["libc++"] == "of zig 1"
    assert re.fullmatch(r"\d+\.\d+\.\w+", versions["pybind11"])
    assert re.fullmatch(r"\d+\.\d+", versions["dlpack"])
    assert "debian:" not in json.dumps(listed)
    licences = {name.rpartition("/")[2] for name in content if "/licenses/" in name}
    assert licences == {f"{name}.txt" for name in versions}
    assert all("licenses" in component for component in listed["components"])


def test_versions_of_headers_are_read_as_old_and_new_releases_write_them(scripts, tmp_path):
    pybind11, dlpack = tmp_path / "pybind11" / "detail" / "common.h", tmp_path / "ATen" / "dlpack.h"
    for path in (pybind11, dlpack):
        path.parent.mkdir(parents=True)
    version = "#define PYBIND11_VERSION_MAJOR 2\n#define PYBIND11_VERSION_MINOR 13\n#define PYBIND11_VERSION_PATCH 6\n"
    new = "#define DLPACK_MAJOR_VERSION 1\n#define DLPACK_MINOR_VERSION 3\n"
    pybind11.write_text(version)
    for text, wanted in ((new, "1.3"), ("#define DLPACK_VERSION 80\n#define DLPACK_ABI_VERSION 1\n", "0.8")):
        dlpack.write_text(text)
        found = {c["name"]: c["version"] for c in scripts("finish_wheel").header_components(tmp_path)}
        assert found == {"pybind11": "2.13.6", "dlpack": wanted}


def test_the_module_tells_the_versions_of_all_libraries_that_the_lock_file_names(scripts):
    locked = {library.name: library.version for library in scripts("lock").read_libraries()}
    assert set(tensorizer._C.library_versions()) == set(locked)


def test_tests_of_a_wheel_run_without_the_package_beside_them_and_refuse_a_python_that_has_no_wheel(scripts, tmp_path):
    suite = scripts("suite")
    folder = tmp_path / "suite"
    with pytest.raises(SystemExit, match=r"takes the module from .*: wanted its own environment"):
        suite.run_suite(Path(sys.executable), folder, [])  # that of the sources
    assert (folder / "tests" / "conftest.py").is_file()
    assert not (folder / "tensorizer").exists()
    assert (folder / suite.OF_THE_CHECKOUT).is_dir()


# -- Pythons and their torch -------------------------------------------------------------------------------------------


def test_every_python_that_gets_no_wheel_is_named_with_the_reason(scripts, tmp_path, monkeypatch, capsys):
    builder = scripts("build_wheels")
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho it has no ensurepip\nexit 1\n")
    broken.chmod(0o755)
    others = [version for version in PYTHONS if version != running]
    monkeypatch.setattr(builder, "pythons_here", lambda: {others[0]: str(broken)})
    monkeypatch.setattr(builder, "lacks", lambda python: [] if python == sys.executable else ["torch"])
    assert builder.builders_here(tmp_path / "cache") == [sys.executable]
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("==")]
    assert lines == [
        f"left out: Python {others[0]}: no virtual environment: it has no ensurepip",
        *(f"left out: Python {version}: not on this machine" for version in others[1:]),
    ]


def test_a_python_that_was_named_and_cannot_build_ends_the_program_with_the_reason(scripts, tmp_path):
    builder = scripts("build_wheels")
    versions = {"old": "3.8", "broken": "3.11"}
    for name, version in versions.items():
        (tmp_path / name).write_text(
            f'#!/bin/sh\n[ "$1" = -c ] || {{ echo no ensurepip; exit 1; }}\n'
            f"case $2 in *version_info*) echo {version} ;; *) echo torch ;; esac\n"
        )
        (tmp_path / name).chmod(0o755)
    reasons = {"old": "Python 3.8: wanted one of 3.9, ", "broken": "no virtual environment: no ensurepip"}
    for name, reason in [*reasons.items(), ("missing", "does not run")]:
        python = str(tmp_path / name)
        with pytest.raises(SystemExit, match=f"^{re.escape(python)}:? {re.escape(reason)}"):
            builder.named_builders([python], tmp_path / "cache")


def test_a_build_sees_the_header_of_debians_python_that_depends_on_the_machine_and_no_other(scripts, tmp_path):
    builder = scripts("build_wheels")
    include = tmp_path / "usr" / "include"
    for folder in (include / "python3.99", include / "x86_64-linux-gnu" / "python3.99"):
        folder.mkdir(parents=True)
    (include / "other.h").touch()
    (include / "python3.99" / "pyconfig.h").write_text("#include <x86_64-linux-gnu/python3.99/pyconfig.h>\n")
    (include / "x86_64-linux-gnu" / "python3.99" / "pyconfig.h").write_text("of this machine\n")
    python = tmp_path / "python"
    for machine, seen in (("x86_64-linux-gnu", "of this machine"), ("none", None)):
        python.write_text(f"#!/bin/sh\necho {machine}\necho {include}/python3.99\n")
        python.chmod(0o755)
        flags = builder.headers_of_machine(str(python), tmp_path / "headers")
        compiler = ["c++", "-nostdinc", "-E", "-P", f"-I{include}/python3.99", *flags, "-x", "c++", "-"]
        for header, wanted in (("pyconfig.h", seen), ("other.h", None)):
            text = f"#include <{header}>\n"
            run = subprocess.run(compiler, input=text, capture_output=True, text=True, check=False)
            assert (run.stdout.strip() if run.returncode == 0 else None) == wanted, (machine, header)


def test_each_python_has_two_releases_of_torch_between_its_oldest_and_its_newest(scripts):
    environments = scripts("environments")

    def number(release: str) -> tuple:
        return tuple(int(part) for part in release.split("."))

    for version in PYTHONS:
        first, second = map(number, environments.BETWEEN_TORCH[version])
        assert number(environments.OLDEST_TORCH[version]) < first < second
        assert second < number(environments.newest_torch(version))


def test_the_matrix_installs_what_developers_test_with_but_for_numpy_before_torch_2_3(scripts, tmp_path):
    matrix = scripts("matrix")
    pinned = (ROOT / "constraints-dev.txt").read_text()
    constraints = matrix.constraints("2.13.0", tmp_path).read_text().splitlines()
    assert constraints == [*pinned.splitlines(), "torch==2.13.0"]
    kept = matrix.constraints("2.2.0", tmp_path).read_text()
    assert "numpy==" in pinned
    assert "numpy==" not in kept
    assert "pytest==" in kept


def test_what_the_tests_talk_to_is_pinned_for_every_python():
    requirement = pytest.importorskip("packaging.requirements").Requirement
    wanted = [
        requirement(line) for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line[:1].isalpha()
    ]
    pins = [requirement(line) for line in (ROOT / "constraints-dev.txt").read_text().splitlines() if line[:1].isalpha()]

    def applies(line, python):
        return line.marker is None or line.marker.evaluate({"python_version": python})

    own_pins = {"pre-commit", "build"}  # for developers, who have the Python of constraints-dev.txt's first block
    for python in PYTHONS:
        pinned = {line.name.lower().replace("_", "-") for line in pins if applies(line, python)}
        for line in wanted:
            exact = any(clause.operator == "==" for clause in line.specifier)
            if applies(line, python) and not exact and line.name not in own_pins:
                assert line.name.lower().replace("_", "-") in pinned, (python, line.name)


def test_the_newest_torch_of_a_python_is_the_one_of_the_developers_or_the_last_that_it_got(scripts, monkeypatch):
    environments = scripts("environments")
    assert sorted(environments.OLDEST_TORCH, key=PYTHONS.index) == PYTHONS
    pinned = (ROOT / "constraints.txt").read_text().strip()
    assert {f"torch=={environments.newest_torch(version)}" for version in PYTHONS[1:]} == {pinned}
    assert environments.newest_torch("3.9") == "2.8.0"
    assert environments.version_of("/nonexistent/python") is None
    matrix = scripts("matrix")
    monkeypatch.setattr(matrix, "latest_torch", lambda version: f"the latest for {version}")
    assert matrix.releases_of("3.9", ["oldest", "newest", "2.4.1"]) == ["2.1.0", "2.8.0", "2.4.1"]
    assert matrix.releases_of("3.9", ["newest", "latest"]) == ["2.8.0", "the latest for 3.9"]


def test_the_latest_torch_is_what_the_index_says_or_else_the_newest_that_is_known(scripts, tmp_path, monkeypatch):
    environments = scripts("environments")
    python = tmp_path / "python"
    monkeypatch.setattr(environments.sys, "executable", str(python))
    for answer, wanted in (("torch (2.99.1)", "2.99.1"), ("nothing found", environments.newest_torch("3.11"))):
        python.write_text(f"#!/bin/sh\necho '{answer}'\n")
        python.chmod(0o755)
        assert environments.latest_torch("3.11") == wanted


def test_a_matrix_without_an_index_of_cpu_builds_installs_nothing_that_depends_on_torch(scripts, monkeypatch):
    matrix = scripts("matrix")
    monkeypatch.setattr(matrix, "TORCH_INDEX", None)
    names = {re.split("[=><]", line)[0] for line in matrix.test_requirements("2.13.0")}
    assert {"transformers", "pytest", "hypothesis", "safetensors", "boto3"} <= names
    assert not names & {"torch", "accelerate", "lightning", "mypy", "ruff"}
    monkeypatch.setattr(matrix, "TORCH_INDEX", "https://127.0.0.1/cpu")
    assert "accelerate" in " ".join(matrix.test_requirements("2.13.0"))


def test_a_matrix_installs_no_framework_that_wants_a_later_torch(scripts, monkeypatch):
    matrix = scripts("matrix")
    for index in (None, "https://127.0.0.1/cpu"):
        monkeypatch.setattr(matrix, "TORCH_INDEX", index)
        for torch_release, wanted in (("2.1.0", False), ("2.5.0", False), ("2.6.0", True), ("2.13.0", True)):
            names = {re.split("[=><]", line)[0] for line in matrix.test_requirements(torch_release)}
            assert ("transformers" in names, "diffusers" in names) == (wanted, wanted), torch_release
            assert ("accelerate" in names) == (wanted and index is not None), torch_release


def compile_library(path, source, *options):
    text = path.parents[1] / f"{path.name}.c"
    text.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, text, *options], check=True)


def test_libraries_that_torch_lacks_are_replaced_by_ones_that_know_no_device(scripts, tmp_path):
    if not all(map(shutil.which, ("cc", "readelf"))):
        pytest.skip("no compiler or no readelf")
    lib = tmp_path / "torch" / "lib"
    lib.mkdir(parents=True)
    (tmp_path / "versions").write_text("libfake.so.12 { global: *; };\n")
    fake = "int fakeCount(void) { return 1; } const char* fakeErrorString(void) { return 0; } int fakeData = 3;"
    compile_library(lib / "libfake.so.12", fake, f"-Wl,--version-script={tmp_path / 'versions'}")
    compile_library(lib / "libplain.so.9", "int plainCount(void) { return 1; }")
    ours = "extern int fakeCount(void), plainCount(void), fakeData; extern char* fakeErrorString(void);"
    ours += "int fake(void) { return fakeCount() + fakeData; } int plain(void) { return plainCount(); }"
    ours += "int text(void) { return fakeErrorString()[0]; }"
    libraries = ["-L", lib, "-l:libfake.so.12", "-l:libplain.so.9", "-Wl,-rpath,$ORIGIN,-z,now"]
    compile_library(lib / "libtorch.so", ours, *libraries)
    # names of C++ that the machine's own library has, without a version
    compile_library(lib / "libtorch_cpu.so", "int _ZSt4namev(void); int f(void) { return _ZSt4namev(); }", *libraries)
    for name in ("libfake.so.12", "libplain.so.9"):
        (lib / name).unlink()
    assert sorted(scripts("torch_without_cuda").stand_in_for_cuda(tmp_path)) == ["libfake.so.12", "libplain.so.9"]
    code = f"import ctypes; m = ctypes.CDLL({str(lib / 'libtorch.so')!r}); print(m.fake(), m.plain(), m.text())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("100 100 0\n", "")
    assert [name for name in ("libfake.so.12", "libplain.so.9") if b"_ZSt4namev" in (lib / name).read_bytes()] == []


# -- equal bytes -------------------------------------------------------------------------------------------------------


def test_a_wheel_that_was_built_again_is_equal_or_its_differences_are_named(scripts, tmp_path):
    again = scripts("build_again")
    one = write_wheel(tmp_path / "one", {"a": "same", "b": "first", "c": ""})
    other = write_wheel(tmp_path / "other", {"a": "same", "b": "second", "d": ""})
    assert again.differences(one, one) == []
    assert again.differences(one, other) == ["b differs", "c is in one only", "d is in one only"]
    stored = tmp_path / "stored"
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"a": "same", "b": "first", "c": ""}.items():
            archive.writestr(name, content)
    assert again.differences(one, stored) == ["the same files, stored in another way"]


def test_a_second_build_is_compared_with_what_was_built_before_and_run_from_any_folder(scripts, tmp_path, monkeypatch):
    again = scripts("build_again")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        shutil.copy(write_wheel(tmp_path / "made", {"a": "same"}), folder / "cp311.whl")
    shutil.copy(write_wheel(tmp_path / "more", {"a": "same"}), second / "cp313.whl")
    asked = []
    monkeypatch.setattr(again, "build_again", lambda folder, pythons, downloads: asked.extend(pythons) or second)
    monkeypatch.setattr(sys, "argv", ["build_again.py", str(first), ".venv/bin/python"])
    assert again.main() == 0
    assert asked == [os.path.abspath(".venv/bin/python")]
    write_wheel(tmp_path / "other", {"a": "changed"}).replace(second / "cp311.whl")
    assert again.main() == 1
    (second / "cp311.whl").unlink()
    assert again.main() == 1  # nothing to compare


def test_copies_of_the_same_sources_are_compiled_once_where_ccache_is(scripts, tmp_path):
    if not all(map(shutil.which, ("ccache", "g++"))):
        pytest.skip("no ccache or no g++")
    compilers, log = scripts("compilers"), tmp_path / "log"
    zig = tmp_path / "zig"
    zig.write_text(
        f'#!/bin/sh\n[ $# -gt 2 ] || exit 0\nshift 5\necho "$@" >>{log}\n'
        f'exec {shutil.which("g++")} $(echo "$@" | sed s/-fcolor-diagnostics//)\n'
    )
    zig.chmod(0o755)
    toolchain = compilers.zig_toolchain(zig, tmp_path / "toolchain", "x86_64")
    cached = compilers.with_ccache(toolchain, tmp_path / "ccache", tmp_path / "trees")
    for name in ("cp39", "cp313"):
        tree = tmp_path / "trees" / name
        (tree / "build").mkdir(parents=True)
        (tree / "x.cpp").write_text('#include "x.h"\nconst char* where() { return __FILE__; }\n')
        (tree / "x.h").write_text("const char* where();\n")
        options = [f"-ffile-prefix-map={tree}=.", f"-I{tree}", f"-I{tmp_path / name}", "-g1", "-MMD", "-MF", "x.d"]
        command = ["c++", *options, "-c", str(tree / "x.cpp"), "-o", str(tree / "build" / "x.o")]
        subprocess.run(command, cwd=tree / "build", env={**os.environ, **cached.environment}, check=True)
        assert (tree / "build" / "x.o").is_file()
    compiled = [line for line in log.read_text().splitlines() if "-c" in line.split() and "-E" not in line.split()]
    assert len(compiled) == 1, compiled


# -- compilers ---------------------------------------------------------------------------------------------------------


def test_compiler_scripts_name_the_old_glibc_except_when_asked_for_their_version(scripts, tmp_path):
    compilers = scripts("compilers")
    fake = tmp_path / "zig"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    toolchain = compilers.zig_toolchain(fake, tmp_path / "tools", "x86_64")

    def run(*command):
        environment = {**os.environ, **toolchain.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    assert run("c++", "-c", "x.cpp")[:4] == ["c++", "-target", "x86_64-linux-gnu.2.28", "-mcpu=x86_64"]
    for option in ("-v", "--version", "-dumpversion"):
        assert run("cc", option) == ["cc", option]
    assert run("ar", "x") == ["ar", "x"]
    with pytest.raises(SystemExit, match="no wheels for pdp11"):
        compilers.zig_toolchain(fake, tmp_path / "tools", "pdp11")


# -- what the repository says of itself --------------------------------------------------------------------------------


def test_python_versions_agree_everywhere():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'requires-python = ">=(\S+)"', project)[1] == PYTHONS[0]
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == PYTHONS
    built = re.search(r'^build = "(.+)"$', project, re.MULTILINE)[1]
    assert built.split() == [f"cp{version.replace('.', '')}-*" for version in PYTHONS]
    for workflow in ("tests.yml", "wheels.yml"):
        text = (ROOT / ".github" / "workflows" / workflow).read_text()
        assert json.loads(re.search(r"python: (\[.+\])", text)[1]) == PYTHONS
    install = (ROOT / "docs" / "install.md").read_text()
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in install


def test_scripts_that_cibuildwheel_calls_exist():
    text = (ROOT / "pyproject.toml").read_text()
    section = text[text.index("[tool.cibuildwheel]") : text.index("[tool.ruff]")]
    named = re.findall(r"scripts/[\w./-]+", section)
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_shell_scripts_parse():
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    for script in [*SCRIPTS.glob("*.sh"), *(ROOT / "scripts").glob("*.sh")]:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK) == script.read_text().startswith("#!"), script


def test_a_script_without_arguments_or_without_files_says_in_one_line_what_it_wants(tmp_path):
    empty, absent = tmp_path / "empty", tmp_path / "absent"
    empty.mkdir()
    cases = {
        ("bare.sh",): "usage: bare.sh FOLDER",
        ("try_sdist.sh",): "usage: try_sdist.sh FOLDER",
        ("publish_docs.sh",): "usage: publish_docs.sh NAME",
        ("bare.sh", empty): f"no wheel in {empty}",
        ("try_sdist.sh", empty): f"0 source distributions in {empty}: wanted one",
        ("wheel_test.py", absent): f"no file or folder {absent}",
        ("check_wheel.py", absent): f"no file or folder {absent}",
        ("build_again.py", absent): f"no wheel in {absent}",
        ("check_release.py", "v1", absent): f"no folder {absent}",
    }
    for (script, *arguments), wanted in cases.items():
        start = [sys.executable] if script.endswith(".py") else ["bash"]
        command = [*start, str(SCRIPTS / script), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode != 0, command
        (line,) = done.stderr.splitlines()
        assert wanted in line


def test_the_source_distribution_builds_by_itself_and_holds_no_test(tmp_path):
    command = [sys.executable, str(SCRIPTS / "build_sdist.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (archive,) = tmp_path.glob("tensorizer-*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert [name for name in names if name.startswith("tests")] == []
    assert [name for name in names if name.endswith(".sh")] == [], "these want a checkout"
    assert {"setup.py", "csrc/bind/exports.map", "tensorizer/__init__.py", "scripts/packaging/build_deps.py"} <= names
    here = {path.stem for path in SCRIPTS.glob("*.py")}
    kept = {Path(name).stem for name in names if re.fullmatch(r"scripts/packaging/\w+\.py", name)}
    for name in kept:
        text = (SCRIPTS / f"{name}.py").read_text()
        imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
        assert imported & here <= kept, name


def test_without_root_tests_go_on_without_servers_that_are_not_installed_and_test_all_insists(tmp_path):
    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    program("id", "echo 1000")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    environment.pop("TENSORIZER_REQUIRE_SERVERS", None)
    insists = {**environment, "TENSORIZER_REQUIRE_SERVERS": "1"}

    def packages(group: str, missing: str, env: dict) -> subprocess.CompletedProcess:
        program("dpkg-query", f'for name; do :; done\n[ "$name" = {missing} ] || echo installed')
        command = ["bash", str(ROOT / "scripts" / "system-packages.sh"), group]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    left_out = packages("test", "redis-server", environment)
    assert left_out.returncode == 0, left_out.stdout + left_out.stderr
    assert left_out.stdout == "== not installed, so tests that need them are left out: redis-server\n"
    for group, missing, env in [
        ("test", "redis-server", insists),
        ("test", "libsodium-dev", environment),
        ("native", "cmake", environment),
    ]:
        refused = packages(group, missing, env)
        assert refused.returncode == 1, (group, refused.stdout)
        assert f"sudo apt-get install -y --no-install-recommends {missing}\n" in refused.stdout.replace(
            "sudo apt-get update && ", ""
        )


def test_the_runtime_of_the_sanitizers_is_installed_for_the_clang_that_is_here(tmp_path):
    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    program("id", "echo 1000")  # without root the command only says what to install
    program("dpkg-query", "echo installed")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}
    runtime = tmp_path / "libclang_rt.builtins.a"
    for version, package in (("14.0.6", "libclang-rt-14-dev"), ("19.1.7", "libclang-rt-19-dev")):
        program("clang", f'case "$*" in *dumpversion*) echo {version} ;; *) echo {runtime} ;; esac')
        command = ["bash", str(ROOT / "scripts" / "system-packages.sh"), "native"]
        runtime.unlink(missing_ok=True)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stdout
        assert f"--no-install-recommends {package}\n" in done.stdout
        runtime.touch()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")


def test_a_missing_server_is_one_line_and_an_error_where_all_are_required(tmp_path):
    """In a process that finds no program but Python."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60"]
    command += [str(ROOT / "tests" / "io" / "test_redis_export.py"), "-m", "not slow"]
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("TENSORIZER_REQUIRE_SERVERS", None)
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("left out: tests with Redis (not installed)\n") == 1
    assert re.search(r"^\d+ left out", run.stdout, re.MULTILINE)
    assert "SKIPPED" not in run.stdout, "one by one"
    assert " passed" not in run.stdout
    required = {**environment, "TENSORIZER_REQUIRE_SERVERS": "1"}
    refused = subprocess.run(command, env=required, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 4
    assert "TENSORIZER_REQUIRE_SERVERS=1, but not installed:" in refused.stderr


def test_warnings_of_others_fail_no_test_and_our_own_do(tmp_path):
    tests = tmp_path / "test_warnings.py"
    tests.write_text(
        "import warnings, pytest\n"
        "names = ['others', 'others.tensorizer', 'tensorizer', 'tensorizer.utils', 'test_it']\n"
        "@pytest.mark.parametrize('module', names)\n"
        "def test_warning(module):\n"
        "    warnings.warn_explicit('outdated', DeprecationWarning, 'file', 1, module=module)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    run = subprocess.run([*command, str(tests)], cwd=tmp_path, capture_output=True, text=True, check=False)
    failed = re.findall(r"^FAILED .*\[(.+?)\]", run.stdout, re.MULTILINE)
    assert sorted(failed) == ["tensorizer", "tensorizer.utils", "test_it"], run.stdout
    assert "2 passed" in run.stdout


def test_tests_of_torch_save_are_skipped_where_it_fails_by_itself_and_no_other_failure_is(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "broken_save.py").write_text(
        "import torch\ndef save(*_, **__):\n    raise AttributeError('persistent_id is read-only')\ntorch.save = save\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_saves(tmp_path): torch.save(torch.zeros(1), tmp_path / 'file')\n"
        "def test_lacks(): torch.no_such_name\n"
        "def test_raises(): raise AttributeError('persistent_id is absent')\n"
        "def test_child(): assert False, 'of a child: AttributeError: persistent_id is read-only'\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}
    for plugin, wanted in (
        (["-p", "broken_save"], {"saves": "SKIPPED", "lacks": "FAILED", "raises": "FAILED", "child": "SKIPPED"}),
        ([], {"saves": "PASSED", "lacks": "FAILED", "raises": "FAILED", "child": "FAILED"}),
    ):
        run = subprocess.run(
            [*command, *plugin], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert dict(re.findall(r"::test_(\w+) ([A-Z]+)", run.stdout)) == wanted, run.stdout + run.stderr
        assert ("torch.save itself fails" in run.stdout) == bool(plugin)


# -- other releases of Debian ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounting wants root")
def test_a_command_in_a_root_changes_only_what_is_shared_with_it(scripts, tmp_path):
    """This machine's own file system is the root."""
    lent, copied, shared = (tmp_path / name for name in ("lent", "copied", "shared"))
    for folder in (lent, copied, shared):
        folder.mkdir()
        (folder / "there").write_text("before")
    script = (
        'cd "$0"; cat lent/there copied/there shared/there; echo after >copied/there; echo after >shared/there; '
        'echo new >new; (echo after >lent/there) 2>/dev/null || echo " refused"; cat copied/there; exit 3'
    )
    with (tmp_path / "said").open("w") as said:
        program = (
            "import sys; from pathlib import Path; from roots import run_in_root\n"
            "folder = Path(sys.argv[1]); names = ('lent', 'copied', 'shared')\n"
            "given = {name: [folder / name] for name in names}\n"
            "sys.exit(run_in_root(Path('/'), ['sh', '-c', sys.argv[2], sys.argv[1]], **given))"
        )
        command = [sys.executable, "-c", program, str(tmp_path), script]
        run = subprocess.run(command, cwd=SCRIPTS, stdout=said, check=False)
    assert run.returncode == 3
    assert (tmp_path / "said").read_text() == "beforebeforebefore refused\nafter\n"
    assert [(folder / "there").read_text() for folder in (lent, copied, shared)] == ["before", "before", "after\n"]
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounting wants root")
def test_a_command_in_a_root_ends_with_the_program_that_started_it():
    program = (
        "from pathlib import Path; from roots import run_in_root\n"
        "run_in_root(Path('/'), ['sh', '-c', 'echo started; while :; do sleep 1; done'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=SCRIPTS, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"started\n"
        process.kill()
        assert process.stdout.read() == b""  # the end: nothing holds the pipe any more


def test_a_root_has_all_packages_that_the_tests_of_this_machine_ask_for(scripts):
    roots = scripts("roots")
    assert {"g++", "libcurl4-openssl-dev", "redis-server", "nginx-light"} < set(roots.packages_of("test"))
    assert set(roots.packages_of("build")) < set(roots.packages_of("test"))
    assert set(roots.SUITES) < set(PYTHONS)


def test_the_matrix_lists_pythons_and_roots_and_refuses_those_it_does_not_know():
    def matrix(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "scripts/packaging/matrix.py", "--list", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    listed = matrix("--root", "bullseye", "sid", "--torch", "oldest")
    assert listed.stdout == "Python 3.9 (Debian bullseye), torch 2.1.0\nPython 3.14 (Debian sid), torch 2.9.0\n"
    named = matrix("--root", "bullseye", "--torch", "oldest", "between", "newest", "2.8.0").stdout
    assert re.findall(r"torch (\S+)", named) == ["2.1.0", "2.4.1", "2.6.0", "2.8.0"]
    assert matrix("--root", "woody").stderr.startswith("matrix.py: no root: woody: wanted one of ")
    named = matrix("--python", sys.executable, "--torch", "2.4.1")
    assert named.stdout == f"Python {sys.version_info[0]}.{sys.version_info[1]} ({sys.executable}), torch 2.4.1\n"

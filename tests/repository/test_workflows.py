"""What make and the workflows run: releases, the site, a checkout of another owner, and where torch comes from."""

from __future__ import annotations

import functools
import http.server
import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest
from packaging.requirements import Requirement
from paths import ROOT

SCRIPTS = ROOT / "scripts" / "packaging"


@pytest.fixture
def scripts(monkeypatch):
    """Imports one of the scripts."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


# -- releases ----------------------------------------------------------------------------------------------------------


def test_files_are_a_release_if_the_tag_is_their_version_and_all_of_them_are_there(scripts, tmp_path):
    release = scripts("release")
    (version,) = re.findall(r'"(.+)"', (ROOT / "tensorizer" / "_version.py").read_text())
    wanted = release.wanted_names(version)
    assert len(wanted) == 1 + 2 * 6  # Pythons for each of two processors
    assert release.wrong_release(f"v{version}", version, wanted) == ""
    assert release.wrong_release("v9", version, wanted).startswith(
        f"the tag is v9, and tensorizer/_version.py says {version}"
    )
    other = "tensorizer-9-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert release.wrong_release(f"v{version}", version, {*wanted, other}) == f"does not belong to {version}: {other}"
    source = f"tensorizer-{version}.tar.gz"
    assert release.wrong_release(f"v{version}", version, wanted - {source}) == f"missing: {source}"
    for name in wanted:
        (tmp_path / name).touch()
    for tag, status in ((f"v{version}", 0), ("main", 1)):
        command = [sys.executable, str(SCRIPTS / "release.py"), "check", tag, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (status, status), done.stderr


def test_the_page_of_a_release_is_its_section_of_the_changelog(scripts):
    notes = scripts("release").notes
    text = (
        "# Changelog\n\n## [Unreleased]\n\n- new\n\n## 3.0.0 - 2027-01-02\n\n### Breaking\n\n- a\n\n## [2.0.0]\n\n- b\n"
    )
    assert notes(text, "v3.0.0") == "### Breaking\n\n- a"
    assert notes(text, "v2.0.0") == "- b"
    assert notes(text, "v3.0") == ""


def test_what_the_documents_install_is_this_version_and_not_an_earlier_package_of_the_same_name():
    (version,) = re.findall(r'"(.+)"', (ROOT / "tensorizer" / "_version.py").read_text())
    for name in ("README.md", "docs/install.md", "docs/index.md"):
        asked = re.findall(r"pip install --find-links dist '(tensorizer[^']+)'", (ROOT / name).read_text())
        assert asked, name
        for requirement in map(Requirement, asked):
            assert requirement.specifier.contains(version, prereleases=True), name
            assert not requirement.specifier.contains("2.12.1"), name


def test_the_filter_that_contributing_shows_matches_a_test():
    (suite,) = re.findall(r"--gtest_filter=(\w+)\.\*", (ROOT / ".github" / "CONTRIBUTING.md").read_text())
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "native").glob("test_*.cpp"))
    assert re.search(rf"^TEST(_F|_P)?\({suite}, ", sources, re.MULTILINE), suite


def test_the_table_of_contributing_names_files_and_words_that_find_tests():
    tests = ROOT / "tests"
    sources = {path.relative_to(tests).as_posix(): path.read_text() for path in tests.glob("*/test_*.py")}
    table = (ROOT / ".github" / "CONTRIBUTING.md").read_text().split("## Which tests belong to what")[1].split("##")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \| (.*) ?\|$", table, re.MULTILINE)[2:]
    assert len(rows) > 10
    for feature, places, words in rows:
        for place in re.findall(r"`([\w/*.]+)`", places):
            assert any(ROOT.glob(place)) or any(tests.glob(f"*/{place}")), (feature, place)
        for word in re.findall(r"`(\w+)`", words):
            named = (rf"def test_\w*{word}", f"class Test\\w*{word}")
            assert any(word in path or re.search("|".join(named), text, re.I) for path, text in sources.items()), word


def test_a_commit_needs_a_subject_of_area_and_deed_and_a_reason(tmp_path):
    pygrep, yaml = pytest.importorskip("pre_commit.languages.pygrep"), pytest.importorskip("yaml")
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = (hook for hook in repository["hooks"] if hook.get("stages") == ["commit-msg"])
    message = tmp_path / "message"

    def refused(text: str) -> bool:
        message.write_text(text)
        command = [sys.executable, "-m", pygrep.__name__, *hook["args"], hook["entry"], str(message)]
        return subprocess.run(command, capture_output=True, check=False).returncode != 0

    reason = "\n\nThe old way read each file twice.\n"
    for subject in (
        "load: reads each file once",
        ".github, docs: links lead",
        "x: " + 69 * "y",
        "Merge branch 'other'",
    ):
        assert not refused(subject + reason), subject
    for subject in ("load: reads each file once.", "reads each file once", "x: " + 70 * "y", "load:", ": reads"):
        assert refused(subject + reason), subject
    for body in ("", "\n", "\nThe old way read each file twice.\n", "\n\n# Please enter the commit message\n"):
        assert refused("load: reads each file once" + body), body


def test_make_lists_its_commands_below_four_headings():
    if shutil.which("make") is None:
        pytest.skip("no make")
    said = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^(\w+):$", said, re.MULTILINE) == ["Use", "Test", "Package", "GPU"]
    listed = re.findall(r"^  make ([\w-]+) +\S", said, re.MULTILINE)
    texts = [(ROOT / name).read_text() for name in ("Makefile", "scripts/gpu.mk")]
    assert sorted(listed) == sorted(re.findall(r"^([\w-]+):.*  ## ", "\n".join(texts), re.MULTILINE))


# -- the site ----------------------------------------------------------------------------------------------------------


def test_the_home_page_of_the_site_leads_to_the_highest_release(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("no git")
    tree, origin, programs = tmp_path / "tree", tmp_path / "origin", tmp_path / "programs"
    for name in ("site/publish.sh", "trusted.sh"):
        target = tree / "scripts" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, target)
    programs.mkdir()
    (programs / "make").write_text("#!/bin/sh\nmkdir -p site && echo page >site/index.html\n")
    (programs / "make").chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    plain |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def run(*command, folder=tree):
        environment = {**plain, "PATH": f"{programs}:{plain['PATH']}"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("git", "init", "--quiet", "--bare", str(origin), folder=tmp_path)
    run("git", "init", "--quiet")
    run("git", "remote", "add", "origin", str(origin))
    run("git", "add", "--all")
    run("git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "-m", "all")
    published = [("main", "main"), ("v3.0.0rc1", "v3.0.0rc1"), ("v3.0.0", "v3.0.0"), ("main", "v3.0.0")]
    published += [("v3.9.0", "v3.9.0"), ("v3.10.0", "v3.10.0"), ("v3.9.1", "v3.10.0"), ("v4.0.0rc1", "v3.10.0")]
    for name, home in published:
        run("bash", "scripts/site/publish.sh", name)
        assert f"url={home}/" in run("git", "show", "gh-pages:index.html", folder=origin), name
        assert run("git", "show", f"gh-pages:{name}/index.html", folder=origin) == "page\n"
    kept = run("git", "ls-tree", "--name-only", "gh-pages", folder=origin).split()
    assert set(kept) == {".nojekyll", "index.html", *(name for name, _ in published)}
    assert run("git", "worktree", "list").count("\n") == 1


# -- a checkout of another owner ---------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A repository that git says belongs to somebody else, with programs that only say what they do."""
    if not all(map(shutil.which, ("git", "make"))):
        pytest.skip("no git or no make")
    for name in [name for name in os.environ if name.startswith(("GIT_", "MAKE", "MFLAGS", "TORCH_INDEX"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    tree, programs = tmp_path / "tree", tmp_path / "programs"
    log = tmp_path / "log"
    log.touch()
    for name in ("Makefile", "scripts/gpu.mk", "requirements/constraints.txt", "scripts/trusted.sh"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "csrc").mkdir()
    (tree / "csrc" / "one.cpp").touch()
    inside = [f".venv/bin/{name}" for name in ("ruff", "codespell", "mypy", "python", "clang-format", "zizmor")]
    inside += ["scripts/tidy.sh", "scripts/system-packages.sh", "scripts/install-torch.sh"]
    for program in (tree / name for name in inside):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{program.name} $* $TORCH_INDEX" >>{log}\n')
        program.chmod(0o755)
    (tree / ".gitignore").write_text(".venv\n")
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        named = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(tree)]
        date = {"GIT_COMMITTER_DATE": "1700000000 +0000"}
        subprocess.run([*named, *command], check=True, env={**os.environ, **date})
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    refused = subprocess.run(["git", "-C", str(tree), "log"], capture_output=True, text=True, check=False)
    assert "dubious ownership" in refused.stderr
    return tree


def make(tree, *arguments, **environment):
    command = ["make", "--no-print-directory", "-C", str(tree), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_sources_of_a_checkout_of_another_owner_have_the_time_of_their_commit(scripts, foreign, monkeypatch):
    builder = scripts("build_wheel")
    monkeypatch.setattr(builder, "ROOT", foreign)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert builder.commit_time() == "1700000000"
    assert "csrc/one.cpp" in builder.source_names()
    assert not any(name.startswith(".venv") for name in builder.source_names())
    (foreign / ".git" / "HEAD").unlink()
    with pytest.raises(SystemExit, match=f"^git log in {re.escape(str(foreign))}: fatal: not a git repository"):
        builder.commit_time()


def test_lint_looks_at_all_files_of_a_checkout_of_another_owner_and_fails_where_git_does(foreign, tmp_path):
    (foreign / ".venv" / "stamp-torch").touch()
    (foreign / ".venv" / "stamp-dev").touch()
    ready = ["-o", ".venv/stamp-torch", "-o", ".venv/stamp-dev"]
    done = make(foreign, *ready, "lint")
    assert done.returncode == 0, done.stdout + done.stderr
    said = (tmp_path / "log").read_text()
    assert "clang-format --dry-run -Werror csrc/one.cpp " in said
    (checked,) = re.findall(r"^codespell (.*)$", said, re.MULTILINE)
    assert {"Makefile", "csrc/one.cpp"} <= set(checked.split())
    (foreign / ".git" / "HEAD").unlink()
    assert make(foreign, *ready, "lint").returncode != 0


def test_git_trusts_a_checkout_in_continuous_integration_and_keeps_the_settings_of_the_caller(foreign):
    probe = "--eval=probe: ; @git rev-parse HEAD && git config user.name"
    caller = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_VALUE_0": "caller"}
    done = make(foreign, probe, "probe", **caller)
    assert re.fullmatch(r"[0-9a-f]{40}\ncaller\n", done.stdout), done.stdout + done.stderr
    sourced = "set -eu; . scripts/trusted.sh; git rev-parse HEAD; git config user.name"
    for environment, name in ((caller, "caller"), ({}, "")):
        command = ["bash", "-c", sourced]
        run = subprocess.run(command, cwd=foreign, env={**os.environ, **environment}, capture_output=True, text=True)
        assert re.fullmatch(rf"[0-9a-f]{{40}}\n({name}\n)?", run.stdout), run.stderr


# -- torch -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path):
    """Makes a package index on loopback of files named ``torch-VERSION``; gives its address."""
    servers = []

    def start(name, *versions):
        page = tmp_path / name / "torch"
        page.mkdir(parents=True)
        for version in versions:
            stem = f"torch-{version}"
            with zipfile.ZipFile(page / f"{stem}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(
                    f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
                )
                wheel.writestr(
                    f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
                )
                wheel.writestr(f"{stem}.dist-info/RECORD", "")
        handler = functools.partial(QuietFolder, directory=str(tmp_path / name))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class QuietFolder(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_torch_comes_from_the_configured_index_or_from_that_of_cpu_builds_else_one_line_says_what_to_set(
    index, tmp_path
):
    def install(configured, cpu_builds):
        target = tmp_path / f"site-{configured[-5:]}-{cpu_builds[-5:]}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": configured, "PIP_TARGET": str(target)}
        command = [str(ROOT / "scripts" / "install-torch.sh"), sys.executable, "torch==2.13.0+cpu"]
        environment = {**clean, **pip, "TORCH_INDEX": cpu_builds}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done, [path.name for path in target.glob("*.dist-info")]

    both, ordinary, cpu, empty = (
        index(name, *versions)
        for name, versions in {
            "both": ["2.13.0", "2.13.0+cpu"],
            "ordinary": ["2.13.0"],
            "cpu": ["2.13.0+cpu"],
            "empty": [],
        }.items()
    )
    for configured, cpu_builds in ((both, ""), (both, empty), (ordinary, cpu)):
        done, found = install(configured, cpu_builds)
        assert (done.returncode, found) == (0, ["torch-2.13.0+cpu.dist-info"]), done.stderr
    for cpu_builds in (empty, "http://127.0.0.1:9", ""):
        done, found = install(ordinary, cpu_builds)
        assert (done.returncode, found, done.stderr.count("\n")) == (1, [], 1), done.stderr
        assert "set TORCH_INDEX to an index of CPU builds of torch, or TORCH=torch==2.13.0" in done.stderr


def test_make_takes_torch_from_the_public_index_of_cpu_builds(foreign, tmp_path):
    public = "https://download.pytorch.org/whl/cpu"
    mirror = "https://127.0.0.1/cpu"
    for environment, wanted in (({}, public), ({"TORCH_INDEX": ""}, ""), ({"TORCH_INDEX": mirror}, mirror)):
        (foreign / ".venv" / "stamp-torch").unlink(missing_ok=True)
        (tmp_path / "log").write_text("")
        done = make(foreign, ".venv/stamp-torch", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"install-torch.sh .venv/bin/python torch==2.13.0+cpu {wanted}\n" in (tmp_path / "log").read_text()


def test_gpu_check_runs_every_file_with_tests_for_a_gpu_and_collects_no_other():
    """The others import packages that a machine with a GPU need not have."""
    files = (ROOT / "tests").rglob("test_*.py")
    marked = {str(path.relative_to(ROOT)) for path in files if "pytest.mark." + "gpu" in path.read_text()}
    run = re.search(r"-m gpu((?:\s|\\|[\w/.])+)", (ROOT / "scripts" / "gpu_check.sh").read_text())
    assert set(re.findall(r"[\w/]+\.py", run[1])) == marked


def test_gpu_check_says_where_it_cannot_sanitize_before_it_builds(tmp_path):
    program = ROOT / "scripts" / "gpu_check.sh"
    for name in ("dirname", "mkdir"):
        (tmp_path / name).symlink_to(shutil.which(name))
    command = ["/bin/bash", str(program), "--sanitize", "memcheck"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "tensorizer: there is no compute-sanitizer here (it comes with CUDA's toolkit)\n"

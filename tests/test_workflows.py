"""Workflows and releases: they call what exists, publish what was tested, and work in a checkout of another owner."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts" / "packaging"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="these commands are for Linux")


@pytest.fixture
def scripts(monkeypatch):
    """Imports one of the scripts."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


# -- workflows ---------------------------------------------------------------------------------------------------------


def steps_of(workflow):
    yaml = pytest.importorskip("yaml")
    for name, job in yaml.safe_load(workflow.read_text())["jobs"].items():
        for step in job["steps"]:
            yield name, step


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_actions_by_commit_and_hold_no_logic(workflow):
    for job, step in steps_of(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), (job, step)
            if step["uses"].startswith("actions/checkout") and workflow.stem != "docs":
                assert step["with"]["persist-credentials"] is False, job
        else:
            assert len(step["run"].strip().splitlines()) == 1, f"{job}: logic belongs into scripts/"
            for script in re.findall(r"(?:scripts|\.ci)/[\w./-]+", step["run"]):
                assert os.access(ROOT / script, os.X_OK), script
            for target in re.findall(r"^make ([\w-]+)", step["run"]):
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_workflows_give_no_job_more_rights_than_it_needs():
    yaml = pytest.importorskip("yaml")
    allowed = {
        ("wheels", "publish"): {"contents": "read", "id-token": "write"},
        ("docs", "publish"): {"contents": "write"},
    }
    for workflow in WORKFLOWS:
        content = yaml.safe_load(workflow.read_text())
        assert content["permissions"] == {"contents": "read"}, workflow.name
        for name, job in content["jobs"].items():
            assert job.get("permissions") == allowed.get((workflow.stem, name)), (workflow.name, name)


def installs_torch(command: str) -> bool:
    """Whether a step of a workflow makes an environment with torch, by itself or in a script that it runs."""
    if re.search(r"^make |\.ci/run", command):
        return True
    named = re.findall(r"scripts/[\w./-]+", command)
    return any(re.search(r"TORCH_INDEX|^make |cibuildwheel", (ROOT / name).read_text(), re.MULTILINE) for name in named)


def test_workflows_that_install_torch_name_its_index_and_contributing_explains_every_setting():
    yaml = pytest.importorskip("yaml")
    explained = (ROOT / "CONTRIBUTING.md").read_text()
    installing = set()
    for workflow in WORKFLOWS:
        text = workflow.read_text()
        if any(installs_torch(step.get("run", "")) for _, step in steps_of(workflow)):
            installing.add(workflow.stem)
            assert yaml.safe_load(text)["env"]["TORCH_INDEX"] == "${{ vars.TORCH_INDEX }}", workflow.name
        for setting in [*re.findall(r"vars\.(\w+)", text), *re.findall(r"environment: (\w+)", text)]:
            assert f"`{setting}`" in explained, (workflow.name, setting)
    assert installing == {"docs", "tests", "wheels"}


def test_only_a_tag_is_published_and_by_the_workflow_that_built_and_tested_it():
    yaml = pytest.importorskip("yaml")
    publishing = [w for w in WORKFLOWS if "gh-action-pypi-publish" in w.read_text()]
    assert [workflow.stem for workflow in publishing] == ["wheels"]
    jobs = yaml.safe_load(publishing[0].read_text())["jobs"]
    job = jobs["publish"]
    assert job["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(job["needs"]) == {name for name, other in jobs.items() if "if" not in other}
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ['scripts/packaging/check_release.py "$GITHUB_REF_NAME" dist'], "it builds nothing"


# -- releases ----------------------------------------------------------------------------------------------------------


def test_files_are_a_release_if_the_tag_is_their_version_and_all_of_them_are_there(scripts, tmp_path):
    release = scripts("check_release")
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
        command = [sys.executable, str(SCRIPTS / "check_release.py"), tag, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (status, status), done.stderr


def test_documents_install_the_wheel_of_this_version_whatever_else_lies_beside_it():
    (version,) = re.findall(r'"(.+)"', (ROOT / "tensorizer" / "_version.py").read_text())
    for name in ("README.md", "docs/install.md", "docs/index.md"):
        text = (ROOT / name).read_text()
        assert f"pip install --find-links dist 'tensorizer>={version}'" in text, name
        assert "dist/tensorizer-*.whl" not in text, name


def test_the_filter_that_contributing_shows_matches_a_test():
    (suite,) = re.findall(r"--gtest_filter=(\w+)\.\*", (ROOT / "CONTRIBUTING.md").read_text())
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "native").glob("test_*.cpp"))
    assert re.search(rf"^TEST(_F|_P)?\({suite}, ", sources, re.MULTILINE), suite


# -- the site ----------------------------------------------------------------------------------------------------------


def test_the_home_page_of_the_site_leads_to_the_highest_release(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("no git")
    tree, origin, programs = tmp_path / "tree", tmp_path / "origin", tmp_path / "programs"
    for name in ("publish_docs.sh", "../trusted.sh"):
        target = tree / "scripts" / "packaging" / name
        (tree / "scripts" / "packaging").mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPTS / name, target)
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
        run("bash", "scripts/packaging/publish_docs.sh", name)
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
    for name in ("Makefile", "constraints.txt", ".ci/run", "scripts/trusted.sh"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "csrc").mkdir()
    (tree / "csrc" / "one.cpp").touch()
    inside = [".venv/bin/ruff", ".venv/bin/codespell", ".venv/bin/mypy", ".venv/bin/python"]
    inside += ["scripts/tidy.sh", "scripts/system-packages.sh", "scripts/no-torch.sh"]
    for program in [*(tree / name for name in inside), programs / "clang-format"]:
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{program.name} $*" >>{log}\n')
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
    builder = scripts("build_wheels")
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
    assert "clang-format --dry-run -Werror csrc/one.cpp\n" in said
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
    assert ". scripts/trusted.sh\n" in (ROOT / ".ci" / "run").read_text()


def test_make_takes_torch_from_the_index_that_is_named(foreign, tmp_path):
    address = "https://127.0.0.1/cpu"
    for environment, wanted in (({}, ""), ({"TORCH_INDEX": ""}, ""), ({"TORCH_INDEX": address}, address)):
        (foreign / ".venv" / "stamp-torch").unlink(missing_ok=True)
        (tmp_path / "log").write_text("")
        done = make(foreign, ".venv/stamp-torch", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        (torch_line,) = re.findall(r"^python .* install torch==\S+(.*)$", (tmp_path / "log").read_text(), re.MULTILINE)
        assert torch_line.split() == (["--extra-index-url", wanted] if wanted else [])
    assert "TORCH_INDEX=" in (ROOT / "scripts" / "no-torch.sh").read_text()

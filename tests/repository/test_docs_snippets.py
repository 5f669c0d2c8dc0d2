"""Every Python snippet of README and guides runs as printed; commands and links lead to what exists."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple, Optional

import pytest
import torch
from paths import ROOT
from servers.file_server import serve_folder

from tensorizer import errors

DOCUMENTS = [ROOT / "README.md", ROOT / "examples" / "README.md"]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / ".github").glob("*.md"))]
NEED_TRANSFORMERS = {"huggingface.md", "weight-sync.md"}

# A snippet is left out by a comment before it that says why.
_FENCE = re.compile(
    r"(?:<!-- not executed: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


# Object stores, Redis and other file systems have suites of their own, with real servers.
_ELSEWHERE = re.compile(r"""["'](?:s3|rediss?|gs|az|hf|memory)://""")


class Snippet(NamedTuple):
    line: int
    language: str
    code: str
    reason: Optional[str]  # why it is not executed

    @property
    def runs(self) -> bool:
        if '"cuda:1"' in self.code and torch.cuda.device_count() < 2:
            return False
        return self.language == "python" and not self.reason and not _ELSEWHERE.search(self.code)


def snippets(path: Path) -> list[Snippet]:
    text = path.read_text(encoding="utf-8")
    return [
        Snippet(text.count("\n", 0, match.start("code")) + 1, match["language"], match["code"], match["reason"])
        for match in _FENCE.finditer(text)
    ]


def with_python(path: Path) -> bool:
    return any(snippet.runs for snippet in snippets(path))


@pytest.fixture
def web(tmp_path):
    """Stands for the hosts that the documents name; serves the folder in which snippets run."""
    with serve_folder(tmp_path) as address:
        yield address


def document_parameters():
    for path in DOCUMENTS:
        if with_python(path):
            group = "transformers" if path.name in NEED_TRANSFORMERS else path.name
            yield pytest.param(path, id=path.name, marks=pytest.mark.xdist_group(group))


# In a process of their own: they set log levels, defaults and environment variables.
RUN_SNIPPETS = """
import json, sys, warnings
warnings.simplefilter("default")
import torch
from tensorizer import TensorSerializer
for name in ("model.tensors", "gpt.tensors"):  # what a reader has been given
    with TensorSerializer(name) as serializer:
        serializer.write_module(torch.nn.Linear(4, 4))
namespace = {"__name__": "snippets"}
document = sys.argv[1]
for line, code in json.load(open("snippets.json")):
    # compiled with the document's name and line, so that a failure points there
    exec(compile("\\n" * (line - 1) + code, document, "exec"), namespace)
"""


@pytest.mark.parametrize("path", list(document_parameters()))
def test_the_snippets_of_a_document_run_one_after_the_other(path, tmp_path, web, fresh_process):
    if path.name in NEED_TRANSFORMERS:
        for module in ("transformers", "accelerate", "diffusers"):
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{module} is not installed")
    code = [
        (snippet.line, snippet.code.replace("https://models.example", web))
        for snippet in snippets(path)
        if snippet.runs
    ]
    (tmp_path / "snippets.json").write_text(json.dumps(code))
    result = fresh_process(f"import os; os.chdir({str(tmp_path)!r})\n{RUN_SNIPPETS}", path, timeout=250)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_snippets_that_are_not_executed_are_at_least_python(path):
    for snippet in snippets(path):
        if snippet.language == "python":
            compile(snippet.code, str(path), "exec")


def test_few_snippets_are_left_out():
    everything = [snippet for path in DOCUMENTS for snippet in snippets(path) if snippet.language == "python"]
    elsewhere = [found[0] for one in everything if (found := re.match(r"tests/\S+\.py", one.reason or ""))]
    assert all((ROOT / path).is_file() for path in elsewhere)
    left_out = [one for one in everything if not one.runs and not (one.reason or "").startswith("tests/")]
    assert len(everything) > 30
    assert len(left_out) <= len(everything) // 4


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_name_scripts_and_targets_that_exist(path):
    text = path.read_text(encoding="utf-8")
    for script in re.findall(r"`?(examples/[\w/.-]+\.(?:py|ipynb))", text):
        assert (ROOT / script).exists(), script
    commands = "".join((ROOT / name).read_text() for name in ("Makefile", "scripts/gpu.mk"))
    targets = set(re.findall(r"^([a-z0-9-]+)(?: [a-z0-9-]+)*:", commands, re.MULTILINE))
    for target in re.findall(r"(?:^\$ |`)make ([a-z0-9-]+)", text, re.MULTILINE):
        assert target in targets, target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path):
    def anchors(target):
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_every_folder_and_file_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w./]+/)` \|.*\| `([\w./]+)` \|$", text, re.MULTILINE))
    assert len(rows) > 20
    folders = {path.relative_to(ROOT).as_posix() + "/" for path in (ROOT / "tensorizer").iterdir() if path.is_dir()}
    assert folders - rows.keys() <= {"tensorizer/__pycache__/"}
    places = [ROOT, ROOT / "docs", ROOT / "csrc", ROOT / "tensorizer"]
    for name in re.findall(r"`([\w./]+(?:\.(?:md|py|cpp|h|sh)|/))`", text):
        assert any((place / name).exists() for place in places), name


def test_extras_that_the_documents_name_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))
    assert "fsspec" in extras
    for path in [*DOCUMENTS, *(ROOT / "tensorizer").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"\btensorizer\[([\w-]+)\]|\bextra `\[([\w-]+)\]`", text):
            assert (name[0] or name[1]) in extras, f"{path.relative_to(ROOT)}: {name}"


def test_every_exception_is_in_the_guide_to_errors():
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name in errors.__all__:
        assert re.search(rf"\b{name}`", text), name


def test_every_guide_is_in_the_navigation():
    navigation = (ROOT / "scripts" / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").glob("*.md")):
        assert re.search(rf"[ :]{re.escape(path.name)}$", navigation, re.MULTILINE), path.name

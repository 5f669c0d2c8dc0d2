"""Repositories of a hub on loopback: one revision for all files, the cache, offline, and who gets the token."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny_models
from servers import file_server, hub_repository, serving

import tensorizer
from tensorizer import FormatError, SigningKey, StreamError, StreamNotFoundError
from tensorizer._io.call_options import PLAIN
from tensorizer.integrations._hf import folders
from tensorizer.integrations.huggingface import from_pretrained, save_pretrained

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]

FIRST, SECOND = "1" * 40, "2" * 40
SIGNER = SigningKey.from_bytes(bytes(range(32)))

# In a process of its own: where the hub is, is read when huggingface_hub is imported.
PROGRAM = """
import json, os, sys
import huggingface_hub
from huggingface_hub import constants
from tensorizer import PublicKey
from tensorizer.integrations.huggingface import from_pretrained

TOKEN, FIRST, SECOND, KEY, NODE = sys.argv[1:]
steps = []

def load(what, *arguments, **keywords):
    try:
        model = from_pretrained(*arguments, **keywords)
        answer = [float(model.model.norm.weight[0]), model.config.name_or_path]
    except Exception as error:
        answer = [type(error).__name__, str(error)]
    print("STEP", json.dumps([what, answer]), flush=True)
    sys.stdin.readline()

load("main", "org/tiny", token=TOKEN)
load("main again", "org/tiny", token=TOKEN)
load("a commit", "org/tiny", revision=FIRST, token=TOKEN)
load("from the cache", "org/tiny", local_files_only=True)
load("not in the cache", "org/tiny", local_files_only=True, revision="3" * 40)
constants.HF_HUB_OFFLINE = True
load("offline", "hf://org/tiny")
load("offline, not cached", "org/other")
load("offline, streamed", "org/tiny", cache=False)
constants.HF_HUB_OFFLINE = False
load("streamed", f"hf://org/tiny@{FIRST}", token=TOKEN, cache=False)
load("shards streamed", f"hf://org/tiny@{FIRST}/shards", token=TOKEN, cache=False)
load("shards", "hf://org/tiny/shards", token=TOKEN, revision=FIRST)
signed = {"token": TOKEN, "revision": FIRST, "public_key": PublicKey.from_bytes(bytes.fromhex(KEY))}
load("signed shards", "hf://org/tiny/shards", **signed)
load("signed shards streamed", "hf://org/tiny/shards", cache=False, **signed)
load("unsigned", "hf://org/tiny", **signed)
load("converted", f"hf://org/tiny@{FIRST}/converted", token=TOKEN)
load("converted, offline", f"hf://org/tiny@{FIRST}/converted", local_files_only=True)
load("two sets", f"hf://org/tiny@{FIRST}/two", token=TOKEN)
load("without a token", "org/tiny", token=False)
load("no such revision", "org/tiny", revision="nothing", token=TOKEN)
load("two revisions", f"hf://org/tiny@{FIRST}", revision=SECOND, token=TOKEN)
os.environ.update(TENSORIZER_CACHE=NODE, TENSORIZER_CACHE_MIN_FREE="0")
load("streamed, kept on the node", f"hf://org/tiny@{FIRST}", token=TOKEN, cache=False)
os.environ["TENSORIZER_CACHE_OFFLINE"] = "1"
load("from the node", f"hf://org/tiny@{FIRST}", token=TOKEN, cache=False)
"""


@pytest.fixture(scope="module")
def commits(tmp_path_factory):
    """Two commits, which a parameter tells apart: 1.0 and 2.0."""
    found = {}
    for value, commit in ((1.0, FIRST), (2.0, SECOND)):
        folder = tmp_path_factory.mktemp(f"commit{value}")
        model = tiny_models.llama()
        model.model.norm.weight.data.fill_(value)
        save_pretrained(model, folder, tokenizer=tiny_models.tokenizer())
        save_pretrained(model, folder / "shards", max_shard_size="20KB")
        for shard in (folder / "shards").glob("*.tensors"):
            tensorizer.sign(shard, SIGNER)
        for name in ("converted", "two"):
            model.save_pretrained(folder / name)
        tensorizer.convert(folder / "converted", folder / "converted")
        save_pretrained(model, folder / "two")
        found[commit] = folder
    return found


def test_a_repository_is_read_at_one_commit_and_the_token_goes_to_the_hub_alone(commits, tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    node = tmp_path / "node"
    with hub_repository.serve_hub(commits, FIRST) as server, (tmp_path / "stderr").open("w") as stderr:
        server.moves_to = SECOND  # once somebody has asked what the main branch is
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "no_proxy"):
            environment.pop(name, None)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, hub_repository.TOKEN, FIRST, SECOND, str(SIGNER.public_key), str(node)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        answers, requests = {}, {}
        with process:
            for line in process.stdout:
                if line.startswith("STEP "):
                    what, answer = json.loads(line[5:])
                    answers[what], requests[what] = answer, server.requests[:]
                    server.requests.clear()
                    process.stdin.write("\n")
                    process.stdin.flush()
        assert process.returncode == 0, (tmp_path / "stderr").read_text()[-3000:]

    assert answers["main"] == [1.0, "org/tiny"]  # though the branch moved in the middle of it
    asked = [request.path for request in requests["main"]]
    asked = [path for path in asked if "org" in path]
    of_the_branch = [path for path in asked if path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main")]
    assert len(of_the_branch) == 1
    assert all(FIRST in path for path in asked if path not in of_the_branch)
    assert not any("tokenizer" in path for path in asked)  # nothing that a model does not need

    assert answers["main again"] == [2.0, "org/tiny"]
    assert answers["a commit"] == [1.0, "org/tiny"]
    asked = [request.path for request in requests["a commit"] if "org" in request.path]
    assert asked
    assert all(path.startswith("/api/models/org/tiny") and FIRST in path for path in asked)  # nothing is fetched again
    assert answers["from the cache"] == answers["offline"] == [2.0, "org/tiny"]
    assert answers["not in the cache"][0] == answers["offline, not cached"][0] == "FileNotFoundError"
    assert answers["offline, streamed"][0] == "ValueError"
    for what in ("from the cache", "not in the cache", "offline", "offline, not cached", "offline, streamed"):
        assert requests[what] == [], what

    for what in ("streamed", "shards streamed", "shards", "signed shards streamed"):
        assert answers[what] == [1.0, "org/tiny"], what
        assert any(request.host == "storage" for request in requests[what]), what
    assert answers["signed shards"] == [1.0, "org/tiny"]
    assert answers["converted"] == answers["converted, offline"] == [1.0, "org/tiny"]
    stored = [request.path for request in requests["converted"] if request.host == "storage"]
    assert stored == [f"/{FIRST}/converted/model.tensors"]  # its source is compared without being sent
    assert answers["two sets"][0] == "FormatError"
    assert "both model.tensors and model.safetensors" in answers["two sets"][1]
    assert requests["unsigned"]
    assert answers["unsigned"][0] == "AuthenticationError"
    assert answers["without a token"][0] == answers["no such revision"][0] == "FileNotFoundError"
    assert answers["two revisions"][0] == "ValueError"

    assert answers["streamed, kept on the node"] == answers["from the node"] == [1.0, "org/tiny"]
    assert not [request for request in requests["from the node"] if request.host == "storage"]
    weights = (commits[FIRST] / "model.tensors").read_bytes()
    assert [path for path in node.rglob("data") if path.read_bytes() == weights]
    assert not [
        path for path in node.rglob("*") if path.is_file() and hub_repository.TOKEN.encode() in path.read_bytes()
    ]

    every = [request for step in requests.values() for request in step]
    assert {request.token for request in every if request.host == "storage"} == {""}
    by_hub = {request.token for what, step in requests.items() if what != "without a token" for request in step}
    assert by_hub == {"", hub_repository.TOKEN}
    assert not [text for answer in answers.values() for text in answer if hub_repository.TOKEN in str(text)]
    cached = [path.name for path in (tmp_path / "home").rglob("*") if path.is_symlink()]
    assert cached.count("model.tensors") == 4  # what was streamed is not there a second time


def test_files_of_a_prefix_are_asked_for_by_their_names_and_what_is_listed_has_to_be_there(tmp_path):
    names = ["a b.json", "a#b.json", "a?b.json", "a%20b.json", "é/c.json"]
    for name in ["a", *names]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'"{name}"')
    (tmp_path / folders.MANIFEST).write_text(json.dumps(names))
    with file_server.serve_folder(tmp_path) as url:
        for listing in (None, names):
            with contextlib.closing(folders.RemoteFolder(url, PLAIN, names=listing)) as folder:
                files = folder.fetch_all()
                assert all((files / name).read_text() == f'"{name}"' for name in names)
        gone = contextlib.closing(folders.RemoteFolder(url, PLAIN, "org/name", ["config.json"]))
        with gone as folder, pytest.raises(StreamNotFoundError, match=r"org/name: .*config\.json"):
            folder.read_json("config.json")


def test_what_names_a_repository_and_what_does_not():
    assert folders.is_repo_id("org/name")
    assert folders.is_repo_id("gpt2")
    for text in ("/abs/path", "./here", "a/b/c", "a//b", "..", "a/..", "", "a b"):
        assert not folders.is_repo_id(text), text
    assert folders.parse_uri("hf://org/name") == ("org/name", None, "")
    assert folders.parse_uri("hf://models/org/name@v1/sub/folder") == ("org/name", "v1", "sub/folder")
    assert folders.parse_uri("hf://org/name@refs%2Fpr%2F1") == ("org/name", "refs/pr/1", "")
    for uri in (
        "hf://name",
        "hf://buckets/org/bucket",
        "hf://buckets/org/bucket/folder",
        "hf://datasets/org/name",
        "hf://org",
    ):
        with pytest.raises(ValueError, match="expected a model repository, hf://"):
            folders.parse_uri(uri)


def test_a_bucket_of_the_hub_is_refused_with_what_is_supported():
    for uri in ("hf://buckets/org/bucket", "hf://buckets/org/bucket/models/llama"):
        with pytest.raises(ValueError, match=r"model repository, hf://org/name.*buckets of the hub"):
            from_pretrained(uri)


def test_verify_hub_refuses_other_places_also_if_nothing_has_used_the_hub_before(fresh_process):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    program = """
from tensorizer._io.hub_cache import stated_sha256
try:
    stated_sha256("https://example.invalid/model.safetensors")
except ValueError as error:
    print(error)
"""
    done = fresh_process(program)
    assert "example.invalid/model.safetensors: expected a file of the hub" in done.stdout, done.stderr


def test_a_hub_that_names_no_commit_is_not_read(monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha=None, siblings=[]))
    with pytest.raises(StreamError, match=r"org/name@v1: .*commit"):  # what it calls main instead may be another model
        from_pretrained("org/name", revision="v1", cache=False)


def test_a_revision_stays_inside_of_the_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for revision in ("../../../outside", "/outside", "a//b"):
        with pytest.raises(ValueError, match="revision"):
            from_pretrained("org/name", revision=revision)
    assert list(tmp_path.rglob("outside")) == []


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"[" * 100_000], ids=["cut", "list", "bytes", "deep"])
def test_an_index_of_shards_in_the_cache_that_is_none_is_named(tmp_path, monkeypatch, text):
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    save_pretrained(tiny_models.llama(), repository / "snapshots" / FIRST, max_shard_size="20KB")
    (repository / "snapshots" / FIRST / "model.tensors.index.json").write_bytes(text)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(FIRST)
    with pytest.raises(FormatError, match=r"model\.tensors\.index\.json"):
        from_pretrained("org/name", local_files_only=True)


# --- a hub that does not answer --------------------------------------------------------------------------------------

# Where the hub is, is read when huggingface_hub is imported.
DOWN = """
import sys, warnings
import tensorizer
from tensorizer import TensorDeserializer, load_file
from tensorizer.integrations.huggingface import from_pretrained

def keys():
    with TensorDeserializer("hf://org/tiny", device="cpu") as file:
        return sorted(file)

doors = {
    "from_pretrained": lambda: from_pretrained("org/tiny") and True,
    "from_pretrained of a URI": lambda: from_pretrained("hf://org/tiny@main") and True,
    "TensorDeserializer": keys,
    "load_file": lambda: load_file("hf://org/tiny/model.safetensors"),
    "load_file of a revision": lambda: load_file("hf://org/tiny@main/model.safetensors"),
    "inspect": lambda: tensorizer.inspect("hf://org/tiny").tensors,
    "convert": lambda: tensorizer.convert("hf://org/tiny", sys.argv[1] + "/made.tensors")["tensors"],
    "verify": lambda: tensorizer.verify("hf://org/tiny").unverified,
    "another revision": lambda: load_file("hf://org/tiny@v2/model.safetensors"),
    "a file that is not in the cache": lambda: load_file("hf://org/tiny/other.safetensors"),
    "another repository": lambda: from_pretrained("org/other"),
}
for name, door in doors.items():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            answer = "right" if door() else "nothing"
        except OSError as error:
            answer = "not found" if isinstance(error, FileNotFoundError) else "error"
    told = sum("the hub cannot be reached" in str(one.message) for one in seen)
    print("STEP", name, "|", answer, told, flush=True)
"""


@contextlib.contextmanager
def hub_that(answers):
    """The environment of a process whose hub must not be asked, refuses connections, or answers 503."""
    if answers == "offline":
        yield {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    elif answers == "refused":
        yield {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    else:

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_error(503)

            do_HEAD = do_GET

            def log_message(self, *arguments):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        with serving(server):
            yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}


@pytest.mark.parametrize("answers", ["offline", "refused", "503"])
def test_a_repository_in_the_cache_loads_while_the_hub_is_down_or_must_not_be_asked(
    tmp_path, answers, fresh_process, monkeypatch
):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    repository = tmp_path / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(FIRST)
    tiny_models.llama().save_pretrained(repository / "snapshots" / FIRST)
    with hub_that(answers) as where:
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**where, "HF_HOME": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        done = fresh_process(DOWN, tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line[5:].split(" | ") for line in done.stdout.splitlines() if line.startswith("STEP ")]
    found = {name: (answer, int(told)) for name, (answer, told) in ((n, rest.rsplit(" ", 1)) for n, rest in lines)}
    assert len(found) == 11
    for name in list(found)[:8]:
        assert found[name][0] == "right", (name, done.stderr[-3000:])
    assert found["a file that is not in the cache"][0] == "not found"
    assert found["another revision"][0] == ("not found" if answers == "offline" else "error")
    assert found["another repository"][0] == ("not found" if answers == "offline" else "error")
    told = [count for _, count in found.values()]
    assert max(told) == (0 if answers == "offline" else 1)
    assert found["from_pretrained"][1] == found["TensorDeserializer"][1] == max(told)

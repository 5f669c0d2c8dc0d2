"""A hub with one repository on loopback, for huggingface_hub; it redirects large files to another host."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import serving

LARGE = (".tensors", ".safetensors", ".bin")
TOKEN = "hf_loopback_token"


class Request(NamedTuple):
    """One request."""

    host: str  # "hub" or "storage"
    method: str
    path: str
    token: str  # of the Authorization header, or empty


class Hub:
    """The commits of ``org/tiny``: maps the name of a commit to the folder of its files.

    Attributes:
        main: The commit of the main branch.
        moves_to: The commit to which the main branch moves after the first request for it; ``None`` if it stays.
        requests: The requests to both hosts.
    """

    def __init__(self, commits: dict[str, Path], main: str) -> None:
        self.commits, self.main = commits, main
        self.moves_to = None
        self.private = True
        self.requests: list[Request] = []
        self.url = self.storage = ""

    def resolve(self, revision: str) -> str:
        if revision != "main":
            return revision
        commit = self.main
        if self.moves_to is not None:
            self.main, self.moves_to = self.moves_to, None
        return commit


@contextlib.contextmanager
def serve_hub(commits: dict[str, Path], main: str) -> Iterator[Hub]:
    """Serves on two ports until the block ends."""
    hub = Hub(commits, main)
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, name)) for name in ("hub", "storage")]
    hub.url, hub.storage = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    with serving(*servers):
        yield hub


def _entry(path: Path, folder: Path) -> dict:
    """The hub's entry for a file in the tree of a commit."""
    digest, nbytes = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
    entry = {"type": "file", "oid": digest, "size": nbytes, "path": path.relative_to(folder).as_posix()}
    return {**entry, "lfs": {"oid": digest, "size": nbytes, "pointerSize": 100}} if path.name.endswith(LARGE) else entry


def _handler(hub: Hub, host: str) -> type:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()

        def answer(self):
            path = self.path.split("?")[0]
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            hub.requests.append(Request(host, self.command, path, token))
            if host == "storage":
                self.send_file(hub.commits[path.split("/")[1]] / path.split("/", 2)[2])
                return
            if hub.private and token != TOKEN:
                self.send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"})
                return
            asked = re.fullmatch(r"/api/models/org/tiny(?:/revision/(.+))?", path)
            file = re.fullmatch(r"/org/tiny/resolve/([^/]+)/(.+)", path)
            listed = re.fullmatch(r"/api/models/org/tiny/tree/(.+)", path)
            if listed:
                self.send_tree(listed[1])
            elif asked:
                self.send_info(asked[1] or "main")
            elif file:
                self.send_file_of(hub.resolve(file[1]), file[2])
            else:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def send_info(self, revision):
            commit = hub.resolve(revision)
            if commit not in hub.commits:
                self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            folder = hub.commits[commit]
            names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
            content = {"id": "org/tiny", "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def send_tree(self, revision):
            folder = hub.commits[hub.resolve(revision)]
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            self.send(
                200, json.dumps([_entry(path, folder) for path in files]).encode(), {"Content-Type": "application/json"}
            )

        def send_file_of(self, commit, name):
            path = hub.commits.get(commit, Path("/nowhere")) / name
            if not path.is_file():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                return
            if not name.endswith(LARGE):
                self.send_file(path, {"X-Repo-Commit": commit})
                return
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            large = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(path.stat().st_size), "X-Repo-Commit": commit}
            self.send(302, b"", {**large, "Location": f"{hub.storage}/{commit}/{name}"})

        def send_file(self, path, headers=None):
            content = path.read_bytes()
            etag = hashlib.sha256(content).hexdigest()
            headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", **(headers or {})}
            ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if ranged:
                begin, end = int(ranged[1]), min(int(ranged[2] or len(content) - 1), len(content) - 1)
                headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
                self.send(206, content[begin : end + 1], headers)
            else:
                self.send(200, content, headers)

        def send(self, status, content, headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    return Handler

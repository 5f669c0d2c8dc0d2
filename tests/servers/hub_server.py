"""The part of the Hugging Face hub's interface that reading files of one repository needs, on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import json
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Optional

from . import Server, serving

__all__ = ["HubServer"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(Server):
    """Serves one repository.

    Attributes:
        endpoint: For ``HF_ENDPOINT``.
        files: Content by path, all of them large files: the hub states their SHA-256.
        tokens: The ``Authorization`` headers of the requests.
    """

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        self.files = files
        self.tokens: set[Optional[str]] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                hub.tokens.add(self.headers["Authorization"])
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
                api, resolve = f"/api/models/{repository}", f"/{repository}/resolve/"
                if path.startswith(f"{api}/paths-info/"):
                    asked = (
                        json.loads(body)["paths"] if body[:1] == b"{" else urllib.parse.parse_qs(body.decode())["paths"]
                    )
                    self.answer(200, [hub.entry(name) for name in asked if name in hub.files])
                elif path.startswith(f"{api}/tree/"):
                    self.answer(200, [hub.entry(name) for name in hub.files])
                elif path == api or path.startswith(f"{api}/revision/"):
                    self.answer(200, {"id": repository, "sha": COMMIT, "siblings": []})
                elif path.startswith(resolve) and path[len(resolve) :].partition("/")[2] in hub.files:
                    self.send_file(hub.files[path[len(resolve) :].partition("/")[2]])
                else:
                    self.answer(404, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})

            do_GET = do_HEAD = do_POST = handle_any

            def answer(self, status: int, content: Any, headers: Optional[dict[str, str]] = None) -> None:
                self.send(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

            def send_file(self, content: bytes) -> None:
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
                asked = self.headers["Range"]
                if asked is None:
                    self.send(200, content, headers)
                    return
                begin, _, end = asked.removeprefix("bytes=").partition("-")
                piece = content[int(begin) : int(end) + 1 if end else None]
                last = int(begin) + len(piece) - 1
                self.send(206, piece, {**headers, "Content-Range": f"bytes {begin}-{last}/{len(content)}"})

            def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._served = contextlib.ExitStack()

    def entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        digest = hashlib.sha256(content).hexdigest()
        lfs = {"oid": digest, "size": len(content), "pointerSize": 130}
        return {"type": "file", "path": name, "size": len(content), "oid": COMMIT, "lfs": lfs}

    def start(self) -> None:
        self._served.enter_context(serving(self._server))

    def stop(self) -> None:
        self._served.close()

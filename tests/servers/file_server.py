"""A well-behaved HTTP/1.1 server of one folder, with single ranges."""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from . import serving


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    tells_version = False

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin, end = (int(wanted[1]), int(wanted[2] or len(data)) + 1) if wanted else (0, len(data))
        part = data[begin:end]
        satisfied = begin < len(data) or not wanted
        self.send_response((206 if wanted else 200) if satisfied else 416)
        if not satisfied:
            self.send_header("Content-Range", f"bytes */{len(data)}")
        elif wanted:
            self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(data)}")
        if self.tells_version:
            self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@contextlib.contextmanager
def serve_folder(folder: Path, tells_version: bool = False, context: Optional[ssl.SSLContext] = None) -> Iterator[str]:
    """A block in which a server serves ``folder``; gives its address. The server can send the version of each file, and
    speaks TLS with a `context`."""
    kind = type("Handler", (_Handler,), {"tells_version": tells_version})
    handler = functools.partial(kind, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with serving(server):
        yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}"

"""nginx on loopback: plain, or TLS with HTTP/2, over a folder of files."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from .certificates import Certificates

PROGRAM = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def nginx(
    work: Path, root: Path, *, tls: Optional[Certificates] = None, http2: bool = False, server_lines: str = ""
) -> Iterator[str]:
    """Serves ``root``; yields the URL without a final slash.

    Args:
        work: An empty folder for nginx's own files.
        root: The folder that nginx serves.
        tls: The certificates with which nginx serves HTTPS.
        http2: Offer HTTP/2 over TLS.
        server_lines: Further directives of the server block.
    """
    assert PROGRAM is not None, "nginx is not installed"
    for attempt in range(3):
        port = _free_port()  # another program may take it before nginx does
        process = _start(work, root, port, tls, http2, server_lines)
        if _answers(process, port):
            break
        process.kill()
        process.wait(10)
        assert attempt < 2, f"nginx does not start: {(work / 'error.log').read_text()}"
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _start(
    work: Path, root: Path, port: int, tls: Optional[Certificates], http2: bool, server_lines: str
) -> subprocess.Popen[bytes]:
    listen = f"listen 127.0.0.1:{port}"
    if tls:
        listen += " ssl" + (" http2" if http2 else "")
        listen += f"; ssl_certificate {tls.chain}; ssl_certificate_key {tls.key}"
    folders = "".join(
        f"{kind}_temp_path {work}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""  # the worker must be able to read the temporary folder
    configuration = work / "nginx.conf"
    configuration.write_text(
        f"{user} daemon off; worker_processes 1; pid {work}/pid; error_log {work}/error.log;\n"
        "events { worker_connections 512; }\n"
        f"http {{ access_log {work}/access.log; {folders} sendfile on; tcp_nopush on; keepalive_timeout 30;\n"
        f"server {{ {listen}; root {root}; {server_lines} }} }}\n"
    )
    return subprocess.Popen(
        [str(PROGRAM), "-p", str(work), "-e", str(work / "error.log"), "-c", str(configuration)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.02)
    return False

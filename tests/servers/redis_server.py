"""A real ``redis-server`` on loopback for tests: plain, with a password, with TLS, on a Unix socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

from . import Server

__all__ = ["RedisServer", "free_port", "make_certificate", "redis_is_installed"]


def redis_is_installed() -> bool:
    return shutil.which("redis-server") is not None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether a server answers."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and 127.0.0.1: (certificate, key)."""
    certificate, key = folder / "server.crt", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class RedisServer(Server):
    """Is stopped by process id, and stores nothing on disk.

    Args:
        password: The password that clients must send; ``None`` for none.
        tls: Serve TLS only, with a fresh self-signed certificate (``certificate``).
        options: Further command-line options without their dashes, for example ``{"maxmemory": "10mb"}``.
    """

    def __init__(
        self, password: Optional[str] = None, tls: bool = False, options: Optional[dict[str, str]] = None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tzr-"))
        self.port = free_port()
        self.unix_path = self.folder / "s"
        self.password = password
        self.tls = tls
        self.certificate: Optional[Path] = None
        self._key: Optional[Path] = None
        self._options = options or {}
        self._process: Optional[subprocess.Popen[bytes]] = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def uri(self, prefix: str, query: str = "", user: str = "") -> str:
        scheme = "rediss" if self.tls else "redis"
        login = f"{user}:{self.password}@" if self.password is not None else ""
        return f"{scheme}://{login}127.0.0.1:{self.port}/{prefix}{query}"

    def client(self, **kwargs: Any) -> Any:
        import redis

        if self.tls:
            kwargs.update(ssl=True, ssl_ca_certs=str(self.certificate))
        return redis.Redis(host="127.0.0.1", port=self.port, password=self.password, **kwargs)

    def _command(self) -> list[str]:
        command = ["redis-server", "--bind", "127.0.0.1", "127.0.0.2", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), "--unixsocket", str(self.unix_path), "--enable-debug-command", "yes"]
        if self.tls:
            self.certificate, self._key = make_certificate(self.folder)
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", str(self.certificate), "--tls-key-file", str(self._key)]
            command += ["--tls-ca-cert-file", str(self.certificate)]
        else:
            command += ["--port", str(self.port)]
        if self.password is not None:
            command += ["--requirepass", self.password]
        for name, value in self._options.items():
            command += [f"--{name}", value]
        return command

    def start(self) -> None:
        self._process = subprocess.Popen(self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not answers(self.port):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        shutil.rmtree(self.folder, ignore_errors=True)

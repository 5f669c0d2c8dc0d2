"""A real object store on loopback for tests: OpenStack Swift with its S3 API, started by ``s3-server.sh``."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from . import Server

__all__ = ["S3Server", "s3_is_installed"]

SCRIPT = Path(__file__).with_name("s3-server.sh")
PROGRAMS = ("bash", "curl", "memcached", "swift-proxy-server", "swift-object-server", "swift-container-server")


def s3_is_installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


def five_free_ports() -> int:
    """The first of five consecutive free ports."""
    for _ in range(1000):
        base = random.SystemRandom().randrange(10_000, 30_000)  # below the ports that systems assign
        probes = [socket.socket() for _ in range(5)]
        try:
            for i, probe in enumerate(probes):
                probe.bind(("127.0.0.1", base + i))
            return base
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise RuntimeError("no five free ports in a row")


class S3Server(Server):
    """Is stopped by process id.

    Attributes:
        endpoint: ``http://127.0.0.1:port``.
        access_key: The key of the only user.
        secret_key: The secret of the only user.
    """

    access_key = "test:tester"
    secret_key = "testing"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tzr-s3-"))
        self.port = five_free_ports()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Keywords for ``open_stream`` and friends."""
        return {
            "s3_access_key_id": self.access_key,
            "s3_secret_access_key": self.secret_key,
            "s3_endpoint": self.endpoint,
            "force_http": True,
        }

    def client(self, **kwargs: Any) -> Any:
        """A boto3 client of the server's only user."""
        import boto3
        from botocore.config import Config

        options = Config(
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return boto3.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=options,
            **kwargs,
        )

    def start(self) -> None:
        for _ in range(3):
            try:
                self._start()
                return
            except subprocess.CalledProcessError:  # another program took one of the ports in between
                self.stop()
                self.port = five_free_ports()
                self.endpoint = f"http://127.0.0.1:{self.port}"
                shutil.rmtree(self.folder / "etc")
        raise RuntimeError((self.folder / "script.log").read_text())

    def _start(self) -> None:
        with (self.folder / "script.log").open("wb") as log:
            command = ["bash", str(SCRIPT), "start", str(self.folder), str(self.port)]
            # The servers run on the system's Python, so they must not see variables for this one.
            own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            subprocess.run(command, check=True, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=300, env=own)
        self._await_answers()

    def _await_answers(self) -> None:
        """Waits until all servers answer: the front end sends 503 until the servers behind it do."""
        from botocore.exceptions import ClientError

        deadline = time.monotonic() + 60
        while True:
            try:
                self.client().create_bucket(Bucket="ready")
                return
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def stop(self) -> None:
        subprocess.run(["bash", str(SCRIPT), "stop", str(self.folder)], check=False, capture_output=True)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        shutil.rmtree(self.folder, ignore_errors=True)

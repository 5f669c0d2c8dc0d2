"""Certificates for HTTPS tests, made by the openssl program: a private authority, a server, and a stranger."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"
_SIGNS = "keyUsage=critical,keyCertSign,cRLSign"  # Python 3.13 and later insist on it


class Certificates(NamedTuple):
    """Paths of PEM files."""

    authority: Path  # clients trust this one
    chain: Path  # the server's certificate, signed by the authority
    key: Path
    self_signed: Path  # a server's certificate that nobody signed but its own key
    self_signed_key: Path
    folder: Path  # the authority alone, prepared for a capath

    def context(self, *, self_signed: bool = False) -> ssl.SSLContext:
        """A server-side context."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self_signed:
            context.load_cert_chain(self.self_signed, self.self_signed_key)
        else:
            context.load_cert_chain(self.chain, self.key)
        return context


def make_certificates(folder: Path) -> Certificates:
    """Makes them below ``folder``; valid for 127.0.0.1 and localhost."""

    def openssl(*arguments: object) -> str:
        return subprocess.run(
            ["openssl", *map(str, arguments)], cwd=folder, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-days", 2, "-subj", "/CN=Test authority", "-addext", _SIGNS,
            "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
    openssl("req", *new_key, "-subj", "/CN=127.0.0.1", "-keyout", "server.key", "-out", "server.csr")
    (folder / "names.cnf").write_text(f"{_NAMES}\nauthorityKeyIdentifier=keyid\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", 2,
            "-extfile", "names.cnf", "-out", "server.pem")  # fmt: skip
    openssl("req", "-x509", *new_key, "-days", 2, "-subj", "/CN=127.0.0.1", "-addext", _NAMES,
            "-keyout", "self.key", "-out", "self.pem")  # fmt: skip
    trusted = folder / "trusted"
    trusted.mkdir()
    name = openssl("x509", "-in", "ca.pem", "-noout", "-subject_hash").strip()
    (trusted / f"{name}.0").write_bytes((folder / "ca.pem").read_bytes())
    files = ("ca.pem", "server.pem", "server.key", "self.pem", "self.key")
    return Certificates(*(folder / file for file in files), folder=trusted)

"""Whom to trust, decided once for https, uploads, ``rediss://`` and https proxies.

The order: the caller's :class:`CAInfo`; ``CURL_CA_BUNDLE``; ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``;
``REQUESTS_CA_BUNDLE``; what libcurl was built with, where that exists; the places where distributions keep their
bundle; a folder of hashed certificates; the bundle of certifi or botocore. A variable that names something unreadable
is an error: what somebody set on purpose is not passed over.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any, Optional

from tensorizer._system.config import env_text
from tensorizer.errors import StreamError

_logger = logging.getLogger("tensorizer")

# Debian and Ubuntu; RHEL 8 to 10 and Amazon Linux 2023; Fedora 43 and RHEL 11; SUSE; others; older systems.
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs/ca-bundle.crt",
    "/etc/pki/tls/cacert.pem",
)
# Only with names as `openssl rehash` gives them: RHEL's folder has none, and would count as trusting nobody.
FOLDERS = ("/etc/ssl/certs", "/etc/pki/tls/certs")
WAYS_OUT = "install the package ca-certificates (or certifi), set SSL_CERT_FILE, or pass CAInfo(cacert=...)"


class CAInfo:
    """Which certificates an HTTPS server may have. Pass exactly one argument.

    Args:
        cacert: File of trusted certificates in PEM format; a self-signed server certificate may be among them.
        capath: Folder of trusted certificates, as ``openssl rehash`` prepares it.
        allow_untrusted: Accepts every certificate. Anyone between you and the server can then read and change the data.

    Raises:
        ValueError: Not exactly one argument, or no such file or folder.
    """

    def __init__(
        self, *, cacert: Optional[str] = None, capath: Optional[str] = None, allow_untrusted: bool = False
    ) -> None:
        if sum((cacert is not None, capath is not None, bool(allow_untrusted))) != 1:
            raise ValueError("CAInfo: exactly one of cacert, capath and allow_untrusted must be given")
        if cacert is not None and not os.path.isfile(cacert):
            raise ValueError(f"CAInfo: cacert is no existing file: {cacert}")
        if capath is not None and not os.path.isdir(capath):
            raise ValueError(f"CAInfo: capath is no existing folder: {capath}")
        self._cacert = None if cacert is None else os.fspath(cacert)
        self._capath = None if capath is None else os.fspath(capath)

    @property
    def cacert(self) -> Optional[str]:
        """The file of trusted certificates, or ``None``."""
        return self._cacert

    @property
    def capath(self) -> Optional[str]:
        """The folder of trusted certificates, or ``None``."""
        return self._capath

    @property
    def allow_untrusted(self) -> bool:
        """Whether every certificate is accepted."""
        return self._cacert is None and self._capath is None

    @property
    def curl_flags(self) -> tuple[str, ...]:
        """The same choice as arguments of the ``curl`` program."""
        if self._cacert is not None:
            return ("--cacert", self._cacert)
        if self._capath is not None:
            return ("--capath", self._capath)
        return ("--insecure",)

    def __eq__(self, other: object) -> bool:
        return self.curl_flags == other.curl_flags if isinstance(other, CAInfo) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.curl_flags)

    def __repr__(self) -> str:
        return f"CAInfo{self.curl_flags!r}"


@dataclasses.dataclass(frozen=True)
class TrustAnchors:
    """Trust anchors as the C++ side takes them. Without file and path it is left to libcurl and OpenSSL."""

    file: str = ""  # in PEM format
    path: str = ""  # of a folder of hashed certificates
    verify: bool = True


def check_certificates(choice: Any) -> None:
    """Refuses what is neither a :class:`CAInfo` nor ``None``."""
    if choice is not None and not isinstance(choice, CAInfo):
        raise TypeError(f"certificate_handling: expected CAInfo or None, got {type(choice).__name__}")


_found: Optional[TrustAnchors] = None  # of the system; certificates do not move while a process runs


def trust_for(certificates: Optional[CAInfo], *, secure: bool = True) -> TrustAnchors:
    """The trust anchors of a connection.

    Args:
        certificates: The caller's choice, or ``None``.
        secure: Whether the connection certainly uses TLS. Without, nothing that is missing or unreadable is an error:
            the anchors are for an https proxy that ``no_proxy`` may keep out.

    Raises:
        StreamError: A variable names something unreadable, or no certificates were found anywhere.
    """
    return named_trust(certificates, secure=secure) or system_trust(secure)


def named_trust(certificates: Optional[CAInfo], *, secure: bool = False) -> Optional[TrustAnchors]:
    """What the caller or a variable names; ``None`` where the system has to be searched. Arguments as above."""
    if certificates is not None:
        return TrustAnchors(certificates.cacert or "", certificates.capath or "", not certificates.allow_untrusted)
    return _of_environment(secure)


# The variables, first the one that is asked first, each with what it may name.
_VARIABLES = (
    {"CURL_CA_BUNDLE": "file"},
    {"SSL_CERT_FILE": "file", "SSL_CERT_DIR": "folder"},
    {"REQUESTS_CA_BUNDLE": "file or folder"},
)
_FITS = {"file": os.path.isfile, "folder": os.path.isdir, "file or folder": os.path.exists}


def _of_environment(secure: bool) -> Optional[TrustAnchors]:
    for variables in _VARIABLES:
        values = {name: env_text(name) for name in variables}
        if not any(values.values()):
            continue
        if secure:
            for name, value in values.items():
                _require_readable(name, value, variables[name])
        first = next(iter(values.values())) or ""
        if "REQUESTS_CA_BUNDLE" in values and os.path.isdir(first):
            return TrustAnchors(path=first)
        return TrustAnchors(first, values.get("SSL_CERT_DIR") or "")
    return None


def _require_readable(name: str, value: Optional[str], wanted: str) -> None:
    """Refuses a variable that would end in trusting nobody, or in a message that does not name it."""
    if value is None:
        return
    # OpenSSL takes a list of folders.
    paths = value.split(os.pathsep) if wanted == "folder" else [value]
    if not any(_FITS[wanted](path) and _is_readable(path) for path in paths):
        raise StreamError(
            f"no certificate to trust: environment variable {name} names {value}: expected a readable {wanted}"
        )


def _is_readable(path: str) -> bool:
    """Whether the file can be read, or files of the folder be opened."""
    return os.access(path, os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK)


def system_trust(secure: bool = True) -> TrustAnchors:
    """The trust anchors of the system; arguments and errors as for :func:`trust_for`."""
    global _found
    if _found is not None:
        return _found
    trust = _of_libcurl() or _of_distribution()
    if trust is None and secure:
        trust = _of_package()
        if trust is None:
            from tensorizer import _C

            built_in = [place for place in _C.default_certificates() or () if place]
            places = dict.fromkeys([*built_in, *BUNDLES, *(f"{folder}/????????.0" for folder in FOLDERS)])
            tried = ", ".join(places)
            raise StreamError(
                "no certificate to trust: none of CURL_CA_BUNDLE, SSL_CERT_FILE, SSL_CERT_DIR and REQUESTS_CA_BUNDLE "
                f"is set; not found: {tried}, and the Python packages certifi and botocore; {WAYS_OUT}"
            )
    if trust is None:
        return TrustAnchors()
    _found = trust
    return trust


def _of_libcurl() -> Optional[TrustAnchors]:
    """What libcurl was built with, if it is there; named, so that connections without libcurl trust the same."""
    from tensorizer import _C

    built_in = _C.default_certificates()
    if built_in is None:  # an old release, which does not say
        return TrustAnchors()
    file, folder = built_in
    if os.path.isfile(file):
        return TrustAnchors(file=file)
    return TrustAnchors(path=folder) if folder and _is_hashed(folder) else None


def _of_distribution() -> Optional[TrustAnchors]:
    for file in BUNDLES:
        if os.path.isfile(file) and os.access(file, os.R_OK):
            return TrustAnchors(file=file)
    for folder in FOLDERS:
        if _is_hashed(folder):
            return TrustAnchors(path=folder)
    return None


def _is_hashed(folder: str) -> bool:
    return any(Path(folder).glob("????????.0"))


def _of_package() -> Optional[TrustAnchors]:
    """The bundle of a Python package: the last choice, for it is as old as the package."""
    for name, inside in (("certifi", "cacert.pem"), ("botocore", "cacert.pem")):
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            file = os.path.join(folder, inside)
            if os.path.isfile(file):
                _logger.warning(
                    "no certificates of the system found: trusting those of the package %s (%s)", name, file
                )
                return TrustAnchors(file=file)
    return None

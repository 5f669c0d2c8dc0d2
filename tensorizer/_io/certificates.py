"""Which certificates are trusted, decided once for https, uploads, ``rediss://`` and https proxies.

The order: the caller's :class:`CAInfo`; the variables ``SSL_CERT_FILE``, ``CURL_CA_BUNDLE`` and ``REQUESTS_CA_BUNDLE``;
what Python's ``ssl.get_default_verify_paths()`` names; the bundle of certifi. A variable that names something
unreadable is an error: what somebody set on purpose is not passed over.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from typing import Any, Optional

from tensorizer._system.config import env_text
from tensorizer.errors import StreamError

_VARIABLES = ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


class CAInfo:
    """Which certificates an HTTPS server may have. Pass exactly one argument.

    Args:
        cacert: File of trusted certificates in PEM format; a self-signed server certificate may be among them.
        capath: Folder of trusted certificates, as ``openssl rehash`` prepares it.
        allow_untrusted: Accepts every certificate. Anyone between you and the server can then read and change the data.

    Raises:
        ValueError: Not exactly one argument, or no such file or folder.

    Examples:
        >>> from tensorizer.stream_io import CAInfo, open_stream
        >>> anyone = CAInfo(allow_untrusted=True)
        >>> with open_stream("https://models.example/model.tensors", certificate_handling=anyone) as stream:
        ...     print(stream.read(5))
        b'|TZR|'
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
    """What the caller or a variable names, or ``None``. Arguments as above."""
    if certificates is not None:
        return TrustAnchors(certificates.cacert or "", certificates.capath or "", not certificates.allow_untrusted)
    return _of_environment(secure)


def _of_environment(secure: bool) -> Optional[TrustAnchors]:
    for name in _VARIABLES:
        path = env_text(name)
        if path is not None:
            is_folder = os.path.isdir(path)
            if secure and not os.access(path, os.R_OK | os.X_OK if is_folder else os.R_OK):
                raise StreamError(
                    f"no certificate to trust: environment variable {name} names {path}: expected a readable file or "
                    "folder"
                )
            return TrustAnchors(path=path) if is_folder else TrustAnchors(path)
    return None


def system_trust(secure: bool = True) -> TrustAnchors:
    """The trust anchors of the system; arguments and errors as for :func:`trust_for`."""
    global _found
    if _found is not None:
        return _found
    import ssl  # a Python that cannot load its OpenSSL still reads files, and https with certificates that are named

    named = ssl.get_default_verify_paths()
    if named.cafile or named.capath:
        _found = TrustAnchors(named.cafile or "", named.capath or "")
    elif (file := _of_certifi()) is not None:
        _found = TrustAnchors(file)
    elif secure:
        raise StreamError(
            f"no certificate to trust: none of {', '.join(_VARIABLES)} is set, Python's "
            f"ssl.get_default_verify_paths() names nothing that is there ({named.openssl_cafile}, "
            f"{named.openssl_capath}), and certifi is not installed; install the package ca-certificates or certifi, "
            "set SSL_CERT_FILE, or pass CAInfo(cacert=...)"
        )
    return _found or TrustAnchors()


def _of_certifi() -> Optional[str]:
    spec = importlib.util.find_spec("certifi")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = os.path.join(folder, "cacert.pem")
        if os.path.isfile(file):
            return file
    return None

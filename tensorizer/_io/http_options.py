"""Settings of HTTP(S) requests, their defaults, the environment variables that change them; trusted certificates.

Source: docs/remote.md; the defaults are those of csrc/io/http/http_options.h, which has the constants, too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

from tensorizer._system import config
from tensorizer._system.config import env_text
from tensorizer._version import __version__
from tensorizer.errors import StreamError

if TYPE_CHECKING:
    from tensorizer import _C

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# A range, or a condition on it, of the caller's would contradict those that every request needs.
_OWN_HEADERS = frozenset({"range", "if-range", "if-match", "if-unmodified-since"})
# A mapping, or what gives a fresh one.
Headers = Union[Mapping[str, Any], Callable[[], Mapping[str, Any]]]
_HTTP_VERSIONS = {"auto": "automatic", "1.1": "http1", "2": "http2"}


# --- which certificates are trusted: decided once for https, uploads, ``rediss://`` and https proxies -----------------
#
# The order: the caller's CAInfo; the variables below; what Python's ssl.get_default_verify_paths() names; the bundle of
# certifi. A variable that names something unreadable is an error, because it was set on purpose.

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


# --- settings of requests ---------------------------------------------------------------------------------------------

# The extension rounds to milliseconds, and its 0 is no limit.
_LEAST_SECONDS = 0.001


def _number(default: Any, check: Callable[[str, Any], Any], variable: Optional[Callable[[], Any]]) -> Any:
    """A field of a number, for which C++ has one of the same name.

    Args:
        default: Its default; if ``None``, the field takes ``None``, too.
        check: Gives the number as it is kept, or raises; it gets the name and the value.
        variable: Reads the variable of the environment that changes the default; ``None`` where it is unset.
    """
    metadata = {"check": check, "takes_none": default is None}
    if variable is None:
        return dataclasses.field(default=default, metadata=metadata)

    def initial() -> Any:
        found = variable()
        return default if found is None else found

    return dataclasses.field(default_factory=initial, metadata=metadata)


def _seconds(default: float, variable: str, *, above_zero: bool = False) -> Any:
    read = partial(config.env_seconds, variable, above_zero=above_zero)
    return _number(default, partial(config.seconds, above_zero=above_zero), read)


def _integer(least: int, most: int, wanted: str, variable: Optional[str] = None) -> Any:
    read = partial(config.env_int, variable, least, most) if variable else None
    return _number(None, partial(config.integer, least=least, most=most, wanted=wanted), read)


def most_connections() -> int:
    """How many requests this process has under way at the same time, at most.

    ``TENSORIZER_MAX_CONNECTIONS``, else 64. If ``LOCAL_WORLD_SIZE`` names several ranks, each gets its share of the 64,
    at least 4.

    Raises:
        ValueError: A variable is no such number.
    """
    return config.env_int("TENSORIZER_MAX_CONNECTIONS", 1, 1024) or config.share_of_node(64, 4)


@dataclasses.dataclass(frozen=True)
class HTTPOptions:
    """How HTTP(S) objects are requested. Immutable; pass it by keyword (``http_options=``).

    A variable in parentheses changes the default of its field. Times are in seconds. A time above 1,000,000 counts
    as 1,000,000; a time between 0 and a millisecond counts as a millisecond.

    Attributes:
        connect_timeout: For name lookup, TCP and TLS together (``TENSORIZER_HTTP_CONNECT_TIMEOUT``).
        stall_timeout: A request that brings less than 1 KiB per second for this time, in whole seconds, has stalled and
            is tried again (``TENSORIZER_HTTP_STALL_TIMEOUT``). A server that takes the first request and sends nothing
            for this time is not asked again.
        retries: Tries after the first one, per range (``TENSORIZER_HTTP_RETRIES``); if ``None``, only time bounds them.
        retry_seconds: How long a read is retried without progress (``TENSORIZER_HTTP_RETRY_SECONDS``), from its first
            failure on. Connection errors, timeouts, bodies cut short and the statuses 408, 429 and 5xx are retried,
            from the byte where the body ended. Every 256 KiB that arrive restart the time and the count. A read from a
            server that has never answered is retried for 10 s, because its address is probably wrong.
        connections: Requests at the same time; ``None`` for 16, or 64 if the server takes 10 ms or more to answer.
            Each time the server says that it is overloaded (429, 503), the number is halved for the life of the source.
            All requests of this process together are at most 64 at the same time, or as many as
            ``TENSORIZER_MAX_CONNECTIONS`` says. If ``LOCAL_WORLD_SIZE`` names several ranks, they share the 64, and
            each gets at least 4.
        headers: Extra request headers; values are converted with ``str``, except ``None`` and bytes, which raise. For
            tokens that expire, pass a callable without arguments that returns them. It is called before the first
            request, then at most once a minute, and when the server answers 401 or 403 (the request is then repeated
            once). It may be called from another thread. Not shown in ``repr``. Headers and the credentials of the URL
            are not sent to another host after a redirect.
        proxy: URL of a proxy, ``""`` for none, ``None`` for ``http_proxy``, ``https_proxy`` and ``all_proxy`` as
            libcurl reads them. Hosts that ``no_proxy`` lists are reached without it. Not shown in ``repr``.
        certificate_handling: Which server certificates are trusted; ``None`` for ``SSL_CERT_FILE``, ``CURL_CA_BUNDLE``
            or ``REQUESTS_CA_BUNDLE`` if set, otherwise the system's.
        http_version: ``"auto"`` (HTTP/2 if a TLS server offers it, otherwise 1.1), ``"1.1"`` or ``"2"``.

    Raises:
        ValueError: A number is out of range, or a header is malformed; for the environment, the variable is named.
        TypeError: A field has another type. No message quotes ``headers`` or ``proxy``.

    Examples:
        >>> from tensorizer.stream_io import HTTPOptions
        >>> options = HTTPOptions(stall_timeout=10, headers={"Authorization": "Bearer ..."})
        >>> options.retry_seconds
        120.0
    """

    connect_timeout: float = _seconds(10.0, "TENSORIZER_HTTP_CONNECT_TIMEOUT", above_zero=True)
    stall_timeout: float = _seconds(30.0, "TENSORIZER_HTTP_STALL_TIMEOUT", above_zero=True)
    retries: Optional[int] = _integer(0, 1000, "an integer from 0 to 1000, or None", "TENSORIZER_HTTP_RETRIES")
    retry_seconds: float = _seconds(120.0, "TENSORIZER_HTTP_RETRY_SECONDS")
    connections: Optional[int] = _integer(1, (1 << 31) - 1, "an integer >= 1, or None")
    headers: Headers = dataclasses.field(default_factory=dict, repr=False)
    proxy: Optional[str] = dataclasses.field(default=None, repr=False)
    certificate_handling: Optional[CAInfo] = None
    http_version: str = "auto"

    def __post_init__(self) -> None:
        for field in _numbers():
            value = getattr(self, field.name)
            if value is not None or not field.metadata["takes_none"]:
                object.__setattr__(self, field.name, field.metadata["check"](f"HTTPOptions: {field.name}", value))
        if config.text("HTTPOptions: http_version", self.http_version) not in _HTTP_VERSIONS:
            known = sorted(_HTTP_VERSIONS)
            raise ValueError(f"HTTPOptions: http_version: expected one of {known}, got {self.http_version!r}")
        if self.proxy is not None:
            config.text("HTTPOptions: proxy", self.proxy)
        check_certificates(self.certificate_handling)
        most_connections()  # a variable that says no number shows here
        if not callable(self.headers):
            checked_headers(self.headers)

    def _native(
        self,
        headers: Optional[Headers] = None,
        certificate_handling: Optional[CAInfo] = None,
        *,
        secure: bool = True,
    ) -> _C.HttpOptions:
        """These settings for the C++ side, with the headers and certificates of one stream over them.

        ``secure`` is false for an address of plain http, for which no certificate is looked for unless there is a proxy
        of https, or a redirect leads to https.
        """
        from tensorizer import _C

        native = _C.HttpOptions()
        for field in _numbers():
            value = getattr(self, field.name)
            if isinstance(value, float):
                value = value and max(value, _LEAST_SECONDS)
            # In C++, zero says that the caller has not chosen; zero retries are a choice.
            setattr(native, field.name, value if value is not None or field.name == "retries" else 0)
        native.max_connections = most_connections()
        native.version = getattr(_C.HttpVersion, _HTTP_VERSIONS[self.http_version])
        native.user_agent = f"Tensorizer/{__version__} (curl)"
        all_headers = (self.headers, headers or {})
        if any(map(callable, all_headers)):
            native.header_provider = lambda: _merged(*all_headers)
        else:
            native.headers = _merged(*all_headers)
        native.proxy = self.proxy
        chosen = certificate_handling or self.certificate_handling
        trust: Optional[TrustAnchors]
        if secure or config.is_secure_proxy(self.proxy):
            trust = trust_for(chosen)
        elif self.proxy is None and config.http_proxy_is_secure():  # `no_proxy` may keep it out
            trust = trust_for(chosen, secure=False)
        else:
            trust = named_trust(chosen)
            if trust is None:
                native.trust_provider = _places_of_system
                trust = TrustAnchors()
        native.ca_file, native.ca_path, native.verify_peer = trust.file, trust.path, trust.verify
        return native


def _places_of_system() -> tuple[str, str]:
    trust = system_trust()
    return trust.file, trust.path


@functools.cache
def _numbers() -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(HTTPOptions) if "check" in field.metadata]


def check_header(name: Any, value: Any) -> None:
    """Refuses what would change a request beyond its one header.

    Raises:
        ValueError: ``name`` is no header name or one that is set by the library, or ``value`` has a line break or
            cannot be encoded. The value is not quoted.
        TypeError: ``value`` is ``None`` or bytes, whose ``str`` nobody means.
    """
    if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"headers: not a header name: {name!r}")
    if name.lower() in _OWN_HEADERS:
        raise ValueError(f"headers: {name} is set by every request itself; use begin= and end= for a range")
    if value is None or isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"headers: the value of {name}: expected text or a number, got {type(value).__name__}")
    if not {"\r", "\n", "\0"}.isdisjoint(str(value)):
        raise ValueError(f"headers: the value of {name} has a line break or a NUL")
    config.text(f"headers: the value of {name}", str(value))


def checked_headers(headers: Headers) -> dict[str, tuple[str, str]]:
    """Name and value of each header, by its name in lower case.

    Raises:
        TypeError: No mapping, or as :func:`check_header`.
        ValueError: As :func:`check_header`.
    """
    mapping = headers() if callable(headers) else headers
    if not isinstance(mapping, Mapping):
        raise TypeError(f"headers: expected a mapping, or a callable that returns one, got {type(mapping).__name__}")
    for name, value in mapping.items():
        check_header(name, value)
    return {name.lower(): (name, str(value)) for name, value in mapping.items()}


def _merged(*headers: Headers) -> list[tuple[str, str]]:
    merged: dict[str, tuple[str, str]] = {}
    for some in headers:
        merged.update(checked_headers(some))
    return list(merged.values())

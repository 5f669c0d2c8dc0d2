"""Settings of HTTP(S) requests, with their defaults and the environment variables that change them.

Source: docs/remote.md; the defaults are those of csrc/io/http/http_options.h, which has the constants, too.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

from tensorizer._io.certificates import CAInfo, TrustAnchors, check_certificates, named_trust, system_trust, trust_for
from tensorizer._system import checks, config
from tensorizer._version import __version__

if TYPE_CHECKING:
    from tensorizer import _C

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# A range, or a condition on it, of the caller's would contradict those that every request needs.
_OWN_HEADERS = frozenset({"range", "if-range", "if-match", "if-unmodified-since"})
# A mapping, or what gives a fresh one.
Headers = Union[Mapping[str, Any], Callable[[], Mapping[str, Any]]]
_HTTP_VERSIONS = {"auto": "automatic", "1.1": "http1", "2": "http2"}


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
    return _number(default, partial(checks.seconds, above_zero=above_zero), read)


def _integer(least: int, most: int, wanted: str, variable: Optional[str] = None) -> Any:
    read = partial(config.env_int, variable, least, most) if variable else None
    return _number(None, partial(checks.integer, least=least, most=most, wanted=wanted), read)


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
        if checks.text("HTTPOptions: http_version", self.http_version) not in _HTTP_VERSIONS:
            known = sorted(_HTTP_VERSIONS)
            raise ValueError(f"HTTPOptions: http_version: expected one of {known}, got {self.http_version!r}")
        if self.proxy is not None:
            checks.text("HTTPOptions: proxy", self.proxy)
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
            # Zero is how C++ says that nobody has chosen; zero retries are a choice.
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
    checks.text(f"headers: the value of {name}", str(value))


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

"""A readable, seekable file over an HTTP(S) object."""

from __future__ import annotations

import http.client
import operator
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

from tensorizer._io.http_options import CAInfo, Headers, HTTPOptions, check_certificates, checked_headers
from tensorizer._io.window import WindowedReader
from tensorizer._system import config
from tensorizer.errors import StreamError

if TYPE_CHECKING:
    from tensorizer import _C
    from tensorizer._io.node_cache import CachedObject

_LAST_POSITION = (1 << 63) - 1  # no object is longer
_DEFAULT_BUFFER_NBYTES = 16 << 20


class _SharedSource:
    """A source and the number of open streams on it: a stream and its forks. Perhaps with a cache before it."""

    def __init__(self, http: _C.HttpSource, cached: Optional[CachedObject] = None) -> None:
        self.http = http
        self._cached = cached
        self.known_etag = cached.known.version if cached is not None and cached.known is not None else ""
        self._over = None if cached is None else cached.over_http(http)
        self.source: _C.RangeSource = http if self._over is None else self._over
        self.users = 0
        if self._over is not None and self._over.was_complete:
            http.close_connections()  # a body without ranges would rest there

    def close(self) -> None:
        if self._cached is not None and self._over is not None:
            self._cached.closed(self._over)
        # Others may hold the source still, a traceback for example; no connection has to wait for them.
        self.http.close_connections()


class CURLStreamFile(WindowedReader):
    """Reads an object behind ``http://`` or ``https://`` like a file opened with ``"rb"``.

    The constructor sends the first request and returns when the status and the first bytes have arrived. Small reads
    use a buffer that grows up to ``buffer_size`` bytes; large ones use several connections. A deserializer that reads
    from this object shares its connections. Not thread-safe.

    Args:
        uri: The URL. Credentials in it (``https://user:password@...``) are sent as Basic authentication.
        begin: First byte of the range that is read, ``None`` for 0; also the first position.
        end: Position after the last byte, ``None`` for the end of the object.
        headers: Extra request headers; values are converted with ``str``, except ``None`` and bytes, which raise. Not
            sent to another host after a redirect. For headers that expire, pass a callable as in ``HTTPOptions``.
        buffer_size: Upper bound in bytes of what is read ahead; ``None`` for 16 MiB.
        certificate_handling: Which server certificates are trusted; takes precedence over that of ``http_options``.
        http_options: Timeouts, retries, connections and the rest; ``None`` for the defaults.
        url_provider: Returns a new URL of the same object, for URLs that expire. It is called when the server rejects
            the one in use, and when that is older than ``url_lifetime``. May be called from another thread.
        url_lifetime: Seconds for which a URL is used, at least one; ``None`` uses it until the server rejects it.
        display_name: What messages call the object; ``None`` for its URL without query and credentials.
        cached: For the package: the object in a cache of the node; `begin` and `end` are not given then.

    Raises:
        ValueError: The range is empty or negative, or a header is malformed; no request was sent.
        TypeError: An argument has the wrong type. Its value is not quoted.
        StreamNotFoundError: Status 404 or 410. Also a ``FileNotFoundError``.
        StreamError: Another error status, no connection, no trust, or an answer that contradicts the request, after
            all tries. Also an ``OSError``.

    Attributes:
        read_operations: Sized reads, ``readinto`` calls and forward seeks so far.
        bytes_skipped: Bytes that forward seeks passed over.
        http_response_latencies: Seconds from request to response, for the first request and for each one that a
            backward seek made necessary.
        popen_latencies: Seconds until the connection was made.

    Examples:
        >>> from tensorizer.stream_io import CURLStreamFile
        >>> with CURLStreamFile("https://models.example/model.tensors", begin=0, end=5) as stream:
        ...     print(stream.read())
        b'|TZR|'
    """

    def __init__(
        self,
        uri: str,
        begin: Optional[int] = None,
        end: Optional[int] = None,
        headers: Optional[Headers] = None,
        *,
        buffer_size: Optional[int] = None,
        certificate_handling: Optional[CAInfo] = None,
        http_options: Optional[HTTPOptions] = None,
        url_provider: Optional[Callable[[], str]] = None,
        url_lifetime: Optional[float] = None,
        display_name: Optional[str] = None,
        cached: Optional[CachedObject] = None,
    ) -> None:
        self._closed = True  # until the source is there: __del__ calls close() also after a failure below
        begin, end = _checked_range(begin, end)
        config.text("uri", uri)
        check_certificates(certificate_handling)
        if http_options is not None and not isinstance(http_options, HTTPOptions):
            raise TypeError(f"http_options: expected HTTPOptions or None, got {type(http_options).__name__}")
        if headers is not None and not callable(headers):
            checked_headers(headers)
        lifetime = 0.0 if url_lifetime is None else config.seconds("url_lifetime", url_lifetime)
        if 0 < lifetime < 1:
            lifetime = 1.0  # the extension counts whole seconds, and 0 is no limit
        shown_as = "" if display_name is None else config.text("display_name", display_name)
        fresh_url = _checked_provider(url_provider)
        native = (http_options or HTTPOptions())._native(
            headers, certificate_handling, secure=not uri.lower().startswith("http:")
        )
        buffer_size = config.buffer_size(buffer_size, _DEFAULT_BUFFER_NBYTES)
        self._open(_quoted(uri), native, begin, end, buffer_size, fresh_url, lifetime, shown_as, cached)

    @classmethod
    def _opened(
        cls,
        url: str,
        native: _C.HttpOptions,
        *,
        begin: Optional[int],
        end: Optional[int],
        buffer_size: Optional[int],
        url_provider: Callable[[], str],
        url_lifetime: float,
        display_name: str,
        cached: Optional[CachedObject],
    ) -> CURLStreamFile:
        """For the package: as the constructor, with settings and URLs that were checked for all objects of a call."""
        stream = cls.__new__(cls)
        stream._closed = True
        first, last = _checked_range(begin, end)
        nbytes = _DEFAULT_BUFFER_NBYTES if buffer_size is None else config.buffer_size(buffer_size, 0)
        stream._open(_quoted(url), native, first, last, nbytes, url_provider, url_lifetime, display_name, cached)
        return stream

    def _open(
        self,
        url: str,
        native: _C.HttpOptions,
        begin: int,
        end: Optional[int],
        buffer_nbytes: int,
        fresh_url: Optional[Callable[[], str]],
        lifetime: float,
        shown_as: str,
        cached: Optional[CachedObject],
    ) -> None:
        def open_source(first: int) -> _SharedSource:
            from tensorizer import _C

            http = _C.HttpSource.open(
                url,
                native,
                begin=first if cached is None else 0,
                end=end,
                url_provider=fresh_url,
                url_lifetime=lifetime,
                display_name=shown_as,
                **({} if cached is None else cached.condition()),
            )
            return _SharedSource(http, cached)

        self._open_source = open_source
        self._buffer_nbytes = max(1, buffer_nbytes)
        self._error_context: Optional[str] = None
        shared = open_source(begin)
        self._attach(shared, begin, end)
        self.http_response_latencies = [shared.http.seconds_to_response]
        self.popen_latencies = [shared.http.seconds_to_connect]

    def _attach(self, shared: _SharedSource, begin: int, end: Optional[int]) -> None:
        """Starts at ``begin`` of a source."""
        shared.users += 1
        self._shared: Optional[_SharedSource] = shared
        source = shared.source
        self._name = source.name
        self._headers = http.client.HTTPMessage()
        for name, value in shared.http.response_headers:
            self._headers[name] = value
        if shared.http.is_known and "etag" not in self._headers:  # a 304 need not repeat it
            self._headers["ETag"] = shared.known_etag
        self._end = end
        self._position = begin
        self._went_back = False
        self._source_is_shared = False
        self._closed = False

    # -- what is known about the object ------------------------------------------------------------------------------

    @property
    def response_headers(self) -> http.client.HTTPMessage:
        """Headers of the response that opened the object; names in any case."""
        return self._headers

    @property
    def is_known(self) -> bool:
        """For the package: whether the object is the one that `cached` knew, so that nothing was sent."""
        return self._shared is not None and self._shared.http.is_known

    @property
    def bytes_read(self) -> int:
        """Bytes that sized reads, ``readinto`` and forward seeks have passed.

        Once a deserializer reads from this object, it counts all bytes that arrived.
        """
        if self._source_is_shared and self._shared is not None:
            self._bytes_read = max(self._bytes_read, self._shared.source.bytes_read)
        return self._bytes_read

    # -- positions and life ------------------------------------------------------------------------------------------

    def _move(self, target: int) -> None:
        # Backwards a closed stream is opened again.
        if target < self._position and self._closed:
            shared = self._open_source(target)
            self._attach(shared, target, self._end)
            self._note_latency(shared.http.seconds_to_response, shared.http.seconds_to_connect)
            return
        self._source_in_use()
        if target < self._position:
            self._went_back = not 0 <= target - self._window_start <= len(self._window)
        elif target > self._position:
            self.bytes_skipped += target - self._position
            self._count(target - self._position)
        self._position = target

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or a read failed."""
        return self._closed

    def close(self) -> None:
        """Frees the buffer and closes connections that no other stream uses. May be called again."""
        if self._closed:
            return
        _ = self.bytes_read  # the counter outlives the source
        self._closed = True
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.users -= 1
            if shared.users == 0:
                shared.close()
        self._window = memoryview(b"")

    # -- for the package ---------------------------------------------------------------------------------------------

    def register_error_context(self, msg: str) -> None:
        """Remembers a text that is added to the message of a later read error."""
        self._error_context = msg

    def _fork(self, begin: Optional[int] = None, end: Optional[int] = None) -> CURLStreamFile:
        """Another stream on the same object and the same connections, with its own range and position."""
        first, last = _checked_range(begin, end)
        self._source_in_use()
        assert self._shared is not None
        fork = CURLStreamFile.__new__(CURLStreamFile)
        fork._open_source = self._open_source
        fork._buffer_nbytes = self._buffer_nbytes
        fork._error_context = self._error_context
        fork.http_response_latencies = list(self.http_response_latencies[:1])
        fork.popen_latencies = list(self.popen_latencies[:1])
        fork._attach(self._shared, first, last)
        return fork

    def _tensorizer_source(self) -> _C.RangeSource:
        """The connections below this stream, for a load that reads without passing through Python."""
        self._source_is_shared = True
        return self._source_in_use()

    # -- fetching ----------------------------------------------------------------------------------------------------

    def _source_in_use(self) -> _C.RangeSource:
        if self._shared is None:
            raise StreamError(f"{self!r} is closed")
        return self._shared.source

    def fileno(self) -> int:
        """``-1``: there is no file descriptor."""
        return -1

    def _limit(self) -> Optional[int]:
        ends = [end for end in (self._source_in_use().size(), self._end) if end is not None]
        return min(ends) if ends else None

    def _knows_size(self) -> bool:
        return self._source_in_use().size() is not None

    def _fetch_some(self, offset: int, into: memoryview) -> int:
        source = self._source_in_use()
        return int(self._ask(lambda: source.read_up_to(offset, into)))

    def _fetch_all(self, offset: int, into: memoryview) -> None:
        source = self._source_in_use()
        self._ask(lambda: source.readinto_parallel(offset, into))

    def _fetch_bytes(self, offset: int, nbytes: int) -> bytes:
        source = self._source_in_use()
        data: bytes = self._ask(lambda: source.read_parallel(offset, nbytes))
        return data

    def _note_latency(self, response: float, connect: float) -> None:
        self.http_response_latencies.append(response)
        self.popen_latencies.append(connect)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Runs ``request``; a failure closes this stream and carries the registered context."""
        self._source_in_use()
        assert self._shared is not None
        http = self._shared.http
        requests_before = http.requests
        started = time.monotonic()
        try:
            result = request()
        except OSError as error:
            self.close()
            if self._error_context is None:
                raise
            raise _with_context(error, self._error_context) from error
        if self._went_back:
            self._went_back = False
            if http.requests != requests_before:
                self._note_latency(time.monotonic() - started, 0.0)
        return result


def _checked_range(begin: Optional[int], end: Optional[int]) -> tuple[int, Optional[int]]:
    first = 0 if begin is None else config.integer("begin", begin, wanted="a position >= 0")
    if end is None:
        return first, None
    if hasattr(end, "__index__"):
        end = min(operator.index(end), _LAST_POSITION)
    return first, config.integer("end", end, first + 1, wanted=f"a position after begin={first}")


def _checked_provider(provider: Optional[Callable[[], str]]) -> Optional[Callable[[], str]]:
    """The same, with answers that the extension takes."""
    if provider is None:
        return None
    if not callable(provider):
        raise TypeError(f"url_provider: expected a callable or None, got {type(provider).__name__}")
    return lambda: config.text("url_provider: the URL", provider())


def _quoted(uri: str) -> str:
    """The URL with blanks and letters outside of ASCII percent-encoded behind the host; the rest as it is."""
    if uri.isascii() and " " not in uri:
        return uri
    scheme, separator, rest = uri.partition("://")
    host = rest[: next((i for i, letter in enumerate(rest) if letter in "/?#"), len(rest))]
    ascii_printable = "".join(map(chr, range(33, 127)))
    return scheme + separator + host + urllib.parse.quote(rest[len(host) :], safe=ascii_printable)


def _with_context(error: OSError, context: str) -> OSError:
    """The same kind of error, with ``context`` behind its message."""
    longer: Union[OSError, StreamError] = type(error)(f"{error}; {context}")
    for name in ("source", "offset", "errno"):
        value = getattr(error, name, None)
        if value is not None:
            setattr(longer, name, value)
    return longer

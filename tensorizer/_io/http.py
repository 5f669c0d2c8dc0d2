"""A readable, seekable file over an HTTP(S) object."""

from __future__ import annotations

import http.client
import io
import operator
import os
import sys
import time
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

from tensorizer._io.options import CAInfo, HTTPOptions, check_header
from tensorizer.errors import StreamError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tensorizer import _C

__all__ = ["CURLStreamFile"]

_DEFAULT_BUFFER_NBYTES = 16 << 20
# The window begins small, so that jumping around costs little, and doubles while reads go straight on.
_FIRST_WINDOW_NBYTES = 256 << 10
# From here on, bytes go from the connection to their destination without a stop in the window.
_DIRECT_NBYTES = 1 << 20


class _SharedSource:
    """A source and the number of open streams on it: a stream and its forks."""

    def __init__(self, source: _C.HttpSource) -> None:
        self.source = source
        self.users = 0


class CURLStreamFile(io.BufferedIOBase):
    """Reads an object behind ``http://`` or ``https://`` like a file opened with ``"rb"``.

    The constructor sends the first request and returns when the status and the first bytes are in. Small reads are
    served from a window that grows up to ``buffer_size`` bytes; large ones use several connections. Position and
    buffer belong to this object, connections to a source that is shared with its forks and with a deserializer that
    reads from it. Not thread-safe.

    Args:
        uri: The URL. Credentials in it (``https://user:password@...``) are sent as Basic authentication.
        begin: First byte of the range that is read, ``None`` for 0; also the first position.
        end: One past the last byte, ``None`` for the end of the object.
        headers: Extra request headers; values go through ``str``. Not sent to another host after a redirect.
        buffer_size: Upper bound in bytes of what is read ahead; ``None`` for 16 MiB.
        certificate_handling: Which server certificates are trusted; over that of ``http_options``.
        http_options: Timeouts, retries, connections and the rest; ``None`` for the defaults.
        url_provider: Gives a fresh URL of the same object, for URLs that expire; called when the server refuses the
            one in use, and when it is older than ``url_lifetime``. May be called from another thread.
        url_lifetime: Seconds for which a URL is used; ``None`` until it is refused.
        display_name: What messages call the object; ``None`` for its URL without query and credentials.

    Raises:
        ValueError: The range is empty or negative, or a header is malformed; no request was sent.
        TypeError: An argument has the wrong type.
        StreamNotFoundError: Status 404 or 410. Also a ``FileNotFoundError``.
        StreamError: Another error status, no connection, no trust, or an answer that contradicts the request, after
            all tries. Also an ``OSError``.

    Attributes:
        read_operations: Sized reads, ``readinto`` calls and forward seeks so far.
        bytes_skipped: Bytes that forward seeks passed over.
        http_response_latencies: Seconds from request to response, for the first request and for each one that a
            backward seek made necessary.
        popen_latencies: Seconds until the connection stood, likewise.
    """

    def __init__(
        self,
        uri: str,
        begin: Optional[int] = None,
        end: Optional[int] = None,
        headers: Optional[Mapping[str, Any]] = None,
        *,
        buffer_size: Optional[int] = None,
        certificate_handling: Optional[CAInfo] = None,
        http_options: Optional[HTTPOptions] = None,
        url_provider: Optional[Callable[[], str]] = None,
        url_lifetime: Optional[float] = None,
        display_name: Optional[str] = None,
    ) -> None:
        self._closed = True  # until the source is there: __del__ calls close() also after a failure below
        begin, end = _checked_range(begin, end)
        if not isinstance(uri, str):
            raise TypeError(f"uri: wanted str, found {type(uri).__name__}")
        if certificate_handling is not None and not isinstance(certificate_handling, CAInfo):
            raise TypeError(f"certificate_handling: wanted CAInfo or None, found {type(certificate_handling).__name__}")
        for name, value in (headers or {}).items():
            check_header(name, value)
        native = (http_options or HTTPOptions())._native(
            headers, certificate_handling, secure=not uri.lower().startswith("http:")
        )
        url = _quoted(uri)

        def open_source(first: int) -> _C.HttpSource:
            from tensorizer import _C

            return _C.HttpSource.open(
                url,
                native,
                begin=first,
                end=end,
                url_provider=url_provider,
                url_lifetime=url_lifetime or 0.0,
                display_name=display_name or "",
            )

        self._open_source = open_source
        self._buffer_nbytes = _DEFAULT_BUFFER_NBYTES if buffer_size is None else max(1, buffer_size)
        self._error_context: Optional[str] = None
        self._attach(_SharedSource(open_source(begin)), begin, end)
        self.http_response_latencies = [self._source_in_use().seconds_to_response]
        self.popen_latencies = [self._source_in_use().seconds_to_connect]

    def _attach(self, shared: _SharedSource, begin: int, end: Optional[int]) -> None:
        """Starts at ``begin`` of a source, with empty window and counters."""
        shared.users += 1
        self._shared: Optional[_SharedSource] = shared
        source = shared.source
        self._name = source.name
        self._headers = _http_message(source.response_headers)
        self._position = begin
        self._end = end
        self._window = memoryview(b"")
        self._window_start = begin
        self._next_window_nbytes = _FIRST_WINDOW_NBYTES
        self._went_back = False
        self._bytes_read = 0
        self._source_is_shared = False
        self.bytes_skipped = 0
        self.read_operations = 0
        self._closed = False

    # -- what is known about the object ------------------------------------------------------------------------------

    @property
    def response_headers(self) -> http.client.HTTPMessage:
        """Headers of the response that opened the object; names in any case."""
        return self._headers

    @property
    def bytes_read(self) -> int:
        """Bytes that sized reads, ``readinto`` and forward seeks have gone over.

        Once a deserializer reads from the connections below this object, all bytes that arrived.
        """
        if self._source_is_shared and self._shared is not None:
            self._bytes_read = max(self._bytes_read, self._shared.source.bytes_read)
        return self._bytes_read

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name if hasattr(self, '_name') else '(not open)'}>"

    # -- io.BufferedIOBase -------------------------------------------------------------------------------------------

    def read(self, size: Optional[int] = None) -> bytes:
        """Reads up to ``size`` bytes; fewer only at the end of the range. ``None`` or a negative number: all the rest.

        Raises:
            StreamError: The connection failed, the object changed, or the stream is closed.
        """
        source = self._source_in_use()
        if size is None or size < 0:
            return self._read_rest(source)
        if source.size() is None:
            data = self._read_pieces(source, size)
        else:
            data = self._read_sized(source, self._available(source, size))
        self._count(len(data))
        return data

    def read1(self, size: int = -1, /) -> bytes:
        """Reads up to ``size`` bytes, with one request at most."""
        source = self._source_in_use()
        if self._in_window(1) == 0:
            self._fill_window(source)
        available = self._in_window(len(self._window))
        return self.read(available if size < 0 else min(size, available))

    def readinto(self, buffer: Buffer, /) -> int:
        """Fills ``buffer``; returns its size, or less at the end of the range. Bytes past that are untouched."""
        source = self._source_in_use()
        with memoryview(buffer) as view:
            if view.readonly:
                raise TypeError("readinto: wanted a writable buffer")
            if view.nbytes == 0:  # cast() refuses some empty shapes
                self._count(0)
                return 0
            with view.cast("B") as plain:
                got = self._fill(source, plain)
        self._count(got)
        return got

    def readinto1(self, buffer: Buffer, /) -> int:
        """As :meth:`readinto`."""
        return self.readinto(buffer)

    def peek(self, size: int = 0, /) -> bytes:
        """Some of the next bytes, without moving; empty only at the end."""
        source = self._source_in_use()
        if self._in_window(1) == 0:
            self._fill_window(source)
        start = self._position - self._window_start
        return bytes(self._window[start : start + max(size, 8192)])

    def tell(self) -> int:
        """Absolute position in the object."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Moves to ``position`` bytes from the start of the object, the current position or the end; returns where.

        Seeking costs no request by itself. Backwards it also opens a closed stream again.

        Raises:
            ValueError: The target is negative, or ``whence`` unknown.
            TypeError: The position is no integer.
            io.UnsupportedOperation: From the end, where the server has told no size.
            StreamError: The stream is closed.
        """
        target = self._seek_target(operator.index(position), whence)
        if target < 0:
            raise ValueError(f"seek: negative position {target}")
        if target < self._position and self._closed:
            source = self._open_source(target)
            counters = self.bytes_skipped, self.read_operations, self._bytes_read
            self._attach(_SharedSource(source), target, self._end)
            self.bytes_skipped, self.read_operations, self._bytes_read = counters
            self._note_latency(source.seconds_to_response, source.seconds_to_connect)
            return target
        self._source_in_use()
        if target < self._position:
            self._went_back = not 0 <= target - self._window_start <= len(self._window)
        elif target > self._position:
            self.bytes_skipped += target - self._position
            self._count(target - self._position)
        self._position = target
        return target

    def readable(self) -> bool:
        """``True``."""
        return True

    def seekable(self) -> bool:
        """``True``."""
        return True

    def writable(self) -> bool:
        """``False``."""
        return False

    def fileno(self) -> int:
        """``-1``: there is no file descriptor."""
        return -1

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or a read failed."""
        return self._closed

    def close(self) -> None:
        """Lets go of buffer and connections; those that others use stay. May be called again."""
        if self._closed:
            return
        _ = self.bytes_read  # the counter outlives the source
        self._closed = True
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.users -= 1
            if shared.users == 0:
                # Others may hold the source still, a traceback for example; no connection has to wait for them.
                shared.source.close_connections()
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

    # -- the window --------------------------------------------------------------------------------------------------

    def _source_in_use(self) -> _C.HttpSource:
        if self._shared is None:
            raise StreamError(f"{self!r} is closed")
        return self._shared.source

    def _limit(self, source: _C.HttpSource) -> Optional[int]:
        """Where this stream ends; ``None`` while nobody knows."""
        ends = [end for end in (source.size(), self._end) if end is not None]
        return min(ends) if ends else None

    def _available(self, source: _C.HttpSource, nbytes: int) -> int:
        limit = self._limit(source)
        return nbytes if limit is None else max(0, min(nbytes, limit - self._position))

    def _in_window(self, nbytes: int) -> int:
        """How many of the next ``nbytes`` are in the window."""
        start = self._position - self._window_start
        return max(0, min(nbytes, len(self._window) - start)) if start >= 0 else 0

    def _fill(self, source: _C.HttpSource, into: memoryview) -> int:
        """Fills ``into`` and moves on; returns the bytes, fewer only at the end."""
        into = into[: self._available(source, len(into))]
        done = 0
        while done < len(into):
            step = self._in_window(len(into) - done)
            if step > 0:
                start = self._position - self._window_start
                into[done : done + step] = self._window[start : start + step]
            elif len(into) - done >= _DIRECT_NBYTES:
                step = self._fill_directly(source, into[done:])
            else:
                self._fill_window(source)
                step = 0 if self._in_window(1) else -1
            if step < 0:
                break
            done += step
            self._position += step
        return done

    def _fill_directly(self, source: _C.HttpSource, into: memoryview) -> int:
        position = self._position
        if source.size() is None:
            return self._ask(lambda: source.read_up_to(position, into)) or -1
        self._ask(lambda: source.readinto_parallel(position, into))
        return len(into)

    def _fill_window(self, source: _C.HttpSource) -> None:
        """Moves the window to the current position; it stays empty at the end."""
        if len(self._window) > 0 and self._position == self._window_start + len(self._window):
            self._next_window_nbytes = min(self._next_window_nbytes * 2, self._buffer_nbytes)
        else:
            self._next_window_nbytes = min(_FIRST_WINDOW_NBYTES, self._buffer_nbytes)
        nbytes = self._available(source, self._next_window_nbytes)
        buffer = bytearray(nbytes)
        got = 0
        if nbytes > 0:
            got = self._ask(lambda: source.read_up_to(self._position, buffer))
        self._window = memoryview(buffer)[:got].toreadonly()
        self._window_start = self._position

    def _read_rest(self, source: _C.HttpSource) -> bytes:
        if source.size() is None:
            return self._read_pieces(source, None)
        return self._read_sized(source, self._available(source, sys.maxsize))

    def _read_sized(self, source: _C.HttpSource, nbytes: int) -> bytes:
        """The next ``nbytes``, which the object has if its server tells the truth."""
        try:
            if nbytes >= _DIRECT_NBYTES and self._in_window(1) == 0:
                data: bytes = self._ask(lambda: source.read_parallel(self._position, nbytes))
                self._position += len(data)
                return data
            buffer = bytearray(nbytes)
        except (MemoryError, OverflowError):
            raise StreamError(
                f"Failed to read {self._name}: {nbytes} bytes at offset {self._position} are more than memory holds; "
                "read them in pieces"
            ) from None
        got = self._fill(source, memoryview(buffer))
        return bytes(memoryview(buffer)[:got])

    def _read_pieces(self, source: _C.HttpSource, nbytes: Optional[int]) -> bytes:
        """Up to ``nbytes`` (all for ``None``) of an object whose size nobody knows, in memory for what is there."""
        pieces = []
        left = sys.maxsize if nbytes is None else nbytes
        while left > 0:
            buffer = bytearray(self._available(source, min(left, _DIRECT_NBYTES)))
            got = self._fill(source, memoryview(buffer))
            pieces.append(bytes(memoryview(buffer)[:got]))
            left -= got
            if got < _DIRECT_NBYTES:
                break
        return b"".join(pieces)

    def _seek_target(self, position: int, whence: int) -> int:
        if whence == os.SEEK_SET:
            return position
        if whence == os.SEEK_CUR:
            return self._position + position
        if whence == os.SEEK_END:
            limit = self._limit(self._source_in_use()) if self._shared is not None else None
            if limit is None or self._source_in_use().size() is None:
                raise io.UnsupportedOperation(f"seek from the end: the size of {self._name} is not known")
            return limit + position
        raise ValueError(f"seek: unknown whence {whence!r}")

    def _count(self, nbytes: int) -> None:
        self._bytes_read += nbytes
        self.read_operations += 1

    def _note_latency(self, response: float, connect: float) -> None:
        self.http_response_latencies.append(response)
        self.popen_latencies.append(connect)

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Runs ``request``; a failure closes this stream and carries the registered context."""
        source = self._source_in_use()
        requests_before = source.requests
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
            if source.requests != requests_before:
                self._note_latency(time.monotonic() - started, 0.0)
        return result


def _checked_range(begin: Optional[int], end: Optional[int]) -> tuple[int, Optional[int]]:
    first = 0 if begin is None else begin
    if first < 0:
        raise ValueError(f"begin: wanted a position >= 0, found {first}")
    if end is not None and end <= first:
        raise ValueError(f"end: wanted a position after begin={first}, found {end}")
    return first, end


def _quoted(uri: str) -> str:
    """The URL with blanks and letters outside of ASCII percent-encoded behind the host; the rest as it is."""
    if uri.isascii() and " " not in uri:
        return uri
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    ascii_printable = "".join(map(chr, range(33, 127)))
    return scheme + separator + host + slash + urllib.parse.quote(path, safe=ascii_printable)


def _http_message(fields: list[tuple[str, str]]) -> http.client.HTTPMessage:
    message = http.client.HTTPMessage()
    for name, value in fields:
        message[name] = value
    return message


def _with_context(error: OSError, context: str) -> OSError:
    """The same kind of error, with ``context`` behind its message."""
    longer: Union[OSError, StreamError] = type(error)(f"{error}; {context}")
    for name in ("source", "offset", "errno"):
        value = getattr(error, name, None)
        if value is not None:
            setattr(longer, name, value)
    return longer

"""Reading streams over sources of ranges: one window, one position, one set of ``io`` conventions."""

from __future__ import annotations

import io
import operator
import os
import sys
from typing import TYPE_CHECKING, Optional

from tensorizer.errors import StreamError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The window begins small, so that jumping around costs little, and doubles while reads go straight on.
_FIRST_WINDOW_NBYTES = 256 << 10
# From here on, bytes go from the connection to their destination without a stop in the window.
_DIRECT_NBYTES = 1 << 20


class WindowedReader(io.BufferedIOBase):
    """A readable, seekable file. Not thread-safe.

    Small reads are served from a window that grows while reads go straight on; large ones go past it. Subclasses fetch.
    """

    bytes_skipped = 0
    read_operations = 0
    _bytes_read = 0  # delivered by sized reads
    _name: str  # for messages
    _position: int
    _buffer_nbytes: int  # how large the window may be
    _window = memoryview(b"")
    _window_start = 0
    _next_window_nbytes = _FIRST_WINDOW_NBYTES

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {getattr(self, '_name', '(not open)')}>"

    # -- what subclasses say -----------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        """Raises ``StreamError`` when the stream is closed."""
        if self.closed:
            raise StreamError(f"{self!r} is closed")

    def _limit(self) -> Optional[int]:
        """Where the stream ends; ``None`` while that is unknown."""
        raise NotImplementedError

    def _knows_size(self) -> bool:
        """Whether the source has a size: a fetch that brings less is then an error of the source."""
        return True

    def _fetch_some(self, offset: int, into: memoryview) -> int:
        """Fills ``into``; returns the bytes, fewer only at the end."""
        raise NotImplementedError

    def _fetch_all(self, offset: int, into: memoryview) -> None:
        """Fills ``into``, which is large."""
        self._fetch_some(offset, into)

    def _fetch_bytes(self, offset: int, nbytes: int) -> bytes:
        """So many bytes, which are many."""
        buffer = bytearray(nbytes)
        self._fetch_all(offset, memoryview(buffer))
        return bytes(buffer)

    def _read_ahead(self, offset: int, nbytes: int) -> int:
        """How many of so many bytes may be fetched before anybody asks for them; 1 or more."""
        return nbytes

    def _count(self, nbytes: int) -> None:
        """Told of every sized read."""
        self._bytes_read += nbytes
        self.read_operations += 1

    # -- io.BufferedIOBase -------------------------------------------------------------------------------------------

    def read(self, size: Optional[int] = None) -> bytes:
        """Reads up to ``size`` bytes; fewer only at the end of the range. ``None`` or a negative number: all the rest.

        Raises:
            StreamError: The connection failed, the object changed, or the stream is closed.
        """
        self._check_open()
        if size is None or size < 0:
            return self._read_rest()
        if self._in_window(size) == size:  # as most small reads find it
            start = self._position - self._window_start
            data = bytes(self._window[start : start + size])
            self._position += size
        else:
            data = self._read_sized(self._available(size)) if self._knows_size() else self._read_pieces(size)
        self._count(len(data))
        return data

    def read1(self, size: int = -1, /) -> bytes:
        """Reads up to ``size`` bytes, with one request at most."""
        self._check_open()
        if self._in_window(1) == 0:
            self._fill_window()
        available = self._in_window(len(self._window))
        return self.read(available if size < 0 else min(size, available))

    def readinto(self, buffer: Buffer, /) -> int:
        """Fills ``buffer``; returns its size, or less at the end of the range. Bytes past that are untouched."""
        self._check_open()
        with memoryview(buffer) as view:
            if view.readonly:
                raise TypeError("readinto: expected a writable buffer")
            if view.nbytes == 0:  # cast() refuses some empty shapes
                self._count(0)
                return 0
            with view.cast("B") as plain:
                got = self._fill(plain)
        self._count(got)
        return got

    def readinto1(self, buffer: Buffer, /) -> int:
        """As :meth:`readinto`."""
        return self.readinto(buffer)

    def peek(self, size: int = 0, /) -> bytes:
        """Some of the next bytes, without moving; empty only at the end."""
        self._check_open()
        if self._in_window(1) == 0:
            self._fill_window()
        start = self._position - self._window_start
        return bytes(self._window[start : start + max(size, 8192)])

    def tell(self) -> int:
        """Absolute position in the object."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        """Moves to ``position`` bytes from the start of the object, the current position or the end; returns where.

        Seeking costs no request by itself.

        Raises:
            ValueError: The target is negative, or ``whence`` unknown.
            TypeError: The position is no integer.
            io.UnsupportedOperation: From the end, where the server has told no size.
            StreamError: The stream is closed.
        """
        target = self._seek_target(operator.index(position), whence)
        if target < 0:
            raise ValueError(f"seek: negative position {target}")
        self._move(target)
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

    # -- the window --------------------------------------------------------------------------------------------------

    def _seek_target(self, position: int, whence: int) -> int:
        if whence == os.SEEK_SET:
            return position
        if whence == os.SEEK_CUR:
            return self._position + position
        if whence == os.SEEK_END:
            self._check_open()
            limit = self._limit()
            if limit is None or not self._knows_size():
                raise io.UnsupportedOperation(f"seek from the end: the size of {self._name} is not known")
            return limit + position
        raise ValueError(f"seek: unknown whence {whence!r}")

    def _move(self, target: int) -> None:
        self._check_open()
        self.bytes_skipped += max(0, target - self._position)
        self._position = target

    def _available(self, nbytes: int) -> int:
        limit = self._limit()
        return nbytes if limit is None else max(0, min(nbytes, limit - self._position))

    def _in_window(self, nbytes: int) -> int:
        """How many of the next ``nbytes`` are in the window."""
        start = self._position - self._window_start
        return max(0, min(nbytes, len(self._window) - start)) if start >= 0 else 0

    def _fill(self, into: memoryview) -> int:
        """Fills ``into`` and moves on; returns the bytes, fewer only at the end."""
        into = into[: self._available(len(into))]
        done = 0
        while done < len(into):
            step = self._in_window(len(into) - done)
            if step > 0:
                start = self._position - self._window_start
                into[done : done + step] = self._window[start : start + step]
            elif len(into) - done >= _DIRECT_NBYTES:
                step = self._fill_directly(into[done:])
            else:
                self._fill_window()
                step = 0 if self._in_window(1) else -1
            if step < 0:
                break
            done += step
            self._position += step
        return done

    def _fill_directly(self, into: memoryview) -> int:
        if not self._knows_size():
            return self._fetch_some(self._position, into) or -1
        self._fetch_all(self._position, into)
        return len(into)

    def _fill_window(self) -> None:
        """Moves the window to the current position; it stays empty at the end."""
        if len(self._window) > 0 and self._position == self._window_start + len(self._window):
            self._next_window_nbytes = min(self._next_window_nbytes * 2, self._buffer_nbytes)
        else:
            self._next_window_nbytes = min(_FIRST_WINDOW_NBYTES, self._buffer_nbytes)
        nbytes = self._available(self._next_window_nbytes)
        buffer = bytearray(self._read_ahead(self._position, nbytes) if nbytes > 0 else 0)
        got = self._fetch_some(self._position, memoryview(buffer)) if buffer else 0
        self._window = memoryview(buffer)[:got].toreadonly()
        self._window_start = self._position

    def _read_rest(self) -> bytes:
        return self._read_sized(self._available(sys.maxsize)) if self._knows_size() else self._read_pieces(None)

    def _read_sized(self, nbytes: int) -> bytes:
        """The next ``nbytes``, which the object has if its server tells the truth."""
        try:
            if nbytes >= _DIRECT_NBYTES and self._in_window(1) == 0:
                data = self._fetch_bytes(self._position, nbytes)
                self._position += len(data)
                return data
            buffer = bytearray(nbytes)
        except (MemoryError, OverflowError):
            raise StreamError(
                f"Failed to read {self._name}: {nbytes} bytes at offset {self._position} are more than memory holds; "
                "read them in pieces"
            ) from None
        got = self._fill(memoryview(buffer))
        return bytes(memoryview(buffer)[:got])

    def _read_pieces(self, nbytes: Optional[int]) -> bytes:
        """Up to ``nbytes`` (all for ``None``) of an object of unknown size, in memory for what is there."""
        pieces = []
        left = sys.maxsize if nbytes is None else nbytes
        while left > 0:
            buffer = bytearray(self._available(min(left, _DIRECT_NBYTES)))
            got = self._fill(memoryview(buffer))
            pieces.append(bytes(memoryview(buffer)[:got]))
            left -= got
            if got < _DIRECT_NBYTES:
                break
        return b"".join(pieces)

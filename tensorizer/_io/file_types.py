"""What callers may pass as ``file_obj``, for type checkers and readers; the checks themselves are elsewhere."""

from __future__ import annotations

import os
from typing import Any, Optional, Protocol, Union

__all__ = ["PathArgument", "ReadableFile", "ReadintoFile", "SourceArgument", "TargetArgument", "WritableFile"]


class _PositionedFile(Protocol):
    def seek(self, offset: int, whence: int = ..., /) -> Any: ...

    def tell(self) -> int: ...

    def close(self) -> object: ...


class ReadableFile(_PositionedFile, Protocol):
    """A binary file object that can be read and positioned: what ``open(path, "rb")`` returns, ``io.BytesIO``."""

    def read(self, size: int = ..., /) -> Optional[bytes]: ...


class ReadintoFile(_PositionedFile, Protocol):
    """One that reads into memory it is given, as :class:`io.RawIOBase` does; faster."""

    def readinto(self, buffer: Any, /) -> Optional[int]: ...


class WritableFile(ReadableFile, Protocol):
    """A binary file object that can be written and read back: what ``open(path, "wb+")`` returns, ``io.BytesIO``."""

    def write(self, data: Any, /) -> Optional[int]: ...


#: A local path or a URI as ``str``; a local path as ``bytes`` or ``PathLike``; a descriptor.
PathArgument = Union[str, bytes, os.PathLike[str], os.PathLike[bytes], int]
#: What can be read.
SourceArgument = Union[PathArgument, ReadableFile, ReadintoFile]
#: What can be written.
TargetArgument = Union[PathArgument, WritableFile]

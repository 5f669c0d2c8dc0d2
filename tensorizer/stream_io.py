"""Opening local files as streams."""

from __future__ import annotations

import io
import os
from typing import BinaryIO, Optional, Union, cast

__all__ = ["open_stream"]


def open_stream(
    path_uri: Union[str, os.PathLike[str]],
    mode: str = "rb",
    *,
    buffer_size: Optional[int] = None,
    begin: Optional[int] = None,
) -> BinaryIO:
    """Opens a local file in a binary mode; missing parent folders are created when writing."""
    if "b" not in mode:
        raise ValueError(f"mode: wanted a binary mode, found {mode!r}")
    path = os.fspath(path_uri)
    if "://" in path and isinstance(path_uri, str):
        raise ValueError(f"scheme {path.partition('://')[0]!r} is not supported")
    if any(letter in mode for letter in "wax"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    stream = cast(BinaryIO, open(path, mode, buffering=io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size))
    stream.seek(begin or 0)
    return stream

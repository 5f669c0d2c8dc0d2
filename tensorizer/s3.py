"""Object stores that speak S3, by the names that callers import from here; the work is done in ``_io.s3``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tensorizer import stream_io
from tensorizer._io.http import CURLStreamFile
from tensorizer._io.s3.objects import s3_download, s3_upload
from tensorizer._io.upload_on_close import UploadOnClose

if TYPE_CHECKING:
    from tensorizer import _C

__all__ = ["open_read", "open_sink", "open_write", "s3_download", "s3_upload"]


def open_read(uri: str, **arguments: Any) -> CURLStreamFile:
    """:func:`tensorizer.stream_io.open_stream` in mode ``rb``."""
    return cast(CURLStreamFile, stream_io.open_stream(uri, "rb", **arguments))


def open_write(uri: str, mode: str = "wb", **arguments: Any) -> BinaryIO:
    """:func:`tensorizer.stream_io.open_stream` in a writing mode."""
    return cast(BinaryIO, stream_io.open_stream(uri, mode, **arguments))


def open_sink(uri: str, **arguments: Any) -> _C.MultipartSink:
    """What a serializer writes to: a multipart upload without a temporary file. It is the caller's to finish.

    Args:
        uri: ``s3://bucket/key``.
        **arguments: Those of :func:`tensorizer.stream_io.open_stream`.
    """
    stream = cast(UploadOnClose, stream_io.open_stream(uri, "wb", **arguments))
    return cast("_C.MultipartSink", stream.detach_sink())

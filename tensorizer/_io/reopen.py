"""Opening a file again that was read and closed, and only if it is still the same version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from tensorizer._io.sources import OpenedSource, is_path, open_source
from tensorizer._io.uri import LOCAL_SCHEMES, path_of_file_uri, scheme_of
from tensorizer._system.os_errors import stream_errors
from tensorizer._system.paths import expanded
from tensorizer.errors import StreamError

__all__ = ["SameFile"]


class SameFile(NamedTuple):
    """A path or URI, and what tells the version that was opened there."""

    file_obj: Any
    stream_options: Optional[Mapping[str, Any]]
    version: tuple[Any, ...]

    @classmethod
    def of(cls, file_obj: Any, opened: Any, stream_options: Optional[Mapping[str, Any]]) -> Optional[SameFile]:
        """``None`` for what cannot be opened again: the caller's objects, descriptors, the shards of a model."""
        if not is_path(file_obj) or isinstance(file_obj, int) or not isinstance(opened, OpenedSource):
            return None
        return cls(file_obj, stream_options, _version_of(file_obj, opened))

    def open(self) -> OpenedSource:
        """The file, open.

        Raises:
            StreamError: It is another version than the one that was read.
            OSError: It cannot be opened.
        """
        opened = open_source(self.file_obj, self.stream_options)
        if _version_of(self.file_obj, opened) != self.version:
            opened.close()
            raise StreamError(f"{opened.name}: it changed since it was loaded: load it again")
        return opened


def _version_of(file_obj: Any, opened: OpenedSource) -> tuple[Any, ...]:
    scheme = scheme_of(file_obj)
    if scheme is None or scheme in LOCAL_SCHEMES:
        with stream_errors():
            found = os.stat(expanded(os.fsdecode(file_obj)) if scheme is None else path_of_file_uri(file_obj))
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    headers = getattr(opened.stream, "response_headers", None) or {}
    return opened.source.size(), headers.get("etag"), headers.get("last-modified")

"""Facts about a source that commands ask for before they open it for work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from tensorizer._files.opened import OpenedFile
from tensorizer._files.pickled import pickled_files

__all__ = ["is_encrypted"]


def is_encrypted(source: Any, stream_options: Optional[Mapping[str, Any]] = None) -> bool:
    """Whether reading payloads of a file needs a key."""
    if pickled_files(source):
        return False
    with OpenedFile(source, stream_options=stream_options) as file:
        return bool(file.index.encrypted)

"""Which texts are URIs, and which of them name local paths."""

from __future__ import annotations

import re
import urllib.request
from typing import Optional

__all__ = ["LOCAL_SCHEMES", "path_of_file_uri", "scheme_of"]

# URIs that name paths; the second is fsspec's word.
LOCAL_SCHEMES = ("file", "local")

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


def scheme_of(location: object) -> Optional[str]:
    """The scheme in front of ``://`` in lower case; ``None`` for paths (also for all that is no ``str``)."""
    if not isinstance(location, str):
        return None
    scheme, separator, _ = location.partition("://")
    return scheme.lower() if separator and _SCHEME.fullmatch(scheme) else None


def path_of_file_uri(uri: str) -> str:
    """The local path in ``file:///path``; ``ValueError`` where it names another host."""
    rest = uri.split("://", 1)[1]
    host, slash, path = rest.partition("/")
    if host.lower() not in ("", "localhost"):
        raise ValueError(f"a file URI names a whole path of this computer: wanted file:///path, found host {host!r}")
    return urllib.request.url2pathname(slash + path)

"""Which texts are URIs, which of them name local paths, and how callers write those."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from typing import Any, NamedTuple, Optional

from tensorizer._system.redaction import CONTAINER_SCHEMES, shown_uri

# URIs that name paths; the second is fsspec's word.
LOCAL_SCHEMES = ("file", "local")

# One scheme, or several as fsspec chains them: "simplecache::s3".
_SCHEME = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*")


def scheme_of(location: object) -> Optional[str]:
    """The scheme in front of ``://`` in lower case; ``None`` for paths (also for all that is no ``str``)."""
    if not isinstance(location, str):
        return None
    scheme, separator, _ = location.partition("://")
    return scheme.lower() if separator and _SCHEME.fullmatch(scheme) else None


# What a Path leaves of a URI, of which it drops a slash. A single letter is rather a drive than a scheme.
_LIKE_URI = re.compile(rf"{_SCHEME.pattern}(?<=[A-Za-z0-9+.-]{{2}}):/")


def check_is_path(location: Any) -> None:
    """Refuses a path that was meant as a URI: it would be in a folder called ``s3:``. URIs themselves pass.

    Raises:
        TypeError: Neither ``str``, ``bytes`` nor ``PathLike``.
        ValueError: A ``PathLike`` that begins like a URI; a text that does, and no folder has its first name.
    """
    text = os.fsdecode(location)
    if _LIKE_URI.match(text) is None or scheme_of(location) is not None:
        return
    first, _, rest = text.partition("/")
    meant = shown_uri(f"{first}//{rest.lstrip('/')}")
    if isinstance(location, os.PathLike):
        raise ValueError(f"{type(location).__name__} of {meant}: a path object is no URI: pass {meant} as a text")
    if not os.path.lexists(first):
        raise ValueError(
            f"expected a path or a URI, got {first}/…, and there is no folder {first}: did you mean {meant}?"
        )


def expanded(path: str) -> str:
    """The path with ``~`` or ``~name`` in front replaced by that home folder, as a shell does.

    A file that is really called so, in the current folder, is meant where there is one.
    """
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


# What may stand behind a key: one version of an object in S3, a database of Redis.
_BEHIND_KEYS = {"s3": "versionId", "redis": "db", "rediss": "db"}


def split_query(uri: str) -> tuple[str, str]:
    """What names a file in a URI, and what stands behind that, with the ``?`` or ``#`` in front; perhaps nothing.

    The latter is query and fragment of an HTTP URL, ``?versionId=...`` at the end of an ``s3://`` URI, and ``?db=...``
    at the end of a ``redis://`` URI. Elsewhere these are characters of a key like others, as in every other scheme.
    """
    scheme = scheme_of(uri)
    if scheme in ("http", "https"):
        found = re.search(r"[?#]", uri)
    else:
        found = re.search(rf"\?{_BEHIND_KEYS[scheme]}=[^/?#]*\Z", uri) if scheme in _BEHIND_KEYS else None
    at = len(uri) if found is None else found.start()
    return uri[:at], uri[at:]


def folder_uri(uri: str) -> str:
    """The URI of a folder without the slash at its end, to which names are joined with one.

    Raises:
        ValueError: No bucket or host, with which a name would become one; one version of an object.
    """
    folder, behind = split_query(uri)
    scheme, _, place = folder.partition("://")
    if scheme.lower() == "s3" and behind:
        raise ValueError(f"{uri}: expected a folder, got one version of an object")
    if scheme.lower() in ("s3", "http", "https", "hf") and not place.partition("/")[0]:
        raise ValueError(f"{scheme}://: expected a bucket or host behind it, got none")
    return uri.removesuffix("/") if place else uri


class SplitURI(NamedTuple):
    """The parts of ``scheme://authority/path?query``, with their characters as they were."""

    scheme: str  # in lower case; empty for a path
    authority: str
    path: str  # without the slash behind the authority
    query: str

    def __repr__(self) -> str:
        """Without what may be a password or signature."""
        return f"SplitURI({shown_uri(f'{self.scheme}://{self.authority}/{self.path}')!r})"


# Names of access points, which stand in place of a bucket and have slashes or colons in them, as the AWS CLI has them.
_ARN = re.compile(
    r"arn:[^:/]+:(?:(?:s3|s3-object-lambda):[a-z0-9-]*:\d{12}:accesspoint[:/][A-Za-z0-9.-]{1,63}"
    r"|s3-outposts:[a-z0-9-]+:\d{12}:outpost[:/][A-Za-z0-9-]{1,63}[:/]accesspoint[:/][A-Za-z0-9-]{1,63})(?=/|\Z)"
)


def is_arn(bucket: str) -> bool:
    """Whether what stands in place of a bucket is the whole name of an access point."""
    return _ARN.fullmatch(bucket) is not None


def split_uri(uri: str) -> SplitURI:
    """Takes a URI apart, as :func:`split_query` does. No error quotes what may be a password."""
    rest, behind = split_query(uri)
    query = behind[1:].partition("#")[0] if behind.startswith("?") else ""
    scheme, separator, rest = rest.partition("://")
    if not separator:
        return SplitURI("", "", scheme, query)
    arn = _ARN.match(rest) if scheme.lower() == "s3" else None
    authority, path = (rest[: arn.end()], rest[arn.end() + 1 :]) if arn else rest.partition("/")[::2]
    return SplitURI(scheme.lower(), authority, path, query)


def local_path(location: Any) -> Optional[str]:
    """The local path that a path or a URI names, home folders expanded; ``None`` for URIs of other schemes.

    Raises:
        TypeError: Neither ``str``, ``bytes`` nor ``PathLike``.
        ValueError: A file URI that names another host, or a URI that lost a slash (:func:`check_is_path`).
    """
    scheme = scheme_of(location)
    if scheme is None:
        check_is_path(location)
        return expanded(os.fsdecode(location))
    return path_of_file_uri(location) if scheme in LOCAL_SCHEMES else None


def name_in(folder: Any, name: str) -> str:
    """The path or URI of a name in a folder; raises as :func:`local_path` and :func:`folder_uri`."""
    path = local_path(folder)
    return f"{folder_uri(folder)}/{name}" if path is None else os.path.join(path, name)


def signature_place(location: Any) -> Any:
    """The name of a file with ``.sig`` behind it; ``None`` for what has no name."""
    if location is None or isinstance(location, int):
        return None
    scheme = scheme_of(location)
    if scheme is not None:
        name, behind = split_query(location)
        return f"{name}.sig" + ("" if scheme == "s3" else behind)  # a version is that of the other object
    if hasattr(location, "__fspath__"):
        location = location.__fspath__()
    return location + (b".sig" if isinstance(location, bytes) else ".sig")


def identity_of(location: Any) -> Hashable:
    """What names of one file have in common: the absolute path, or the URI without user, password and query."""
    path = local_path(location)
    if path is not None:
        return os.path.abspath(path)
    parts = split_uri(location)
    authority = parts.authority if parts.scheme in CONTAINER_SCHEMES else parts.authority.rpartition("@")[2]
    return parts._replace(authority=authority, query="")


def path_of_file_uri(uri: str) -> str:
    """The local path in ``file:///path``; ``ValueError`` where it names another host."""
    rest = uri.split("://", 1)[1]
    host, slash, path = rest.partition("/")
    if host.lower() not in ("", "localhost"):
        host = host.rpartition("@")[2]  # what stands before it may be a password
        raise ValueError(f"a file URI names a whole path of this computer: expected file:///path, got host {host!r}")
    import urllib.request  # not for every command line

    return urllib.request.url2pathname(slash + path)

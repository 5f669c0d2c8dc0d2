"""The cache of remote objects on the disk of the node: what is in it, filling, checking and emptying it.

Reads use it if ``TENSORIZER_CACHE`` or ``cache=`` names a folder (docs/node-cache.md). The command line
``tensorizer cache`` prints what these functions return.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from tensorizer import _C
from tensorizer._io.call_options import CallOptions
from tensorizer._io.node_cache import Cache, CachedFile, CacheOptions, open_to_look, parse_about
from tensorizer._io.sources import HEAD_NBYTES, begins_as_tensors, open_stream
from tensorizer._io.uri import local_path, scheme_of
from tensorizer._system.redaction import shown_uri
from tensorizer._system.sizes import parse_size
from tensorizer.errors import FormatError, StreamError

__all__ = ["CacheOptions", "add", "entries", "prune", "verify"]

_DAY = 86400


@dataclasses.dataclass(frozen=True)
class Entry:
    """One version of one object in the cache."""

    location: str
    """The URL without user, password and query."""
    version: str
    size: int
    """Bytes of the object."""
    cached: int
    """Bytes of the object that are in the cache: all, or 0 if its files are damaged."""
    disk: int
    """Bytes that the entry takes on the disk."""
    last_used: float
    """When it was last used, in seconds since 1970."""
    in_use: bool
    newest: bool
    """Whether no other version of the location was used later."""
    path: Path
    """The folder of the entry."""

    @property
    def complete(self) -> bool:
        return self.cached == self.size

    @property
    def state(self) -> str:
        """``"in use"``, ``"old"``, ``"complete"`` or ``"damaged"``."""
        if self.in_use:
            return "in use"
        return "old" if not self.newest else "complete" if self.complete else "damaged"

    @property
    def _key(self) -> tuple[str, str]:
        return self.path.parent.name, self.path.name


class Pruned(NamedTuple):
    """What :func:`prune` removed, or would remove, and what it left because a process has it open."""

    removed: list[Entry]
    skipped: list[Entry]


class Verified(NamedTuple):
    """What :func:`verify` found of one entry."""

    entry: Entry
    problem: Optional[str]
    """Why the entry was removed; ``None`` if it is sound."""
    checked: int
    """Tensors that were compared with a digest, or whose file has the right structure."""


Folder = Union[None, str, os.PathLike[str], CacheOptions]


def entries(cache: Folder = None) -> list[Entry]:
    """Returns the entries of the cache, in the order in which :func:`prune` would remove them.

    Args:
        cache: As for :func:`tensorizer.stream_io.open_stream`.

    Raises:
        ValueError: There is no cache: pass a folder, or set ``TENSORIZER_CACHE``.
        OSError: The folder cannot be used.

    Examples:
        >>> from tensorizer import cache
        >>> _ = cache.add("https://models.example/model.tensors", cache="cache")
        >>> [entry.complete for entry in cache.entries("cache")]
        [True]
    """
    return _entries(_open(cache)[0])


def prune(
    cache: Folder = None,
    *,
    max_size: Union[int, str, None] = None,
    older_than: Optional[float] = None,
    location: Optional[str] = None,
    all: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Removes entries, the least recently used first; those that are open stay.

    If you pass none of `max_size`, `older_than`, `location` and `all`, it removes old versions, left-overs of
    interrupted downloads, and what exceeds the limits of the settings.

    Args:
        cache: As for :func:`tensorizer.stream_io.open_stream`.
        max_size: Removes entries until all take at most so many bytes, or a text such as ``"500GB"``.
        older_than: Removes entries that were not used for so many days.
        location: Removes entries whose location matches the pattern (``* ? []``).
        all: Removes all entries.
        dry_run: Removes nothing, and returns what would be removed.

    Raises:
        ValueError: There is no cache, or a size is malformed.
        OSError: The folder cannot be used.

    Examples:
        >>> from tensorizer import cache
        >>> _ = cache.add("https://models.example/model.tensors", cache="cache")
        >>> cache.prune("cache", max_size="500GB").removed
        []
    """
    limit = None if max_size is None else parse_size("max_size", max_size)
    if older_than is not None and not older_than >= 0:
        raise ValueError(f"older_than: expected a number of days >= 0, got {older_than}")
    folder, chosen = _open(cache)
    pruned = Pruned([], [])
    if folder is None:
        return pruned
    by_default = max_size is None and older_than is None and location is None and not all
    least_free = 0
    if by_default:
        limit, least_free = chosen.limits(folder).values()
        if not dry_run:
            folder.sweep()
    found = _entries(folder)
    used = sum(entry.disk for entry in found)
    free = folder.disk_nbytes()[1]
    oldest = -math.inf if older_than is None else time.time() - older_than * _DAY
    by_location = location is not None and older_than is None and max_size is None
    for entry in found:
        wanted = (
            all
            or by_location
            or (by_default and not entry.newest)
            or free < least_free
            or entry.last_used < oldest
            or (limit is not None and used > limit)
        )
        if not wanted or not fnmatch.fnmatchcase(entry.location, "*" if location is None else location):
            continue
        if entry.in_use or not (dry_run or folder.remove(*entry._key)):
            pruned.skipped.append(entry)
            continue
        used -= entry.disk
        free += entry.disk
        pruned.removed.append(entry)
    return pruned


def verify(cache: Folder = None, *, location: Optional[str] = None) -> list[Verified]:
    """Reads the cache and compares every tensor in it with its digests.

    Of encrypted files it reads only the index. Of ``.safetensors`` files, which hold no digests, it checks the
    structure. Other objects count as right. A damaged entry is removed.

    Args:
        cache: As for :func:`tensorizer.stream_io.open_stream`.
        location: Only entries whose location matches the pattern.

    Raises:
        ValueError: There is no cache: pass a folder, or set ``TENSORIZER_CACHE``.
        OSError: The folder cannot be used.

    Examples:
        >>> from tensorizer import cache
        >>> _ = cache.add("https://models.example/model.tensors", cache="cache")
        >>> [result.problem for result in cache.verify("cache")]
        [None]
    """
    folder, _ = _open(cache)
    result = []
    for entry in _entries(folder):
        if folder is None or not fnmatch.fnmatchcase(entry.location, "*" if location is None else location):
            continue
        if entry._key[1] not in dict(folder.versions(entry._key[0])):  # another process has removed it
            continue
        problem, checked = _problem_of(folder, entry)
        if problem is not None:
            folder.remove(*entry._key, force=True)
        result.append(Verified(entry, problem, checked))
    return result


def add(*uris: str, cache: Folder = None, stream_options: Optional[Mapping[str, Any]] = None) -> list[Entry]:
    """Downloads whole objects that the cache lacks. Returns when they would survive a power cut.

    Args:
        uris: URIs of objects. For a folder of shards, pass the URIs of its files.
        cache: As for :func:`tensorizer.stream_io.open_stream`.
        stream_options: Further keywords for :func:`tensorizer.stream_io.open_stream`.

    Raises:
        ValueError: There is no cache, it is offline, or a URI names a local file.
        OSError: An object cannot be read, must not be cached, or there is no room for it.

    Examples:
        >>> from tensorizer import cache
        >>> [entry.complete for entry in cache.add("https://models.example/model.tensors", cache="cache")]
        [True]
    """
    chosen = _chosen(cache)
    if chosen.offline:
        raise ValueError("nothing can be added to a cache with offline set")
    chosen.must_keep = True
    options = CallOptions.to_read(stream_options={**(stream_options or {}), "cache": chosen})
    added = []
    for uri in uris:
        if local_path(uri) is not None:
            raise ValueError(f"{shown_uri(uri)} is a local file, which needs no cache")
        stream: Any = open_stream(uri, "rb", options)
        with stream:
            source = stream._tensorizer_source()
            if not isinstance(source, _C.CacheSource):
                raise StreamError(
                    f"{shown_uri(uri)} is not cached: expected an object of http, https, s3 or hf, got {scheme_of(uri)}"
                )
            source.fill()
        added += [entry for entry in _entries(_open(chosen)[0]) if entry._key == source.key]
    return added


# -- how ---------------------------------------------------------------------------------------------------------------


def _chosen(cache: Union[Folder, Cache]) -> Cache:
    chosen = Cache.chosen(cache)
    if chosen is None:
        raise ValueError("no cache: pass a folder or set TENSORIZER_CACHE")
    return chosen


def _open(cache: Union[Folder, Cache]) -> tuple[Optional[_C.CacheFolder], Cache]:
    """The folder of the cache; ``None`` if nothing was ever cached."""
    chosen = _chosen(cache)
    try:
        return _C.CacheFolder(os.fsencode(chosen.path), False), chosen
    except FileNotFoundError:
        return None, chosen


def _entries(folder: Optional[_C.CacheFolder]) -> list[Entry]:
    found: list[Entry] = []
    if folder is None:
        return found
    for one in folder.scan():
        about = parse_about(dict(folder.versions(one.location)).get(one.version, b"")) or {}
        found.append(
            Entry(
                location=about.get("location", "?"),
                version=about.get("version", "?"),
                size=one.nbytes,
                cached=one.nbytes if about and folder.has_copy(one.location, one.version, about["size"]) else 0,
                disk=one.disk_nbytes,
                last_used=one.used / 1e9,
                in_use=folder.is_used(one),
                newest=one.newest,
                path=Path(os.fsdecode(folder.path_of(one))),
            )
        )
    return found


def _problem_of(folder: _C.CacheFolder, entry: Entry) -> tuple[Optional[str], int]:
    """The problem of an entry, and the number of tensors that were checked."""
    from tensorizer._files.verify import verify as verify_file
    from tensorizer._io.call_options import CallOptions
    from tensorizer._load.open_file import open_whole

    try:
        source = open_to_look(folder, entry._key, entry.size, entry.location)
        if source is None:
            return "its files are damaged", 0
    except OSError as error:
        return str(error), 0
    try:
        if not begins_as_tensors(source.read(0, min(entry.size, HEAD_NBYTES))):
            return None, 0
        with open_whole(CachedFile(source), CallOptions()) as file:
            if file.index.encrypted:
                return None, 0
            checked = len(file.stored)
        report = verify_file(CachedFile(source))
        wrong = "; ".join(mismatch.reason for mismatch in report.mismatched[:3])
        if report.index_matches is False:
            wrong = "the index does not match its digest"
        return wrong or None, checked
    except (FormatError, StreamError) as error:
        return str(error), 0
    finally:
        source.release()

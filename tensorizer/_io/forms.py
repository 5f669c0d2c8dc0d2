"""Several sets of weights in one folder: whether they are forms of one model, and which of them is read.

A file or index that ``convert`` wrote beside its source notes what it was made from (docs/format.md, "Origin"). As long
as the source is still that, both are one model, and the file that was made is read. Other sets are refused, by name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Optional

from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.model_files import is_index_name
from tensorizer._io.shards import MAX_INDEX_NBYTES, FileFacts, Origin, facts_of, parse_index
from tensorizer._io.sources import open_source, read_checked
from tensorizer._io.uri import local_path
from tensorizer._system.redaction import shown_location
from tensorizer.errors import FormatError

logger = logging.getLogger("tensorizer.serialization")

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


#: What the ``.tensors`` file or index at a path or URI notes of its origin.
NoteOf = Callable[[Any], Optional[str]]


def parse_origin(text: Optional[str]) -> Optional[Origin]:
    """The content of a note; ``None`` if it is missing or damaged."""
    try:
        origin = {name: FileFacts(*facts) for name, facts in json.loads(text or "null").items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    for nbytes, mtime_ns, digest in origin.values():
        if not (type(nbytes) is int and isinstance(mtime_ns, (int, type(None))) and isinstance(digest, str)):
            return None
        if not _SHA256.match(digest):
            return None
    return origin or None


class FolderOfForms:
    """What has to be known of the files in a folder, to tell whether they are one model.

    Args:
        label: The folder, for messages.
        locate: From a name in it to the path or URI.
        note_of: What the ``.tensors`` file or index at a path or URI notes of its origin.
        options: For opening URIs.
    """

    def __init__(
        self,
        label: str,
        locate: Callable[[str], Any],
        note_of: NoteOf,
        options: CallOptions = PLAIN,
    ) -> None:
        self.label, self.locate, self.note_of, self.options = label, locate, note_of, options

    def shards(self, name: str) -> frozenset[str]:
        """The files that an index names; empty for a single file, and for an index that is damaged."""
        if not is_index_name(name):
            return frozenset()
        shown = str(shown_location(self.locate(name)))

        def parsed(text: bytes) -> frozenset[str]:
            return frozenset(parse_index(shown, text)[0].values())

        with contextlib.suppress(FormatError):
            return read_checked(self.locate(name), self.options, parsed, MAX_INDEX_NBYTES)
        return frozenset()

    def origin(self, name: str) -> Optional[Origin]:
        """What a file or index was made from; ``None`` where it does not say, or is damaged."""
        if ".tensors" not in name:  # no other format has such a note
            return None
        with contextlib.suppress(FormatError, FileNotFoundError):
            return parse_origin(self.note_of(self.locate(name)))
        return None

    def is_unchanged(self, made: str, origin: Origin) -> bool:
        """Whether the files that `made` was made from are those that are here now."""
        doubtful = []
        for name, facts in origin.items():
            nbytes, mtime_ns = self.size_and_time(name)
            if nbytes != facts.nbytes:
                return False
            if mtime_ns is None or mtime_ns != facts.mtime_ns:
                doubtful.append(name)
        return all(self.sha256(name, made) == origin[name].sha256 for name in doubtful)

    def size_and_time(self, name: str) -> tuple[Optional[int], Optional[int]]:
        """Bytes of a file, and when it was written, in nanoseconds; ``None`` where the place does not say."""
        location = self.locate(name)
        path = local_path(location)
        if path is not None:
            found = os.stat(path)
            return found.st_size, found.st_mtime_ns
        with contextlib.closing(open_source(location, self.options)) as opened:
            return opened.source.size(), None

    def sha256(self, name: str, made: str) -> str:
        """Hexadecimal SHA-256 of a file, because `made` says that it was made from it."""
        logger.warning(
            "%s: %s was made from %s, whose time of writing does not show whether it has changed since: it is read as "
            "a whole and compared by its SHA-256; naming the file that is meant, or removing the other, saves that",
            self.label,
            made,
            name,
        )
        return facts_of(self.locate(name), self.options).sha256


def choose(forms: Sequence[str], folder: FolderOfForms) -> str:
    """The one of several files of weights or indexes that is read, where they are one model.

    Args:
        forms: Names in the folder, at least one. Of several that are one model the first that was made from another
            one is read, else the first.
        folder: What is known of them.

    Raises:
        FormatError: They are not one model, as far as can be told.
        OSError: A file cannot be read.
    """
    if len(forms) == 1:
        return forms[0]
    groups = {form: {form} for form in forms}

    def join(one: str, other: str) -> None:
        merged = groups[one] | groups[other]
        groups.update(dict.fromkeys(merged, merged))

    shards = {form: folder.shards(form) for form in forms}
    for form in forms:
        for other in forms:  # an index of the other file alone, or two indexes of the same files
            if form != other and shards[form] and shards[form] in (shards[other], {other}):
                join(form, other)
    made, changed = [], []
    for form in forms:
        origin = folder.origin(form)
        if origin is None:
            continue
        source, *files = origin
        if source not in forms or source == form or shards[source] != set(files):
            continue
        if folder.is_unchanged(form, origin):
            made.append(form)
            join(form, source)
        else:
            changed.append(f" ({form} was made from {source}, which has changed since)")
    if len(groups[forms[0]]) == len(forms):
        return made[0] if made else forms[0]
    neither = "neither is" if len(forms) == 2 else "they are not"
    raise FormatError(
        f"{folder.label}: found {_listed(forms)}, which may be different weights, since {neither} marked as made from "
        f"the other{''.join(changed)}: name the file that is meant, remove the other, or convert it again"
    )


def _listed(names: Sequence[str]) -> str:
    if len(names) == 2:
        return f"both {names[0]} and {names[1]}"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def origin_in(folder: str, name: str) -> Origin:
    """The facts of a local file of weights, or of an index and its shards."""
    shards = FolderOfForms(folder, lambda file: os.path.join(folder, file), lambda _: None).shards(name)
    return {file: facts_of(os.path.join(folder, file)) for file in (name, *sorted(shards))}

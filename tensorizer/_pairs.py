"""Pairs each ``.tensors`` file (the sidecar) with its ``.pt`` file: by a note in the ``.pt`` file, a number in both,
and their names.

The sidecar of the latest save has the name that every release looks for: the name of the ``.pt`` file and ``.tensors``.
If a save would replace a sidecar that another ``.pt`` file still needs, because that one was renamed or copied, the
save renames the sidecar first. A load then finds it by the name in the ``.pt`` file and the pair number.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import pickle
import re
import secrets
import struct
import time
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, Optional

from tensorizer._io.uri import local_path
from tensorizer.errors import StreamNotFoundError

logger = logging.getLogger("tensorizer.torch_compat")

# --- the note in the .pt file --------------------------------------------------------------------------------------

# The name, its length, the magic. The magic ends with a full stop, as a pickle does, for releases that know no names.
_NAME = struct.Struct("<I8s")
_NAME_MAGIC = b"TZRNAME."
# sizes (u64 each), then: pair_id (u64), number of sizes (u64), magic; all little-endian
_FOOTER = struct.Struct("<QQ8s")
_FOOTER_MAGIC = b"TZRPAIR1"
# In torch's older format, other pickles follow the first one. There the note is a text among the facts about the
# system, which stand at the start.
_TEXT_KEY = "tensorizer_pair"
_TEXT = re.compile("TZRPAIR2:([0-9a-f]{16}):(.*)", re.DOTALL)

_IN_CONTENT = re.compile(b"TZRPAIR1|TZRPAIR2:([0-9a-f]{16}):")
_ZIP_MAGIC = b"PK\x03\x04"
_OLDER_MAGIC = b"\xfc\x9cF\xf9 j\xa8P\x19"  # is in the first pickle of torch's older format
# Larger files hold other content, too: only the places where a note can stand are read.
_LOOKED_THROUGH_NBYTES = 64 << 20


class PairNote(NamedTuple):
    """What a ``.pt`` file knows about its sidecar."""

    pair_id: int  # 0: the sidecar has no number
    sizes: Optional[tuple[int, ...]]  # bytes of each storage; None in torch's older format
    name: str = ""  # name of the sidecar, without its folder; empty if it is not a local file

    def to_bytes(self) -> bytes:
        sizes = self.sizes or ()
        name = self.name.encode("utf-8", "surrogateescape")
        named: bytes = name + _NAME.pack(len(name), _NAME_MAGIC)
        sized: bytes = struct.pack(f"<{len(sizes)}Q", *sizes)
        return named + sized + _FOOTER.pack(self.pair_id, len(sizes), _FOOTER_MAGIC)

    @classmethod
    def behind_pickle(cls, data: memoryview) -> Optional[PairNote]:
        """The note at the end of a pickled record; ``None`` if another writer wrote it, without a note."""
        footer_at = len(data) - _FOOTER.size
        if footer_at < 1:
            return None
        pair_id, count, magic = _FOOTER.unpack_from(data, footer_at)
        sizes_at = footer_at - 8 * count
        if magic != _FOOTER_MAGIC or sizes_at < 1 or data[sizes_at - 1] != pickle.STOP[0]:
            return None
        name = ""
        if sizes_at > _NAME.size:
            nbytes, magic = _NAME.unpack_from(data, sizes_at - _NAME.size)
            name_at = sizes_at - _NAME.size - nbytes
            if magic == _NAME_MAGIC and name_at >= 1:
                name = bytes(data[name_at : name_at + nbytes]).decode("utf-8", "surrogateescape")
        return cls(pair_id, struct.unpack_from(f"<{count}Q", data, sizes_at), _name_only(name))

    def in_facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The first pickles of torch's older format, with the note."""
        return {**facts, _TEXT_KEY: f"TZRPAIR2:{self.pair_id:016x}:{self.name}"}

    @classmethod
    def from_facts(cls, facts: Any) -> Optional[PairNote]:
        """The note in pickles that :meth:`in_facts` made; ``None`` for anything else."""
        text = facts.get(_TEXT_KEY) if type(facts) is dict and "type_sizes" in facts else None
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        return None if found is None else cls(int(found[1], 16), None, _name_only(found[2]))


def is_facts(obj: Any) -> bool:
    """Whether these are the facts about the system that torch's older format stores before the object."""
    return isinstance(obj, dict) and obj.keys() == {"protocol_version", "little_endian", "type_sizes"}


def _name_only(name: str) -> str:
    """Refuses a name in a file that leads to another folder."""
    return "" if name != os.path.basename(name) or name in (os.curdir, os.pardir) or "\0" in name else name


# --- the number in the sidecar -------------------------------------------------------------------------------------

_SIDECAR_MAGIC = b"|TZR|"
_RESERVED_AT, _RESERVED_NBYTES = 49, 8


def new_pair_id() -> int:
    return secrets.randbits(64) | 1


def path_of(location: Any) -> Optional[str]:
    """The local path that a location names; ``None`` for open files and for other URIs."""
    return local_path(location) if isinstance(location, (str, bytes, os.PathLike)) else None


def _file_path(location: Any) -> Optional[str]:
    path = path_of(location)
    return path if path is not None and os.path.isfile(path) else None  # opening a pipe would wait for a writer


def stamp(location: Any, pair_id: int) -> bool:
    """Writes the number into a finished local sidecar. Returns False if that fails: the pair then has no number."""
    path = _file_path(location)
    if path is None:
        return False
    try:
        with open(path, "r+b", buffering=0) as file:
            if file.read(len(_SIDECAR_MAGIC)) != _SIDECAR_MAGIC:
                return False
            file.seek(_RESERVED_AT)
            return file.write(pair_id.to_bytes(_RESERVED_NBYTES, "little")) == _RESERVED_NBYTES
    except OSError:
        return False


def stamp_of(location: Any) -> int:
    """The number in a local sidecar; 0 if it has none or cannot be read."""
    path = _file_path(location)
    if path is None:
        return 0
    try:
        with open(path, "rb", buffering=0) as file:
            if file.read(len(_SIDECAR_MAGIC)) != _SIDECAR_MAGIC:
                return 0
            file.seek(_RESERVED_AT)
            return int.from_bytes(file.read(_RESERVED_NBYTES), "little")
    except OSError:
        return 0  # the load that opens it for its tensors reports the error


# --- which .pt files need a sidecar --------------------------------------------------------------------------------


class Target(NamedTuple):
    """The file of one ``torch.save`` or ``torch.load``, as it was before."""

    f: Any
    path: Optional[str]  # None for a buffer in memory and for a file without a name
    was_there: bool

    @classmethod
    def of(cls, f: Any) -> Target:
        name = f if isinstance(f, (str, bytes, os.PathLike)) else getattr(f, "name", None)
        path = os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None
        return cls(f, path, path is not None and os.path.lexists(path))

    @property
    def is_open(self) -> bool:
        return not isinstance(self.f, (str, bytes, os.PathLike))

    def is_appended_to(self) -> bool:
        """Whether the open file may have content before the position at which the save writes."""
        try:
            return bool(self.is_open and self.f.tell() > 0)
        except (AttributeError, OSError):
            return self.is_open

    def names(self, pair_id: int) -> bool:
        """Whether an open file already has the note of an earlier object with this number."""
        if not self.is_open or self.path is None:
            return False
        with contextlib.suppress(Exception):
            self.f.flush()
        try:
            return pair_id in _pairs_in(self.path)
        except OSError:
            return False

    def is_named_beside(self, pair_id: int, folders: Iterable[str]) -> bool:
        """Whether other files in these folders have a note with this number."""
        mine = None
        with contextlib.suppress(OSError, TypeError):
            mine = None if self.path is None else os.stat(self.path)
        for entry in _files(folders):
            try:
                status = entry.stat()
                if mine is not None and os.path.samestat(mine, status):
                    continue
                key = (entry.path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                is_old = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _CLOCK_NS
                if pair_id in (_remembered_pairs(*key) if is_old else _pairs_in(entry.path)):
                    return True
            except OSError:
                continue
        return False


# A file that changed just now may change again without a new time in its status.
_CLOCK_NS = 10 * 10**9


def _files(folders: Iterable[str], suffix: Optional[str] = None) -> Iterator[os.DirEntry[str]]:
    """The regular files with the suffix; without a suffix, all that are not sidecars."""
    for folder in dict.fromkeys(os.path.abspath(folder) for folder in folders):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if (not entry.name.endswith(".tensors") if suffix is None else entry.name.endswith(suffix)) and (
                    entry.is_file()
                ):
                    yield entry


def _pairs_in(path: str) -> frozenset[int]:
    """The numbers of all notes in a file that ``torch.save`` wrote; no numbers for other files."""
    with open(path, "rb") as file:
        head = file.read(64)
        is_zip = head.startswith(_ZIP_MAGIC)
        if not is_zip and _OLDER_MAGIC not in head:
            return frozenset()
        if is_zip and os.fstat(file.fileno()).st_size > _LOOKED_THROUGH_NBYTES:
            content = _ends_of_pickles(file)
        else:
            content = head + file.read(_LOOKED_THROUGH_NBYTES)
    numbers = set()
    for match in _IN_CONTENT.finditer(content):
        footer_at = max(0, match.end() - _FOOTER.size)
        number = content[footer_at : footer_at + 8]
        numbers.add(int.from_bytes(number, "little") if match[1] is None else int(match[1], 16))
    return frozenset(numbers)


@functools.lru_cache(maxsize=1 << 14)
def _remembered_pairs(path: str, *_status: int) -> frozenset[int]:
    return _pairs_in(path)


def _ends_of_pickles(file: BinaryIO) -> bytes:
    ends = b""
    try:
        with zipfile.ZipFile(file) as archive:
            records = [info for info in archive.infolist() if info.filename.endswith("data.pkl")]
        for info in records:
            file.seek(info.header_offset + 26)
            name_nbytes, extra_nbytes = struct.unpack("<HH", file.read(4))
            file.seek(info.header_offset + 30 + name_nbytes + extra_nbytes + max(0, info.file_size - _FOOTER.size))
            ends += file.read(_FOOTER.size)
    except (zipfile.BadZipFile, struct.error, NotImplementedError):
        return b""
    return ends


# --- names ---------------------------------------------------------------------------------------------------------


def _name_aside(name: str, pair_id: int) -> str:
    """A name for a sidecar that must not be replaced, short enough for every file system."""
    stem = name[: -len(".tensors")] if name.endswith(".tensors") else name
    return os.fsdecode(os.fsencode(stem)[:200]) + f".{pair_id:016x}.tensors"


def keep_if_needed(path: str, target: Target, *, is_default: bool) -> None:
    """Renames a sidecar that is about to be replaced if another object needs it.

    Args:
        path: The sidecar.
        target: The file that ``torch.save`` is writing.
        is_default: Whether the sidecar's name was derived from the name of the file. Then a sidecar without its file is
            kept, too, because the file may have been moved to another folder.

    Raises:
        OSError: The sidecar cannot be renamed.
    """
    pair_id = stamp_of(path)
    if not pair_id:
        return
    folder, name = os.path.split(path)
    folders = [folder or os.curdir, *([] if target.path is None else [os.path.dirname(target.path) or os.curdir])]
    is_orphan = is_default and not target.was_there
    if is_orphan or target.names(pair_id) or target.is_named_beside(pair_id, folders):
        aside = os.path.join(folder, _name_aside(name, pair_id))
        os.rename(path, aside)
        logger.info("%s: an earlier object needs it, or its file was renamed, moved or deleted; now %s", path, aside)


def find(location: Any, note: Optional[PairNote], target: Target) -> Any:
    """Finds the sidecar with the number in the note: at `location`, or under another name beside it.

    Returns:
        The place of the sidecar; ``location`` if no other is found.
    """
    path = path_of(location)
    if path is None or note is None or not note.pair_id or stamp_of(path) == note.pair_id:
        return location
    folders = [os.path.dirname(path) or os.curdir]
    if target.path is not None:
        folders.append(os.path.dirname(target.path) or os.curdir)
    names = [note.name, _name_aside(note.name, note.pair_id)] if note.name else []
    likely = (os.path.join(folder, name) for folder in folders for name in names)
    others = (entry.path for entry in _files(folders, ".tensors"))
    for candidates in (likely, others):
        for candidate in candidates:
            if stamp_of(candidate) == note.pair_id:
                return candidate
    return location


PATTERNS = (
    "a file of torch.save and its .tensors file belong together, and part where only the first is renamed, copied or "
    "moved to another folder, or where a rotation deletes one of them"
)


def missing(location: str, note: Optional[PairNote], target: Target) -> StreamNotFoundError:
    """The error for a sidecar that does not exist."""
    saved_as = f", saved as {note.name!r}" if note is not None and note.name else ""
    text = f"the .tensors file of {target.path!r}{saved_as}, is not beside it; {PATTERNS}"
    return StreamNotFoundError(errno.ENOENT, text, location)

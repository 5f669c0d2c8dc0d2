"""New local files: where they may take their names, what they take over, and when they appear."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from typing import Any, BinaryIO, NamedTuple, Optional

from tensorizer import _C
from tensorizer._io.uri import local_path
from tensorizer.errors import stream_errors

logger = logging.getLogger("tensorizer.serialization")

# Of a repository in a cache of huggingface_hub: names below snapshots/ are links to files below blobs/.
_HUB_FOLDERS = ("models--", "datasets--", "spaces--")

_DESCRIPTORS = "/proc/self/fd"

# What systems say that give no name to a complete file: no hard links, no renames, a mount point in its place.
_NO_NAMES = frozenset(
    {errno.EBUSY, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.EINVAL, errno.EXDEV, errno.EMLINK}
)

_COPIED_AT_ONCE = 16 << 20


class _StreamErrors:
    """As :func:`stream_errors`, which is entered after a failure alone."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: Optional[BaseException], trace: object) -> None:
        if isinstance(error, OSError):
            with stream_errors():
                raise error


_STREAM_ERRORS = _StreamErrors()


class FileAccess(NamedTuple):
    """Mode, owner and group of a local file."""

    mode: int
    owner: int = -1  # as for the group: -1 is that of any new file
    group: int = -1


def place_of_new_file(file_obj: Any) -> Optional[tuple[str, Optional[FileAccess]]]:
    """Where a new local file goes: the path with links resolved, and what it takes over from the file that it replaces.

    ``None`` for targets that are no local path, or one that a new file cannot take.

    Raises:
        OSError: The target cannot be written.
    """
    path = local_path(file_obj) if isinstance(file_obj, (str, bytes, os.PathLike)) else None
    return None if path is None else place_of(path)


def say_without_mode(target: str) -> None:
    logger.debug("%s: the mode of the file that it replaces could not be set on the new one", target)


class _FolderTraits(NamedTuple):
    """What a folder allows: a new file that takes a name when it is complete; bytes in any order."""

    renames: bool
    any_order: bool


def traits_of(folder: str) -> _FolderTraits:
    return _FolderTraits(*_C.folder_traits(os.fsencode(folder or ".")))


def place_of(path: str) -> Optional[tuple[str, Optional[FileAccess]]]:
    with _STREAM_ERRORS:
        if not path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        target = without_links(path)
        folder = os.path.dirname(target)
        try:
            existing: Optional[os.stat_result] = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):  # for the latter makedirs says which name is in the way
            existing = None
            os.makedirs(folder, exist_ok=True)
        if path.endswith(os.sep) or (existing is not None and stat.S_ISDIR(existing.st_mode)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if existing is None:
            return (target, None) if traits_of(folder).renames else None
        if not stat.S_ISREG(existing.st_mode):
            return None
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if not _can_be_replaced(path, target, existing):
            return None
        return target, FileAccess(stat.S_IMODE(existing.st_mode), existing.st_uid, existing.st_gid)


def without_links(path: str) -> str:
    """The path of the file itself; of a link to a blob of a hub cache, which other names share, that of the link."""
    target = os.path.realpath(path)
    folder, kind = os.path.split(os.path.dirname(target))
    if os.path.islink(path) and kind == "blobs" and os.path.basename(folder).startswith(_HUB_FOLDERS):
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return target


def _can_be_replaced(path: str, target: str, existing: os.stat_result) -> bool:
    """Whether another file can take the name: not for files without one (``/proc/self/fd/N``), in a locked folder or
    on a mount without renames, nor for mount points and other users' files in folders like ``/tmp``."""
    if target != os.path.abspath(path) and not _is_name_of(target, path):
        return False
    folder = os.path.dirname(target)
    if not os.access(folder, os.W_OK | os.X_OK) or _C.is_mount_point(os.fsencode(target)):
        return False
    if not traits_of(folder).renames:
        return False
    found = os.stat(folder)
    return not found.st_mode & stat.S_ISVTX or os.geteuid() in (0, existing.st_uid, found.st_uid)


def _is_name_of(target: str, path: str) -> bool:
    """Whether `target`, to which `path` resolves, names the same file. Links in /proc may resolve to a former name."""
    found = None
    while True:
        before, found = found, (_identity(path), _identity(target))
        if found[0] == found[1]:
            return True
        if found == before:  # otherwise another save has replaced the file between the two
            return False


def _identity(path: str) -> Optional[tuple[int, int]]:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class NewFile(contextlib.AbstractContextManager["NewFile"]):
    """A new local file, complete first and published later: where it is read back before, or appears with others.

    It has no name until it is published where the file system can do that, so that nothing is left whatever happens;
    elsewhere, and where it `is_one_of_many`, a hidden one that the end of the block removes. Where a complete file can
    get no name, it is written in place when it is published.

    Args:
        path: The name that :meth:`publish` gives it.
        access: ``None`` for that of any new file.
        is_one_of_many: Keeps no descriptor open once the file is complete.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: str, access: Optional[FileAccess] = None, is_one_of_many: bool = False) -> None:
        self._path, self._folder = path, os.path.dirname(path) or "."
        self._access = access
        self._hidden: Optional[str] = None
        self._is_one_of_many = is_one_of_many
        self._descriptor = -1
        self._syncs = True
        flags = os.O_RDWR | os.O_CLOEXEC
        bits = self._bits()
        with _STREAM_ERRORS:
            self._is_in_place = not traits_of(self._folder).renames
            if self._is_in_place:
                self._is_one_of_many = False
                self._descriptor = os.memfd_create("tensorizer")  # not every such mount can remove a hidden file
                return
            if hasattr(os, "O_TMPFILE") and os.path.isdir(_DESCRIPTORS) and not is_one_of_many:
                with contextlib.suppress(OSError):  # a file system that has no such files
                    self._descriptor = os.open(self._folder, flags | os.O_TMPFILE, bits)
            if self._descriptor < 0:
                self._hidden = self._unused_name()
                try:
                    self._descriptor = os.open(self._hidden, flags | os.O_CREAT | os.O_EXCL, bits)
                except OSError as error:
                    error.filename = path
                    raise
            if access is not None and not _C.set_access(self._descriptor, access, os.fsencode(path)):
                say_without_mode(path)

    def _bits(self) -> int:
        return 0o666 if self._access is None else self._access.mode & 0o777

    def _unused_name(self) -> str:
        name = f".{os.path.basename(self._path)[:100]}.{os.urandom(8).hex()}.tmp"
        return os.path.join(self._folder, name)

    def open(self, mode: str) -> BinaryIO:
        """The file from its first byte, under the name that it will have; as often as needed, one after the other."""

        def opener(path: str, flags: int) -> int:
            if self._descriptor < 0:
                return os.open(self._hidden or path, flags)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            return os.dup(self._descriptor)

        return open(self._path, mode, opener=opener)  # type: ignore[return-value]

    def write(self, content: bytes, fsync: bool = True) -> None:
        """All of a small file, which is complete then."""
        with self.open("wb") as file:
            file.write(content)
        self.complete(fsync)

    def complete(self, fsync: bool = True) -> None:
        """Says that nothing more will be written; with `fsync` the content is on the disk when this returns."""
        self._syncs = fsync
        with _STREAM_ERRORS:
            if fsync:
                os.fsync(self._descriptor)
            if self._is_one_of_many:
                os.close(self._descriptor)
                self._descriptor = -1

    def publish(self, exclusive: bool = False) -> None:
        """Gives the file its name, on the disk as well if its content is.

        Args:
            exclusive: Leaves a file that has the name as it is, instead of replacing it.

        Raises:
            FileExistsError: There is one, and `exclusive`.
        """
        with _STREAM_ERRORS:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._take_name(folder, exclusive)
                if self._syncs:
                    with contextlib.suppress(OSError):  # not every file system can; the name stands either way
                        os.fsync(folder)
            finally:
                os.close(folder)

    def _take_name(self, folder: int, exclusive: bool) -> None:
        if self._is_in_place:
            self._write_in_place(exclusive)
            return
        try:
            self._take_name_of_new_file(folder, exclusive)
        except OSError as error:
            if error.errno not in _NO_NAMES:
                raise
            self._write_in_place(exclusive)

    def _write_in_place(self, exclusive: bool) -> None:
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC)
        target = os.open(self._path, flags, self._bits())
        try:
            with self.open("rb") as file:
                while os.sendfile(target, file.fileno(), None, _COPIED_AT_ONCE):
                    pass
            if self._syncs:
                os.fsync(target)
        except BaseException:
            os.close(target)
            if exclusive:
                os.unlink(self._path)
            raise
        os.close(target)  # some file systems store only now

    def _take_name_of_new_file(self, folder: int, exclusive: bool) -> None:
        if self._hidden is None:
            name = self._path if exclusive else self._unused_name()
            # Only with the descriptor of a folder does Python make a link to what the link stands for.
            os.link(f"{_DESCRIPTORS}/{self._descriptor}", os.path.basename(name), dst_dir_fd=folder)
            if exclusive:
                return
            self._hidden = name
        if exclusive:
            os.link(self._hidden, self._path)  # the block's end removes the hidden name
            return
        os.replace(self._hidden, self._path)
        self._hidden = None

    def __exit__(self, exc_type: Optional[type[BaseException]], *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        if self._hidden is not None:
            os.unlink(self._hidden)

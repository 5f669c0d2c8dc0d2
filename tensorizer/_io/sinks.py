"""From what callers pass as ``file_obj`` to the extension's sink, and who closes what."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Optional

from tensorizer import _C
from tensorizer._io.sources import Lent, check_binary, check_stream_options, describe, is_path, nothing, real_file
from tensorizer._io.upload_on_close import UploadOnClose
from tensorizer._io.uri import local_path
from tensorizer.errors import stream_errors

logger = logging.getLogger("tensorizer.serialization")

_MODE_WANTED = "wb+"

# Of a repository in a cache of huggingface_hub: names below snapshots/ are links to files below blobs/.
_HUB_FOLDERS = ("models--", "datasets--", "spaces--")


class OpenedSink(NamedTuple):
    """A sink ready to be written."""

    sink: _C.RangeSink
    start: int  # position of the container in it
    stream: Any = None  # the caller's object; None for paths
    close: Callable[[], None] = nothing  # sinks finish by themselves
    discard: Callable[[], None] = nothing  # in place of close() after a failure
    appears_on_close: bool = False  # no complete call shows before close()
    is_lent: bool = False  # the stream ends the sink, if nobody else does
    forget: Optional[Callable[[], None]] = None  # in place of close() where nobody closes
    note_whole: Optional[Callable[[bool], None]] = None  # told when a call begins to write, and when it has written all


def open_sink(file_obj: Any, fsync: bool, stream_options: Optional[Mapping[str, Any]] = None) -> OpenedSink:
    """Opens what ``TensorSerializer`` was given. Nothing is written, and no existing file is touched.

    Raises:
        OSError: The target cannot be written.
        ValueError: A text file, one that is not readable and writable or not seekable, append mode, a read-only scheme.
        TypeError: Not something that can be written, or unknown `stream_options`.
    """
    check_stream_options(stream_options)
    if isinstance(file_obj, Lent):
        opened = _open_object(file_obj.file)
        # An upload that failed is given up; any other object is the caller's affair.
        is_upload = isinstance(file_obj.file, UploadOnClose)
        return opened._replace(close=nothing, discard=opened.discard if is_upload else nothing)
    if not is_path(file_obj):
        return _open_object(file_obj)
    if isinstance(file_obj, int):
        return _open_descriptor(file_obj)
    path = local_path(file_obj)
    if path is not None:
        return _open_path(path, fsync)
    from tensorizer import stream_io

    stream: Any = stream_io.open_stream(file_obj, "wb+", **(stream_options or {}))
    sink = stream.detach_sink() if isinstance(stream, UploadOnClose) else None
    if sink is not None:
        return OpenedSink(sink, 0, appears_on_close=True)
    opened = _open_object(stream)
    return opened._replace(appears_on_close=True, forget=opened.discard)


class FileAccess(NamedTuple):
    """Who may do what with a local file."""

    mode: int
    owner: int = -1  # as for the group: -1 is that of any new file
    group: int = -1


def place_of_new_file(file_obj: Any) -> Optional[tuple[str, Optional[FileAccess]]]:
    """Where a new local file goes: the path with links resolved, and what it takes over from the file that it replaces.

    ``None`` for targets that are no local path, or one that a new file cannot take.

    Raises:
        OSError: The target cannot be written.
    """
    path = local_path(file_obj) if is_path(file_obj) and not isinstance(file_obj, int) else None
    return None if path is None else _place_of(path)


def _open_path(path: str, fsync: bool) -> OpenedSink:
    place = _place_of(path)
    with stream_errors():
        if place is not None:
            target, access = place
            sink = _C.FileSink.replace(os.fsencode(target), fsync, access)
            if not sink.has_mode:
                _say_without_mode(target)
            return OpenedSink(sink, 0)
        if os.path.isfile(path) or not os.path.exists(path):
            in_order = not _traits_of(os.path.dirname(_without_links(path))).any_order
            return OpenedSink(_C.FileSink.in_place(os.fsencode(path), fsync, in_order), 0)
        return _open_object(open(path, "rb+"))  # devices are written to, not replaced


def _say_without_mode(target: str) -> None:
    logger.debug("%s: the mode of the file that it replaces could not be set on the new one", target)


class _FolderTraits(NamedTuple):
    """What a folder allows: a new file that takes a name when it is complete; bytes in any order."""

    renames: bool
    any_order: bool


def _traits_of(folder: str) -> _FolderTraits:
    return _FolderTraits(*_C.folder_traits(os.fsencode(folder or ".")))


@stream_errors()
def _place_of(path: str) -> Optional[tuple[str, Optional[FileAccess]]]:
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    target = _without_links(path)
    folder = os.path.dirname(target)
    try:
        existing: Optional[os.stat_result] = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):  # for the latter makedirs says which name is in the way
        existing = None
        os.makedirs(folder, exist_ok=True)
    if path.endswith(os.sep) or (existing is not None and stat.S_ISDIR(existing.st_mode)):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if existing is None:
        return (target, None) if _traits_of(folder).renames else None
    if not stat.S_ISREG(existing.st_mode):
        return None
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if not _can_be_replaced(path, target, existing):
        return None
    return target, FileAccess(stat.S_IMODE(existing.st_mode), existing.st_uid, existing.st_gid)


def _without_links(path: str) -> str:
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
    if not _traits_of(folder).renames:
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


def _open_descriptor(descriptor: int) -> OpenedSink:
    _refuse_append(descriptor)
    start = os.lseek(descriptor, 0, os.SEEK_CUR)
    return OpenedSink(_C.FileSink.overwrite(descriptor, f"<descriptor {descriptor}>"), start)


def _open_object(file_obj: Any) -> OpenedSink:
    _check_object(file_obj)
    close = discard = file_obj.close
    forget: Optional[Callable[[], None]] = None
    if isinstance(file_obj, UploadOnClose):
        discard, forget = file_obj.discard, nothing  # a stream that is forgotten says so
        sink = file_obj.take_over()
        if sink is not None:
            return OpenedSink(sink, 0, file_obj, close, discard, is_lent=True)
    descriptor = real_file(file_obj)
    if descriptor is None:
        return OpenedSink(_C.PyFileSink(file_obj, describe(file_obj)), file_obj.tell(), file_obj, close, discard)
    _refuse_append(descriptor)
    file_obj.flush()
    start = file_obj.tell()
    overwritten = _C.FileSink.overwrite(descriptor, describe(file_obj))
    note_whole = file_obj.note_whole if isinstance(file_obj, UploadOnClose) else None
    return OpenedSink(overwritten, start, file_obj, close, discard, forget=forget, note_whole=note_whole)


def _refuse_append(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        raise ValueError(
            f"expected a file opened with mode {_MODE_WANTED}, got append mode, whose writes all land at the end"
        )


def _check_object(file_obj: Any) -> None:
    mode = getattr(file_obj, "mode", "unknown")
    if not hasattr(file_obj, "write"):
        raise TypeError(f"expected a path or an open binary file, got {type(file_obj).__name__}")
    check_binary(file_obj, _MODE_WANTED)
    if isinstance(mode, str) and "a" in mode and not mode.startswith("unknown"):
        raise ValueError(f"expected a file opened with mode {_MODE_WANTED}, got append mode {mode!r}")
    for ability in ("readable", "writable"):
        check = getattr(file_obj, ability, None)
        if check is not None and not check():
            raise ValueError(
                f"expected a file opened with mode {_MODE_WANTED}, got mode {mode!r}, which is not {ability}"
            )
    seekable = getattr(file_obj, "seekable", None)
    if seekable is not None and not seekable():
        raise ValueError(f"expected a seekable file opened with mode {_MODE_WANTED}, got one that cannot seek")


# --- files that appear whole ----------------------------------------------------------------------------------------

_DESCRIPTORS = "/proc/self/fd"

# What systems say that give no name to a complete file: no hard links, no renames, a mount point in its place.
_NO_NAMES = frozenset(
    {errno.EBUSY, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.EINVAL, errno.EXDEV, errno.EMLINK}
)

_COPIED_AT_ONCE = 16 << 20

_Progress = Optional[Callable[[int], object]]


class WholeFile(contextlib.AbstractContextManager["WholeFile"]):
    """A file of plain bytes, written from its beginning to its end, that appears under its name when the block ends.

    A local file is on the disk before it takes its name. After an exception what was there stays.

    Raises:
        OSError: The target cannot be written.
    """

    def __init__(self, target: Any, stream_options: Optional[Mapping[str, Any]] = None) -> None:
        self._opened = open_sink(target, True, stream_options)
        self._sink = self._opened.sink
        self._sink.reserve(0)  # opens what is written in place
        self._end = self._opened.start

    @property
    def nbytes(self) -> int:
        """What was written so far."""
        return self._end - self._opened.start

    def reserve(self, nbytes: int) -> None:
        """Makes room for what follows, where the target can; may raise OSError where it certainly cannot."""
        self._sink.reserve(self._end + nbytes)

    def append(self, content: bytes) -> None:
        self._sink.write_at(self._end, content)
        self._end += len(content)

    def append_memory(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Writes pieces of host memory, each an address and a number of bytes, by several threads."""
        placed = []
        for address, nbytes in pieces:
            if nbytes:
                placed.append((self._end, address, nbytes))
            self._end += nbytes
        self._sink.write_pieces(placed)

    def copy_from(self, source: _C.RangeSource) -> None:
        """The whole of a source, as the whole of a target that begins at its first byte."""
        self._end = self._sink.copy_from(source)

    def __exit__(self, exc_type: Optional[type[BaseException]], *_: object) -> None:
        if exc_type is not None:
            self._abandon()
            return
        try:
            self._sink.publish(self._end)
            self._sink.finish()
            if isinstance(self._opened.stream, UploadOnClose) and not (self.nbytes or self._opened.is_lent):
                self._opened.stream.write(b"")  # without a write it would upload nothing
        except BaseException:
            self._abandon()
            raise
        self._opened.close()

    def _abandon(self) -> None:
        with contextlib.suppress(Exception):  # the exception that is on its way tells more
            self._sink.abandon()
        with contextlib.suppress(Exception):
            self._opened.discard()


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
        with stream_errors():
            self._is_in_place = not _traits_of(self._folder).renames
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
                _say_without_mode(path)

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
        with stream_errors():
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
        with stream_errors():
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

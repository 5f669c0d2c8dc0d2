"""The folder or ``s3://`` prefix of one checkpoint: its names, and reading and writing of small files in it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar, Union

from tensorizer._io.call_options import PLAIN, CallOptions, SharedObjects
from tensorizer._io.model_files import exists
from tensorizer._io.new_files import NewFile
from tensorizer._io.sinks import WholeFile
from tensorizer._io.sources import OpenedSource, open_source, read_checked
from tensorizer._io.uri import folder_uri, local_path, scheme_of
from tensorizer.errors import StreamExistsError, is_absent, stream_errors

if TYPE_CHECKING:
    from tensorizer._io.s3.objects import S3Prefix

#: The file that makes a checkpoint complete. Tools look for this name to find checkpoints.
MARKER = ".metadata"

PathLike = Union[str, "os.PathLike[str]"]
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

# How many files of a store are requested at the same time.
_ASKED_AT_ONCE = 16

_DATA_FILE = re.compile(r"r\d{5,9}-[0-9a-f]{16}\.tensors\Z")
_RANK_MARKER = re.compile(r"__\d{1,9}\.metadata\Z")
# Temporary names, as the sinks of the extension and Folder.write() make them.
_UNNAMED = re.compile(r"\.(r\d{5,9}-[0-9a-f]{16}\.tensors|(__\d{1,9})?\.metadata)\.[0-9a-f]{16}\.tmp\Z")


def data_file_name(rank: int) -> str:
    """A new name for the tensors of one rank. It was never used before, so the old checkpoint stays whole.

    The random part comes from the system, because programs often seed the generators of all ranks alike.
    """
    return f"r{rank:05d}-{os.urandom(8).hex()}.tensors"


def is_data_file(name: str) -> bool:
    """Whether :func:`data_file_name` makes such names."""
    return _DATA_FILE.match(name) is not None


def marker_name(rank: Optional[int]) -> str:
    """The name of the marker of all ranks, or of the marker of one rank that saved without collectives."""
    return MARKER if rank is None else f"__{rank}{MARKER}"


class Folder(NamedTuple):
    """The place of a checkpoint: a local folder, or an ``s3://`` prefix."""

    where: str
    remote: bool
    options: CallOptions = PLAIN

    def __repr__(self) -> str:
        """Leaves out the options, which may hold keys."""
        return f"Folder({self.where!r})"

    @classmethod
    def at(cls, path: PathLike, options: CallOptions = PLAIN) -> Folder:
        """The folder at a path or URI.

        Raises:
            ValueError: Checkpoints do not support the scheme, or an ``s3://`` URI has no bucket.
            TypeError: The argument is not a path.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"checkpoint: expected a path or an s3:// URI, got {type(path).__name__}")
        local = local_path(path)
        if local is not None:
            return cls(os.path.abspath(local), False, options)
        if scheme_of(path) != "s3":
            raise ValueError(f"checkpoint: expected a local path or an s3:// URI, got one with {scheme_of(path)}://")
        from tensorizer._io.s3.access import parse_s3_uri

        where = folder_uri(str(path))
        parse_s3_uri(f"{where}/{MARKER}")
        return cls(where, True, options)

    def join(self, name: str) -> str:
        return f"{self.where}/{name}" if self.remote else os.path.join(self.where, name)

    def open(self, name: str) -> OpenedSource:
        """Opens a file for reading.

        Raises:
            StreamNotFoundError: The file does not exist.
            OSError: It cannot be opened.
        """
        return open_source(self.join(name), self.options)

    def is_absent(self, error: OSError) -> bool:
        """Whether an error of opening a file means that the file does not exist."""
        return is_absent(error) if self.remote else isinstance(error, (FileNotFoundError, NotADirectoryError))

    def nbytes(self, name: str) -> int:
        """The size of a file. Raises the errors of :meth:`open`."""
        with contextlib.closing(self.open(name)) as opened:
            return opened.source.size() or 0

    def read(self, name: str, check: Callable[[bytes], Answer]) -> Answer:
        """Reads a small file and returns the result of `check` for it. Raises as :meth:`open` and `check` do."""
        return read_checked(self.join(name), self.options, check)

    def each(self, ask: Callable[[Asked], Answer], items: Sequence[Asked]) -> Iterator[Answer]:
        """Calls a function for each of several files; yields the results, or raises the first error, in their order.

        In a store, where each call takes a round trip, several calls run at a time. If the caller stops early, no
        further calls begin.
        """
        if not self.remote or len(items) < 2:
            yield from map(ask, items)
            return
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(items)), "tensorizer-ask") as threads:
            for begin in range(0, len(items), _ASKED_AT_ONCE):
                yield from threads.map(ask, items[begin : begin + _ASKED_AT_ONCE])

    def exists(self, name: str) -> bool:
        """Whether the file exists, as far as the credentials allow to see it."""
        return exists(self.join(name), self.options)

    def write(self, name: str, content: bytes, *, fsync: bool, replace: bool) -> None:
        """Writes a small file, which appears complete or not at all. With `fsync`, it and its name survive a crash.

        Raises:
            StreamExistsError: The file exists and must not be replaced.
            OSError: It cannot be written.
        """
        if not self.remote:
            os.makedirs(self.where, exist_ok=True)
            with NewFile(self.join(name)) as file:
                file.write(content, fsync)
                try:
                    file.publish(exclusive=not replace)
                except FileExistsError:
                    raise self._exists(name) from None
            return
        options = self.options
        if not replace:
            extra = dict(options.stream.s3_extra_args or {})
            extra["put"] = {**extra.get("put", {}), "IfNoneMatch": "*"}
            options = options._replace(stream=dataclasses.replace(options.stream, s3_extra_args=extra))
        try:
            with WholeFile(self.join(name), options) as remote:
                remote.append(content)
        except OSError as error:
            if not replace and getattr(error, "status", None) in (409, 412):
                raise self._exists(name) from error
            raise

    def _exists(self, name: str) -> StreamExistsError:
        return StreamExistsError(errno.EEXIST, "a checkpoint is there already, and overwrite=False", self.join(name))

    def _store(self) -> S3Prefix:
        from tensorizer._io.s3.objects import S3Prefix

        return S3Prefix(self.where, self.options)

    def sync(self) -> None:
        """Syncs the names of a local folder, so that they survive a crash of the machine."""
        descriptor = os.open(self.where, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some file systems do not support it
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        """The names of the files in the folder; empty if it does not exist."""
        if self.remote:
            return self._store().names()
        try:
            with stream_errors():
                return os.listdir(self.where)
        except FileNotFoundError:
            return []

    def delete(self, names: list[str]) -> None:
        """Deletes files. It is not an error if a file no longer exists."""
        if self.remote:
            if names:
                self._store().delete(names)
            return
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.join(name))

    def remove_stale(self, names: list[str], files: Collection[str]) -> None:
        """Deletes those of `names` that belong to earlier checkpoints. The marker of all ranks and the `files` that it
        names stay."""
        self.delete([name for name in names if _is_stale(name, files)])


def _is_stale(name: str, files: Collection[str]) -> bool:
    signed = name.removesuffix(".sig")  # the signature of a file is deleted with it
    return (
        (is_data_file(signed) and signed not in files)
        or _RANK_MARKER.match(name) is not None
        or _UNNAMED.match(name) is not None  # from a process that was killed while it wrote
    )


class Located:
    """The common part of writer and reader: the place of the checkpoint, which torch may set later, or change."""

    def __init__(self, path: Optional[PathLike], options: CallOptions) -> None:
        self._path: Optional[PathLike] = None
        self._options = options
        self._move_to(path)

    @classmethod
    def _check(cls, path: PathLike) -> None:
        """Raises the errors of :meth:`Folder.at` for a path that cannot be used."""
        Folder.at(path)

    def _begin(self, path: Optional[PathLike]) -> None:
        """Begins a save or load, at `path` if it is given. All its files share one client. Raises as :meth:`_check`."""
        self._options = self._options._replace(shared=SharedObjects())
        self._move_to(path)

    def _move_to(self, path: Optional[PathLike]) -> None:
        """Changes the place to `path`; ``None`` keeps it. Raises the errors of :meth:`_check`."""
        if path is not None:
            self._check(path)
            self._path = path

    def _place(self) -> PathLike:
        """The path. Raises ``ValueError`` if none was passed."""
        if self._path is None:
            raise ValueError("checkpoint: expected a path, or checkpoint_id= of the call; got neither")
        return self._path

    def _folder(self) -> Folder:
        """The folder. Raises the error of :meth:`_place`."""
        return Folder.at(self._place(), self._options)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Whether a checkpoint could be there, as far as the name tells."""
        try:
            cls._check(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    def _storage_meta(self, **number: str) -> Any:
        """Path and number of a save or load, for planners (torch 2.4 and later)."""
        from torch.distributed.checkpoint import metadata

        kind = getattr(metadata, "StorageMeta", None)
        return None if kind is None else kind(checkpoint_id=self._path, **number)

    @property
    def checkpoint_id(self) -> Optional[PathLike]:
        """Where the checkpoint is, as it was given."""
        return self._path

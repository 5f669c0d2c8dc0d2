"""The folder or ``s3://`` prefix that one checkpoint lies in: its names, and small files in it."""

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

#: What makes a checkpoint complete. Tools that look for checkpoints test for this name.
MARKER = ".metadata"

PathLike = Union[str, "os.PathLike[str]"]
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

# Files of a store that are asked for at the same time.
_ASKED_AT_ONCE = 16

_DATA_FILE = re.compile(r"r\d{5,9}-[0-9a-f]{16}\.tensors\Z")
_RANK_MARKER = re.compile(r"__\d{1,9}\.metadata\Z")
# As the sinks of the extension and Folder.write() call files that have no name yet.
_UNNAMED = re.compile(r"\.(r\d{5,9}-[0-9a-f]{16}\.tensors|(__\d{1,9})?\.metadata)\.[0-9a-f]{16}\.tmp\Z")


def data_file_name(rank: int) -> str:
    """A new name for the tensors of one rank. Never used before: the old checkpoint stays whole beside the new one.

    The bytes come from the system, not from a seeded generator: ranks are often seeded alike.
    """
    return f"r{rank:05d}-{os.urandom(8).hex()}.tensors"


def is_data_file(name: str) -> bool:
    """Whether a name is one of those that :func:`data_file_name` gives."""
    return _DATA_FILE.match(name) is not None


def marker_name(rank: Optional[int]) -> str:
    """The marker of all ranks, or of one that was saved without collectives."""
    return MARKER if rank is None else f"__{rank}{MARKER}"


class Folder(NamedTuple):
    """Where a checkpoint is: a local folder, or an ``s3://`` prefix."""

    where: str
    remote: bool
    options: CallOptions = PLAIN

    def __repr__(self) -> str:
        """Without the options, which may hold keys."""
        return f"Folder({self.where!r})"

    @classmethod
    def at(cls, path: PathLike, options: CallOptions = PLAIN) -> Folder:
        """Of a path or URI.

        Raises:
            ValueError: A scheme that checkpoints cannot be written to or listed at; an ``s3://`` URI without a bucket.
            TypeError: Not a path.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"checkpoint: expected a path or an s3:// URI, got {type(path).__name__}")
        local = local_path(path)
        if local is not None:
            return cls(os.path.abspath(local), False, options)
        if scheme_of(path) != "s3":
            raise ValueError(f"checkpoint: expected a local path or an s3:// URI, got one with {scheme_of(path)}://")
        from tensorizer._io.s3.s3_options import parse_s3_uri

        where = folder_uri(str(path))
        parse_s3_uri(f"{where}/{MARKER}")
        return cls(where, True, options)

    def join(self, name: str) -> str:
        return f"{self.where}/{name}" if self.remote else os.path.join(self.where, name)

    def open(self, name: str) -> OpenedSource:
        """Opens a file for reading.

        Raises:
            StreamNotFoundError: There is none.
            OSError: It cannot be opened.
        """
        return open_source(self.join(name), self.options)

    def is_absent(self, error: OSError) -> bool:
        """Whether an error of opening a file counts as "there is none"."""
        return is_absent(error) if self.remote else isinstance(error, (FileNotFoundError, NotADirectoryError))

    def nbytes(self, name: str) -> int:
        """The size of a file. Raises as :meth:`open`."""
        with contextlib.closing(self.open(name)) as opened:
            return opened.source.size() or 0

    def read(self, name: str, check: Callable[[bytes], Answer]) -> Answer:
        """What `check` makes of the content of a small file. Raises as :meth:`open`, and what `check` raises."""
        return read_checked(self.join(name), self.options, check)

    def each(self, ask: Callable[[Asked], Answer], items: Sequence[Asked]) -> Iterator[Answer]:
        """The answers to one question about each of several files, in their order; the first error in that order.

        A store, where each answer takes a round trip, is asked about several at a time, and about no more of them once
        the caller wants no more answers.
        """
        if not self.remote or len(items) < 2:
            yield from map(ask, items)
            return
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(items)), "tensorizer-ask") as threads:
            for begin in range(0, len(items), _ASKED_AT_ONCE):
                yield from threads.map(ask, items[begin : begin + _ASKED_AT_ONCE])

    def exists(self, name: str) -> bool:
        """Whether there is such a file, as far as the credentials may see."""
        return exists(self.join(name), self.options)

    def write(self, name: str, content: bytes, *, fsync: bool, replace: bool) -> None:
        """Writes a small file, which appears complete or not at all. With `fsync` it and its name outlast a crash.

        Raises:
            StreamExistsError: There is one, and it is not to be replaced.
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
        """Makes the names of a local folder outlast a crash of the machine."""
        descriptor = os.open(self.where, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some file systems cannot; their names stand either way
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        """The files of the folder; none where it does not exist."""
        if self.remote:
            return self._store().names()
        try:
            with stream_errors():
                return os.listdir(self.where)
        except FileNotFoundError:
            return []

    def delete(self, names: list[str]) -> None:
        """Deletes files; those that are gone already are no error."""
        if self.remote:
            if names:
                self._store().delete(names)
            return
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.join(name))

    def remove_stale(self, names: list[str], files: Collection[str]) -> None:
        """Deletes those of `names` that are files and markers of earlier checkpoints, beside the marker of all ranks,
        which names `files`."""
        self.delete([name for name in names if _is_stale(name, files)])


def _is_stale(name: str, files: Collection[str]) -> bool:
    signed = name.removesuffix(".sig")  # a signature goes with its file
    return (
        (is_data_file(signed) and signed not in files)
        or _RANK_MARKER.match(name) is not None
        or _UNNAMED.match(name) is not None  # left by a process that was killed while it wrote
    )


class Located:
    """What a writer and a reader have in common: where their checkpoint is, which may be said later, or again."""

    def __init__(self, path: Optional[PathLike], options: CallOptions) -> None:
        self._path: Optional[PathLike] = None
        self._options = options
        self._move_to(path)

    @classmethod
    def _check(cls, path: PathLike) -> None:
        """Raises as :meth:`Folder.at` for what cannot be such a place."""
        Folder.at(path)

    def _begin(self, path: Optional[PathLike]) -> None:
        """Begins a save or load, at `path` if there is one; its files have one client. Raises as :meth:`_check`."""
        self._options = self._options._replace(shared=SharedObjects())
        self._move_to(path)

    def _move_to(self, path: Optional[PathLike]) -> None:
        """Goes on at `path`; ``None`` stays where it is. Raises as :meth:`_check`."""
        if path is not None:
            self._check(path)
            self._path = path

    def _place(self) -> PathLike:
        """The path; raises ``ValueError`` if it was not passed."""
        if self._path is None:
            raise ValueError("checkpoint: expected a path, or checkpoint_id= of the call; got neither")
        return self._path

    def _folder(self) -> Folder:
        """The folder; raises as :meth:`_place`."""
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
        """Path and number of a save or load, as planners are told (torch 2.4 and later)."""
        from torch.distributed.checkpoint import metadata

        kind = getattr(metadata, "StorageMeta", None)
        return None if kind is None else kind(checkpoint_id=self._path, **number)

    @property
    def checkpoint_id(self) -> Optional[PathLike]:
        """Where the checkpoint is, as it was given."""
        return self._path

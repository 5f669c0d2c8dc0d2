"""A file of tensors that is open for work on the whole of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch

from tensorizer import _C
from tensorizer._crypto.keys import check_decryption, key_ring
from tensorizer._format import dtypes
from tensorizer._format.names import Name
from tensorizer._io.sources import OpenedSource, open_source
from tensorizer._load.reader import TensorReader
from tensorizer.errors import CryptographyError, FormatError

__all__ = ["OpenedFile", "dtype_text", "name_text"]

#: Memory for payloads that are on their way, unless one tensor alone is larger.
BATCH_NBYTES = 64 << 20


class OpenedFile(AbstractContextManager["OpenedFile"]):
    """One container: its source, its index, and a reader of its tensors.

    Args:
        source: A path, URI, descriptor or open binary file object.
        encryption: The key of an encrypted file; without it the index can be read all the same.
        num_readers: Upper bound for reading threads.
        stream_options: Keywords for opening a URI.

    Raises:
        CryptographyError: A key for a file that is not encrypted.
        FormatError: Not a file of tensors.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        source: Any,
        *,
        encryption: Any = None,
        num_readers: Optional[int] = None,
        stream_options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        check_decryption(encryption)
        self._opened: OpenedSource = open_source(source, stream_options)
        try:
            self.source: _C.RangeSource = self._opened.source
            self.index: _C.Index = _open_index(self.source, self._opened.start, encryption is not None)
            self.names: list[Name] = self.index.names()[: self.index.entry_count]
            self.ties: list[tuple[Name, Name, bool]] = self.index.ties()
            self._encryption = encryption
            self._num_readers = num_readers or 0
            self._reader: Optional[TensorReader] = None
        except BaseException:
            self._opened.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the source."""
        self._opened.close()

    @property
    def label(self) -> str:
        """The file's name for messages, without credentials."""
        return self.source.name

    @property
    def readable(self) -> bool:
        """Whether payloads can be read: there is a key, or none is needed."""
        return self._encryption is not None or not self.index.encrypted

    @property
    def reader(self) -> TensorReader:
        """Reads tensors to host memory.

        Raises:
            CryptographyError: The file is encrypted and there is no key.
        """
        if self._reader is None:
            if not self.readable:
                raise CryptographyError(f"{self.label} is encrypted: a key is needed")
            self._reader = TensorReader(
                self.source,
                self.index,
                device=torch.device("cpu"),
                dtype=None,
                max_workers=self._num_readers,
                keys=key_ring(self._encryption) if self.index.encrypted else None,
                mapping=None,
                allow_missing_hashes=True,
            )
        return self._reader

    def batches(self, entries: Sequence[int]) -> Iterator[Sequence[int]]:
        """Runs of `entries` whose payloads fit :data:`BATCH_NBYTES`, or single larger ones."""
        return self.reader.batches(entries, BATCH_NBYTES)

    def read(self, entries: Sequence[int], verify: bool) -> list[torch.Tensor]:
        """Plain tensors of the stored dtype in host memory."""
        return list(self.reader.read_raw(entries, verify).tensors)

    def headers(self, entries: Sequence[int]) -> _C.LoadedHeaders:
        """What the record headers of `entries` say, without their payloads."""
        return self.reader.read_headers(entries).headers

    def metadata(self) -> dict[str, str]:
        """What the writer noted; nothing where it is encrypted and there is no key."""
        sealed = self.index.metadata_is_sealed
        if sealed and self._encryption is None:
            return {}
        return self.index.metadata(self.reader.keys if sealed else None) or {}

    def shape(self, entry: int) -> tuple[int, ...]:
        return self.index.shape(entry)

    def stored_dtype(self, entry: int) -> str:
        return self.index.dtype(entry).decode("utf-8", "replace")


def _open_index(source: _C.RangeSource, start: int, key_given: bool) -> _C.Index:
    try:
        return _C.open_index(source, start, key_given)
    except CryptographyError:
        if key_given:
            raise
        return _C.open_index(source, start, True)  # encrypted: the index is in clear


def dtype_text(stored: str) -> str:
    """A stored dtype as torch calls it, without ``torch.``; as it is stored where this torch lacks it."""
    try:
        return str(dtypes.torch_dtype(stored)).replace("torch.", "", 1)
    except FormatError:
        return stored.partition(dtypes.OPAQUE_SEPARATOR)[2].replace("torch.", "", 1) or stored


def name_text(name: Name) -> str:
    """A name for people: the steps of a path joined by slashes."""
    return name if isinstance(name, str) else "/".join(map(str, name))

"""A file of tensors, or the shards of one model, open for work on the whole of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch

from tensorizer import _C
from tensorizer._format import dtypes
from tensorizer._format.dtypes import dtype_text, known_dtype
from tensorizer._format.names import Name, name_text
from tensorizer._io.access import NOBODY, Access, Trust
from tensorizer._load.open_file import BATCH_NBYTES, open_whole
from tensorizer.errors import FormatError

__all__ = ["BATCH_NBYTES", "OpenedFile", "dtype_text", "name_text"]


class OpenedFile(AbstractContextManager["OpenedFile"]):
    """One container, of which nothing is kept but the record headers of what was read.

    Tensors are numbered as in the container ("entries"); those of :attr:`entries` have data in the file, the others are
    names that stand for one of them.

    Args:
        source: A path, URI, descriptor, open binary file object, a folder of shards or their index.
        encryption: The key of an encrypted file; without it the index can be read all the same.
        num_readers: Upper bound for reading threads.
        stream_options: Keywords for opening a URI.
        trust: Who may vouch for the file, and whether somebody has to.

    Raises:
        CryptographyError: A key for a file that is not encrypted.
        AuthenticationError: It is not what its key or a signature vouches for.
        FormatError: Not a file of tensors, or shards that are not those of their index.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        source: Any,
        *,
        encryption: Any = None,
        num_readers: Optional[int] = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        trust: Trust = NOBODY,
    ) -> None:
        access = Access.to_read(encryption, stream_options, num_readers, trust=trust)
        container = self.container = open_whole(source, access)
        self.files, self.index, self.entries = container.files, container.index, container.stored
        self.readable = container.readable

    def __exit__(self, *exc: object) -> None:
        self.container.close()

    @property
    def label(self) -> str:
        """The file's name for messages, without credentials."""
        return self.container.source_name

    @property
    def ties(self) -> list[tuple[Name, Name, bool]]:
        """Names that stand for another tensor, that tensor, and whether its data are there under both names."""
        container = self.container
        return [
            (container.names[alias], container.names[kept], container.is_stored(alias))
            for alias, kept in container.targets.items()
        ]

    @property
    def source(self) -> Optional[_C.RangeSource]:
        """The bytes of a single file; ``None`` for shards."""
        return self.container.source

    def name(self, entry: int) -> Name:
        return self.container.names[entry]

    def batches(self, entries: Sequence[int]) -> Iterator[Sequence[int]]:
        """Runs of `entries` whose payloads fit :data:`BATCH_NBYTES`, or single larger ones."""
        return self.container.runs(entries)

    def read(self, entries: Sequence[int], verify: bool) -> list[torch.Tensor]:
        """Plain tensors of the stored dtype in host memory.

        Raises:
            CryptographyError: The file is encrypted and there is no key.
        """
        return self.container.read(entries, verify)

    def read_headers(self, entries: Sequence[int]) -> None:
        """Reads the record headers of `entries`, which tell digests and module indexes, where the format has any."""
        self.container.read_headers(entries)

    def metadata(self) -> Optional[dict[str, str]]:
        """What the writer noted; ``None`` where that is nothing, or encrypted and there is no key."""
        return self.container.metadata()

    def stored_dtype(self, entry: int) -> str:
        """The dtype as the file has it, from the same places; by its ``.safetensors`` name if torch lacks it."""
        if self.container.has_header(entry):
            headers, position = self.container.header(entry)
            return headers.dtype(position).decode("utf-8", "replace")
        stored: bytes = self.index.dtype(entry)
        return stored.decode("utf-8", "replace") or str(self.index.container_dtype(entry))

    def described(self, entry: int) -> tuple[torch.dtype, tuple[int, ...], int]:
        """Dtype, shape and module index, from the record header where it was read; the index 0 where it was not.

        Raises:
            FormatError: This torch has no such dtype; the message names the tensor.
        """
        shape, module_idx, stored = self.index.shape(entry), 0, self.index.dtype(entry)
        if self.container.has_header(entry):
            headers, position = self.container.header(entry)
            shape, module_idx, stored = headers.shape(position), headers.module_idx(position), headers.dtype(position)
        dtype = known_dtype(stored)
        if dtype is None:
            dtype = self._unknown_dtype(entry)
        return dtype, shape, module_idx

    def _unknown_dtype(self, entry: int) -> torch.dtype:
        """The dtype of a tensor whose name torch does not know at once: as ``.safetensors`` calls it, or an error."""
        try:
            return dtypes.torch_dtype(self.stored_dtype(entry))
        except FormatError as error:
            raise FormatError(f"{self.label}: tensor {name_text(self.name(entry))!r}: {error}") from None

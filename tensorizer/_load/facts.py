"""What an opened file says about itself, and what has been read of it."""

from __future__ import annotations

import types
from typing import Any, Optional

from tensorizer._format.entries import FileFeatureFlags, TensorEntry
from tensorizer._format.names import Name
from tensorizer._load.container import Container
from tensorizer._load.loaded_tensors import LoadedTensors

__all__ = ["FileFacts", "kind_text"]


class FileFacts:
    """The half of ``TensorDeserializer`` that is about the file and not about its tensors' data."""

    _container: Container
    _loaded: LoadedTensors
    _stream: Any
    total_tensor_bytes: int

    @property
    def total_bytes_read(self) -> int:
        """Bytes that came from the source so far."""
        counter = getattr(self._stream, "bytes_read", None)
        if isinstance(counter, int):
            return counter
        nbytes = self._container.bytes_read
        if nbytes is None:
            return self.total_tensor_bytes
        mapped = sum(map(self._container.index.data_nbytes, self._loaded.kept)) if self._container.mapped else 0
        return nbytes + mapped

    @property
    def cached_bytes_read(self) -> int:
        """Those of them that came from the cache of the node (docs/node-cache.md); 0 without one."""
        return self._container.cached_bytes_read

    @property
    def format(self) -> str:
        """What the source holds: ``"tensors"`` or ``"safetensors"``, told by its content."""
        return self._container.format

    @property
    def metadata(self) -> dict[str, str]:
        """The text that the writer kept in the file, by key; a copy.

        Raises:
            CryptographyError: It is encrypted with another key, or was altered.
            RuntimeError: It is encrypted, and the file was closed before it was asked for.
        """
        return self._container.metadata() or {}

    @property
    def ties(self) -> dict[Name, Name]:
        """Names that stand for another tensor of the file, and which one; both give the same parameter."""
        return self._container.ties()

    @property
    def authenticated(self) -> Optional[str]:
        """What was found to vouch for the file: ``"key"``, ``"signature"``, ``"both"``, or ``None`` for nothing."""
        return self._container.authenticated

    @property
    def index_digest(self) -> Optional[str]:
        """The SHA-256 of the index as hexadecimal digits, computed from what was read; ``None`` for ``.safetensors``
        files and for shards. In files that are authenticated it stands for all of their content."""
        return self._container.index_digest

    @property
    def cache_status(self) -> Optional[str]:
        """The ``x-cache-status`` response header of an HTTP source, else ``None``."""
        headers = getattr(self._stream, "response_headers", None)
        return None if headers is None else headers.get("x-cache-status")

    @property
    def _file_header(self) -> types.SimpleNamespace:
        """What integrators' tests look at: ``version_number``."""
        return types.SimpleNamespace(version_number=self._container.index.version)

    @property
    def _file_flags(self) -> FileFeatureFlags:
        return FileFeatureFlags(self._container.index.flags)

    def entries(self) -> list[TensorEntry]:
        """What the file says about every (selected) tensor, in file order, without loading any.

        Digests are in the record headers, so ``hashes`` is ``None`` for tensors that were not read yet.
        """
        return [self._container.entry(i) for i in self._container.selection]

    def _repr_html_(self) -> str:
        """What Jupyter shows: a table of the tensors, from the index alone."""
        from tensorizer._format.table import entries_table

        return entries_table(repr(self)[1:-1], self.entries())


def kind_text(index: Any) -> str:
    """What an opened file is, for messages."""
    return f"data version {index.version}" if index.format == "tensors" else str(index.format)

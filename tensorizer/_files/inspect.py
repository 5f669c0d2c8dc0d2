"""What is in a file, read only from its index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from tensorizer import _C
from tensorizer._files.checkpoints import reader
from tensorizer._format.names import Name, name_text
from tensorizer._io.call_options import CallOptions
from tensorizer._io.model_files import is_checkpoint
from tensorizer._load.open_index import open_index
from tensorizer._system.sizes import counted, size_text


@dataclass(frozen=True)
class TensorInfo:
    """One tensor, as the index describes it."""

    name: Name
    """A text, or the path of a tensor in a nested state dict."""
    kind: str
    """``"parameter"``, ``"buffer"`` or ``"state_dict"``."""
    dtype: str
    """The dtype as torch calls it, without ``torch.``."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes that the tensor occupies once loaded."""
    offset: int
    """Position of the payload, from the first byte of its file; in a checkpoint, of its first part."""
    stored_nbytes: int
    """Bytes of the payload; 0 for tensors that were written without data."""
    file: Optional[str] = None
    """The shard that holds it; ``None`` in a single file. In a checkpoint, the file of its first part."""


@dataclass(frozen=True, repr=False)
class FileInfo:
    """A file of tensors, the shards of a model or a checkpoint, as the index describes it."""

    source: str
    """The file's name, without credentials."""
    format: str
    """``"tensors"``, ``"safetensors"`` or ``"checkpoint"``."""
    version: Optional[int]
    """Data version of a ``.tensors`` file."""
    encrypted: bool
    file_nbytes: Optional[int]
    """Bytes of all shards together; ``None`` if the source does not say."""
    tensors: tuple[TensorInfo, ...]
    """The tensors, in file order."""
    metadata: Mapping[str, str]
    """Of a checkpoint the values that are no tensors, as JSON, as far as they need no key."""
    ties: Mapping[str, str]
    """From the name of an alias to the name of the tensor that it shares."""
    files: tuple[str, ...] = ()
    """Names of the shards, in the order of their index, or of the files of a checkpoint; empty for a single file."""
    metadata_encrypted: bool = False
    """Whether there are metadata that cannot be shown without the key."""
    has_tag: bool = False
    """Whether it claims to be authenticated by its key. Not checked."""
    signers: tuple[str, ...] = ()
    """Public keys of the signatures in it, as hexadecimal digits. Not checked."""
    index_digest: Optional[str] = None
    """SHA-256 of the index, as computed; ``None`` for ``.safetensors`` files and for shards."""

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors once loaded."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def __repr__(self) -> str:
        return f"<FileInfo: {self.source}: {', '.join(self.facts())}>"

    def facts(self) -> list[str]:
        """What it is, and how large, for people."""
        is_checkpoint = self.format == "checkpoint"
        facts = [self.format if is_checkpoint else f".{self.format}"]
        if self.version is not None:
            facts.append(f"data version {self.version}")
        if self.encrypted:
            facts.append("encrypted")
        facts += [counted(len(self.tensors), "tensor"), f"{size_text(self.tensor_nbytes)} of tensors"]
        if self.file_nbytes is not None:
            kind = "file" if is_checkpoint else "shard"
            where = counted(len(self.files), kind) if self.files else "the file"
            facts.append(f"{size_text(self.file_nbytes)} in {where}")
        return facts

    def _repr_html_(self) -> str:
        """What Jupyter shows: totals, and a table of the tensors."""
        from tensorizer._format.table import Row, tensors_table

        rows = [Row(one.name, one.kind, one.dtype, one.shape, one.nbytes) for one in self.tensors]
        return tensors_table(repr(self)[1:-1], rows)


def inspect(source: Any, *, stream_options: Optional[Mapping[str, Any]] = None) -> FileInfo:
    """Describes a file without reading a payload, and without the key of an encrypted one.

    Args:
        source: A path, URI, descriptor, open binary file object, a folder of shards or their index; a checkpoint folder
            of ``TensorizerWriter``, local or on ``s3://``.
        stream_options: Keywords for opening a URI, as for :func:`tensorizer.stream_io.open_stream`.

    Returns:
        What the index says.

    Raises:
        FormatError: Not a file of tensors, or a damaged one.
        OSError: It cannot be opened or read.

    Examples:
        >>> [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensorizer.inspect("model.tensors").tensors]
        [('weight', 'float32', (2, 4)), ('bias', 'float32', (2,))]
    """
    options = CallOptions.to_read(stream_options=stream_options)
    if is_checkpoint(source, options):
        info: FileInfo = reader().inspect(source, options)
        return info
    with open_index(source, options) as file:
        index = file.index
        file.read_dtypes(file.stored)
        tensors = tuple(
            TensorInfo(
                file.names[i],
                file.type(i).kind,
                file.dtype_text(i),
                index.shape(i),
                index.loaded_nbytes(i),
                index.data_offset(i),
                index.data_nbytes(i),
                file.shard_of(i),
            )
            for i in file.stored
        )
        return FileInfo(
            source=file.source_name,
            format=index.format,
            version=index.version if index.format == "tensors" else None,
            encrypted=index.encrypted,
            file_nbytes=file.nbytes,
            tensors=tensors,
            metadata=file.metadata() or {},
            ties={name_text(alias): name_text(kept) for alias, kept in file.ties().items()},
            files=tuple(file.shard_names),
            metadata_encrypted=bool(index.metadata_is_sealed),
            has_tag=not file.shard_names and _C.has_tag(index),
            signers=() if file.shard_names else tuple(key.hex() for key in _C.embedded_signers(index)),
            index_digest=file.index_digest,
        )


def is_encrypted(source: Any, stream_options: Optional[Mapping[str, Any]] = None) -> bool:
    """Whether reading payloads of a file needs a key."""
    from tensorizer._files.contents import pickled_files  # which needs torch

    options = CallOptions.to_read(stream_options=stream_options)
    if is_checkpoint(source, options):
        return bool(reader().is_encrypted(source, options))
    if pickled_files(source):
        return False
    with open_index(source, options) as file:
        return bool(file.index.encrypted)

"""The marker of a checkpoint lists its tensors and the places of their boxes. It is JSON, is written last, and contains
no pickle.

The first line is the head: the kind, size and SHA-256 of the body. The body holds columns, one number per box, so that
a million boxes take a few tens of megabytes; a body of at least 1 MiB is compressed. docs/format.md, section 14,
describes every field.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tensorizer import _C
from tensorizer._encryption import DecryptionParams, EncryptionParams
from tensorizer._format.dtypes import stored_for_tensor
from tensorizer._keys import encryption_key, key_ring
from tensorizer._load.open_file import no_collections
from tensorizer._version import __version__
from tensorizer.distributed._checkpoint.folder import is_data_file
from tensorizer.distributed._checkpoint.json_values import NotSimple, decoded, encoded
from tensorizer.errors import (
    AuthenticationError,
    FormatError,
    HashMismatchError,
    InvalidVersionError,
    named,
)

_FORMAT = "tensorizer.checkpoint"
# Earlier releases know only version 1. A marker has version 2 only if it has tensors that are stored by their parts.
_VERSIONS = (1, 2)
_COMPRESSED_FROM = 1 << 20
_MAX_CONTENT_NBYTES = 1 << 33
# How far a marker may unpack. Columns of equal numbers shrink to a hundredth; no real marker shrinks much further.
_MAX_RATIO = 300
# Limits for the values that planners build: elements of all lists together, and depth of nested containers.
_MAX_LISTED = 10_000_000
_MAX_DEPTH = 200
_MAX_RANKS = 10**9  # the names of files have this many digits
_NOWHERE = -1  # file number of an item without bytes
_DIGESTS = ("crc32", "sha256")

TENSOR, JSON, ARRAYS, TORCH_SAVE = "tensor", "json", "arrays", "torch_save"


class SavedFile(NamedTuple):
    """A file of the checkpoint."""

    name: str
    nbytes: int
    index_digest: Optional[str] = None  # of an authenticated file; taken from a marker only if its tag was checked


class Stored(NamedTuple):
    """The place of the bytes of one item. Ranks send it to the coordinator."""

    kind: str  # TENSOR; for other leaves JSON, ARRAYS or TORCH_SAVE
    file: Optional[SavedFile] = None  # None for a box without elements, and for a value that `text` holds
    record: int = 0  # number of the record in the file
    offset: int = 0  # bytes of its payload
    nbytes: int = 0
    crc32: Optional[int] = None
    sha256: Optional[str] = None
    text: Optional[str] = None
    shape: tuple[int, ...] = ()  # digest of the box, or of the bytes of a leaf, if it was read from a marker
    parts: Optional[StoredParts] = None  # for a box that is made of other tensors, whose place is that of the first one


class StoredPart(NamedTuple):
    """The place of one inner tensor of a box."""

    path: str  # the attributes that lead to it
    dtype: torch.dtype
    stored: Stored


class StoredParts(NamedTuple):
    """A box that is made of other tensors."""

    about: Stored  # its classes and contexts, as JSON
    parts: tuple[StoredPart, ...]


class Marker(NamedTuple):
    """The content of a marker."""

    metadata: Metadata  # for torch's planners; its storage_data are `stored`
    stored: Mapping[MetadataIndex, Stored]
    files: list[SavedFile]
    rank: Optional[int]  # set by a save without collectives
    world_size: int


# ---- writing ---------------------------------------------------------------------------------------------------------


def pack_marker(
    metadata: Metadata,
    stored: Mapping[MetadataIndex, Stored],
    rank: Optional[int],
    world_size: int,
    encryption: Optional[EncryptionParams] = None,
) -> bytes:
    """Encodes a marker. With a key, the marker authenticates the whole checkpoint.

    Raises:
        ValueError: JSON cannot hold the data of the planner.
    """
    files = sorted({s.file for s in stored.values() if s.file is not None})
    numbers = {file: i for i, file in enumerate(files)}
    body = {
        "torch": str(torch.__version__),
        "tensorizer": __version__,
        "rank": rank,
        "world_size": world_size,
        "files": [[file.name, file.nbytes] for file in files],
        "planner": _planner_node(metadata),
        **_tensor_columns(metadata, stored, numbers),
        "leaves": [
            _leaf(fqn, stored.get(MetadataIndex(fqn)), numbers)
            for fqn, item in metadata.state_dict_metadata.items()
            if not isinstance(item, TensorStorageMetadata)
        ],
    }
    parts = [_parts_row(index, found.parts, numbers) for index, found in stored.items() if found.parts is not None]
    if parts:
        body["parts"] = parts
    if encryption is not None:
        body["index_digests"] = [file.index_digest for file in files]
    content = json.dumps(body, separators=(",", ":")).encode()
    compressed = len(content) >= _COMPRESSED_FROM
    stored_content = zlib.compress(content, 1) if compressed else content
    head = {
        "format": _FORMAT,
        "version": _VERSIONS["parts" in body],
        "body": "zlib" if compressed else "json",
        "nbytes": len(stored_content),
        "content_nbytes": len(content),
        "sha256": hashlib.sha256(stored_content).hexdigest(),
    }
    if encryption is not None:
        key, derivation = encryption_key(encryption)
        assert key is not None
        head["tag"] = _C.marker_tag(key, stored_content).hex()
        if derivation is not None:
            head["derivation"] = _C.derivation_chunk(derivation).hex()
    return json.dumps(head).encode() + b"\n" + stored_content


def _planner_node(metadata: Metadata) -> Any:
    data = metadata.planner_data
    check_planner_data(data, metadata.state_dict_metadata)
    try:
        return encoded(data)
    except (NotSimple, RecursionError):
        raise ValueError(
            f"planner data of type {type(data).__name__} hold more than simple values, which a marker cannot store"
        ) from None


def _tensor_columns(
    metadata: Metadata, stored: Mapping[MetadataIndex, Stored], numbers: Mapping[SavedFile, int]
) -> dict[str, Any]:
    properties: dict[tuple[Any, ...], int] = {}
    tensors: list[list[Any]] = []  # [name, number of its properties, size, number of boxes]
    bounds: list[int] = []  # offsets, then sizes, of each box
    columns: dict[str, Any] = {name: [] for name in ("file", "record", "offset", "nbytes", *_DIGESTS)}
    for fqn, item in metadata.state_dict_metadata.items():
        if not isinstance(item, TensorStorageMetadata):
            continue
        number = properties.setdefault(_properties_key(item.properties), len(properties))
        tensors.append([fqn, number, list(item.size), len(item.chunks)])
        for chunk in item.chunks:
            bounds += [*chunk.offsets, *chunk.sizes]
            found = stored.get(MetadataIndex(fqn, chunk.offsets)) if chunk.sizes.numel() else Stored(TENSOR)
            if found is None:
                raise ValueError(f"tensor {fqn!r}: no rank wrote its box at {list(chunk.offsets)}")
            file = _NOWHERE if found.file is None else numbers[found.file]
            values = (file, found.record, found.offset, found.nbytes, found.crc32, found.sha256)
            for column, value in zip(columns.values(), values):
                column.append(value)
    for digest in _DIGESTS:
        if all(value is None for value in columns[digest]):
            columns[digest] = None
    return {"properties": [list(key) for key in properties], "tensors": tensors, "bounds": bounds, "boxes": columns}


def _leaf(fqn: str, found: Optional[Stored], numbers: Mapping[SavedFile, int]) -> list[Any]:
    if found is None:
        raise ValueError(f"{fqn!r}: no rank wrote it")
    if found.text is not None:
        return [fqn, found.kind, found.text]
    return [fqn, found.kind, None, *_place(found, numbers)]


def _place(found: Stored, numbers: Mapping[SavedFile, int]) -> list[Any]:
    assert found.file is not None
    return [numbers[found.file], found.record, found.offset, found.nbytes, found.crc32, found.sha256]


def _parts_row(index: MetadataIndex, found: StoredParts, numbers: Mapping[SavedFile, int]) -> list[Any]:
    about = found.about
    row = [about.text] if about.text is not None else [None, *_place(about, numbers)]
    parts = [
        [part.path, _last_word(part.dtype), list(part.stored.shape), *_place(part.stored, numbers)]
        for part in found.parts
    ]
    return [index.fqn, list(index.offset or ()), row, parts]


def _properties_key(properties: TensorProperties) -> tuple[Any, ...]:
    return (
        _last_word(properties.dtype),
        _last_word(properties.layout),
        bool(properties.requires_grad),
        _last_word(properties.memory_format),
        bool(properties.pin_memory),
    )


def _last_word(value: Any) -> str:
    return str(value).rpartition(".")[2]


# ---- reading ---------------------------------------------------------------------------------------------------------


def unpack_marker(
    data: bytes, name: str, encryption: Optional[DecryptionParams] = None, require_authenticated: bool = False
) -> Marker:
    """Decodes a marker.

    Args:
        data: The content of the file.
        name: Name of the file, for messages.
        encryption: The key of an encrypted checkpoint, with which the marker's tag is checked.
        require_authenticated: Refuses a marker that the key does not authenticate.

    Raises:
        AuthenticationError: The tag of the marker does not match the key; or the marker has no tag, although one is
            required or the marker itself holds values.
        FormatError: The content is not a marker, or is damaged; :class:`InvalidVersionError` for a later version.
        HashMismatchError: The content differs from what was written.
    """
    if data[:1] != b"{":
        if data[:1] == b"\x80":
            raise written_by_torch(name)
        raise FormatError(f"{name}: expected a marker of TensorizerWriter, got a file of another kind")
    body, tagged = _body(data, name, encryption)
    if require_authenticated and not tagged:
        raise AuthenticationError(
            f"{name}: not authenticated: written by an earlier release, or without encryption; save the checkpoint anew"
        )
    try:
        marker = _marker(body, tagged)
        values = [fqn for fqn, _, text, *_ in body["leaves"] if text is not None]
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{name}: a damaged marker ({type(error).__name__}: {error})") from None
    # Markers of encrypted checkpoints have never held values, even in releases without tags.
    if values and encryption is not None and not tagged:
        raise AuthenticationError(
            f"{name}: value {values[0]!r} is not authenticated: the marker was altered, or saved without encryption"
        )
    return marker


def written_by_torch(name: str) -> FormatError:
    """The error for a checkpoint that torch's own writers wrote."""
    return FormatError(
        f"{name}: expected a checkpoint of TensorizerWriter or a model, got a checkpoint of "
        "torch.distributed.checkpoint itself (.distcp files): load it with FileSystemReader"
    )


def _body(data: bytes, name: str, encryption: Optional[DecryptionParams]) -> tuple[dict[str, Any], bool]:
    """The body, and whether the key authenticates it."""
    first, _, rest = data.partition(b"\n")
    try:
        head = json.loads(first)
        known, version, compression = head["format"] == _FORMAT, head["version"], head["body"]
        nbytes, content_nbytes, digest = int(head["nbytes"]), int(head["content_nbytes"]), head["sha256"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise FormatError(f"{name}: expected a marker of TensorizerWriter, got other JSON") from None
    if not known:
        raise FormatError(f"{name}: expected a marker of TensorizerWriter, got format {head['format']!r:.50}")
    if version not in _VERSIONS:
        known = " or ".join(map(str, _VERSIONS))
        error = InvalidVersionError(f"{name}: expected marker version {known}, got {version!r:.50}")
        error.version = version if isinstance(version, int) else -1
        raise error
    if len(rest) != nbytes or content_nbytes > _MAX_CONTENT_NBYTES:
        raise FormatError(f"{name}: expected {nbytes} bytes behind the first line, got {len(rest)}")
    tagged = encryption is not None and _check_tag(head, rest, name, encryption)
    if hashlib.sha256(rest).hexdigest() != digest:
        raise HashMismatchError(f"{name}: the marker does not match its digest")
    try:
        content = _unpacked(rest, content_nbytes) if compression == "zlib" else rest
        body = json.loads(content)
    except (ValueError, zlib.error, RecursionError) as cause:
        raise FormatError(f"{name}: a damaged marker ({cause})") from None
    if not isinstance(body, dict):
        raise FormatError(f"{name}: a damaged marker (no object)")
    return body, tagged


def _check_tag(head: Mapping[str, Any], body: bytes, name: str, encryption: DecryptionParams) -> bool:
    """Checks the tag of the marker. Returns whether it has one."""
    if "tag" not in head:
        return False
    try:
        tag = bytes.fromhex(head["tag"])
        derivation = bytes.fromhex(head["derivation"]) if "derivation" in head else None
    except (TypeError, ValueError):
        raise FormatError(f"{name}: a damaged marker (its tag is no hexadecimal number)") from None
    if not _C.same_secret(named(name, _C.marker_tag_of, key_ring(encryption), body, derivation), tag):
        raise AuthenticationError(
            f"{name}: the marker does not match its authentication code: wrong key, or it was altered"
        )
    return True


def _unpacked(data: bytes, nbytes: int) -> bytes:
    """Unpacks `data` to the stated number of bytes, which bounds the memory that this takes.

    Raises:
        ValueError: It has another number of bytes, or more than a marker can have.
    """
    if not 0 < nbytes <= _MAX_RATIO * len(data):
        raise ValueError(f"{len(data)} bytes that unpack to {nbytes}, at most {_MAX_RATIO} times as many are possible")
    stream = zlib.decompressobj()
    content = stream.decompress(data, nbytes)
    if len(content) != nbytes or (not stream.eof and stream.decompress(stream.unconsumed_tail, 1)):
        raise ValueError(f"expected {nbytes} bytes unpacked, got others")
    return content


def _marker(body: Mapping[str, Any], tagged: bool) -> Marker:
    digests = body["index_digests"] if tagged else [None] * len(body["files"])
    if len(digests) != len(body["files"]):
        raise ValueError("digests of other files")
    for digest in digests:
        if digest is not None and not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
            raise ValueError(f"expected the digest of an index, got {digest!r:.200}")
    files = [SavedFile(str(name), int(nbytes), digest) for (name, nbytes), digest in zip(body["files"], digests)]
    for file in files:
        if not is_data_file(file.name):
            raise FormatError(f"expected the name of a file of a checkpoint, got {file.name!r:.200}")
    items: dict[str, Any] = {}
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    properties = [_properties(key) for key in body["properties"]]
    bounds = body["bounds"]
    if not _are_numbers(bounds):
        raise ValueError(f"bounds of boxes: expected numbers of 0 and more, got {_wrong(bounds)[1]!r:.50}")
    at, unseen = 0, len(body["boxes"]["file"])
    with no_collections():
        for fqn, number, size, count in body["tensors"]:
            _check_name(fqn)
            unseen -= count
            if type(count) is not int or count < 0 or unseen < 0:  # boxes without dimensions have no bounds
                raise ValueError(f"tensor {fqn!r:.200} of {count!r:.50} boxes: expected as many as have places")
            step = len(size)
            places = range(at, at + 2 * step * count, 2 * step) if step else [at] * count
            at += 2 * step * count
            if at > len(bounds):
                raise ValueError(f"tensor {fqn!r:.200}: expected bounds for each of its {count} boxes, got fewer")
            chunks[fqn] = [
                ChunkStorageMetadata(torch.Size(bounds[i : i + step]), torch.Size(bounds[i + step : i + 2 * step]))
                for i in places
            ]
            if not _are_numbers(size):
                raise ValueError(f"tensor {fqn!r:.200}: expected a shape, got {size!r:.200}")
            items[fqn] = TensorStorageMetadata(properties[number], torch.Size(size), chunks[fqn])
    leaves: dict[MetadataIndex, Stored] = {}
    for fqn, kind, text, *place in body["leaves"]:
        _check_name(fqn)
        if fqn in chunks:
            raise ValueError(f"{fqn!r:.200}: expected a tensor or a value of that name, got both")
        if kind not in (JSON, ARRAYS, TORCH_SAVE) or (text is not None and kind != JSON):
            raise ValueError(f"{fqn!r:.200}: expected {JSON}, or {ARRAYS} or {TORCH_SAVE} in a file, got {kind!r:.50}")
        items[fqn] = BytesStorageMetadata()
        leaves[MetadataIndex(fqn)] = Stored(kind, text=text) if text is not None else _stored(kind, files, place)
    parts = dict(_parts_of_row(row, files, chunks) for row in body.get("parts", ()))
    stored = _StoredItems(files, body["boxes"], chunks, leaves, parts)
    planner_data = decoded(body["planner"])
    check_planner_data(planner_data, items)
    metadata = Metadata(state_dict_metadata=items, planner_data=planner_data, storage_data=stored)
    rank = None if body["rank"] is None else int(body["rank"])
    world_size = int(body["world_size"])
    if not 0 < world_size <= _MAX_RANKS:
        raise FormatError(f"expected a number of ranks, got {world_size!r:.50}")
    return Marker(metadata, stored, files, rank, world_size)


def _parts_of_row(
    row: Sequence[Any], files: Sequence[SavedFile], chunks: Mapping[str, Sequence[ChunkStorageMetadata]]
) -> tuple[MetadataIndex, StoredParts]:
    fqn, offsets, (text, *place), rows = row
    offset = torch.Size(offsets)
    if not any(chunk.offsets == offset for chunk in chunks[fqn]):
        raise ValueError(f"tensor {fqn!r:.200}: expected parts of one of its boxes, got those of offset {list(offset)}")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"tensor {fqn!r:.200}: expected a description of its parts as text, got {text!r:.50}")
    about = Stored(JSON, text=text) if text is not None else _stored(JSON, files, place)
    parts = []
    for path, word, shape, *where in rows:
        if not isinstance(path, str) or not _are_numbers(shape):
            raise ValueError(
                f"tensor {fqn!r:.200}: expected a path and a shape of a part, got {path!r:.100} and {shape!r:.100}"
            )
        stored = _stored(TENSOR, files, where)._replace(shape=tuple(shape))
        parts.append(StoredPart(path, _named(word, torch.dtype), stored))
    return MetadataIndex(fqn, offset), StoredParts(about, tuple(parts))


def check_planner_data(data: Any, names: Container[str]) -> None:
    """Refuses data from which torch's planners would make huge lists, because a list extends to the largest index.

    Args:
        data: The data of any planner. Torch's planners store for each name the keys and indexes that lead to its value.
        names: The names of the items in the checkpoint.

    Raises:
        ValueError: The lists would have too many elements.
    """
    lengths: dict[int, int] = {}  # lengths of lists, by a hash of the path that leads to each
    total = 0  # checked while it grows, so that hostile data are not read to their end
    for fqn, path in data.items() if isinstance(data, dict) else ():
        if fqn not in names or not isinstance(path, (list, tuple)):
            continue
        inside = 0
        for step in path[:_MAX_DEPTH]:
            if type(step) is int:
                before = lengths.get(inside, 0)
                lengths[inside] = max(before, abs(step) + 1)
                total += lengths[inside] - before
            inside = hash((inside, step)) if type(step) in (int, str) else inside
        if total > _MAX_LISTED or len(path) > _MAX_DEPTH:
            limits = f"{_MAX_LISTED:,} elements, or in more than {_MAX_DEPTH} containers"
            raise ValueError(f"planner data: {fqn!r:.200} is in lists of more than {limits}")


def _check_name(fqn: Any) -> None:
    if not isinstance(fqn, str):
        raise ValueError(f"expected the name of a tensor or value, got {fqn!r:.200}")


class _StoredItems(Mapping[MetadataIndex, Stored]):
    """The places of all items with bytes. Each is decoded on first use: a rank needs few of a million boxes.

    Raises:
        ValueError, TypeError: The columns do not match each other, or a file, position or digest is out of range.
    """

    def __init__(
        self,
        files: Sequence[SavedFile],
        columns: Mapping[str, Any],
        chunks: Mapping[str, list[ChunkStorageMetadata]],
        leaves: Mapping[MetadataIndex, Stored],
        parts: Mapping[MetadataIndex, StoredParts],
    ) -> None:
        self._files, self._chunks, self._leaves, self._parts = files, chunks, leaves, parts
        places: list[list[int]] = [columns[name] for name in ("file", "record", "offset", "nbytes")]
        count = sum(map(len, chunks.values()))
        digests = [columns[name] for name in _DIGESTS]  # None if no box has one
        if any(len(column) != count for column in (*places, *(each for each in digests if each is not None))):
            raise ValueError(f"columns of boxes: expected {count} values in each, got {sorted(set(map(len, places)))}")
        _check_places(files, places, digests)
        if _NOWHERE in places[0]:
            every = (chunk for boxes in chunks.values() for chunk in boxes)
            if any(chunk.sizes.numel() for number, chunk in zip(places[0], every) if number == _NOWHERE):
                raise ValueError("expected a file for each box with elements, got a box without one")
        self._places, self._digests = places, digests
        self._begin = dict(zip(chunks, accumulate(map(len, chunks.values()), initial=0)))
        self._numbers: dict[str, dict[torch.Size, int]] = {}  # the boxes of each tensor of which one was asked for

    def __getitem__(self, index: MetadataIndex) -> Stored:
        if index.fqn not in self._begin:
            return self._leaves[index]
        if index.offset is None:
            raise KeyError(index)
        return self._box(index.fqn, self._boxes_of(index.fqn)[index.offset])

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn in self._begin:
            for offset in self._boxes_of(fqn):
                yield MetadataIndex(fqn, offset)
        yield from self._leaves

    def __len__(self) -> int:
        return len(self._places[0]) - self._places[0].count(_NOWHERE) + len(self._leaves)

    def _boxes_of(self, fqn: str) -> dict[torch.Size, int]:
        found = self._numbers.get(fqn)
        if found is None:
            begin, files = self._begin[fqn], self._places[0]
            found = {
                chunk.offsets: begin + i for i, chunk in enumerate(self._chunks[fqn]) if files[begin + i] != _NOWHERE
            }
            self._numbers[fqn] = found
        return found

    def _box(self, fqn: str, number: int) -> Stored:
        file, record, offset, nbytes = (column[number] for column in self._places)
        crc32, sha256 = (None if column is None else column[number] for column in self._digests)
        chunk = self._chunks[fqn][number - self._begin[fqn]]
        parts = self._parts.get(MetadataIndex(fqn, chunk.offsets)) if self._parts else None
        shape = tuple(chunk.sizes)
        return Stored(TENSOR, self._files[file], record, offset, nbytes, crc32, sha256, shape=shape, parts=parts)


def _are_numbers(column: Sequence[Any], end: int = 1 << 63, begin: int = 0) -> bool:
    """Whether all values are integers from `begin` to below `end`. A million take some hundredths of a second."""
    return set(map(type, column)) <= {int} and min(column, default=begin) >= begin and max(column, default=begin) < end


def _wrong(column: Sequence[Any], end: int = 1 << 63, begin: int = 0) -> tuple[int, Any]:
    """The first value that :func:`_are_numbers` refuses, and its row."""
    return next((row, each) for row, each in enumerate(column) if not _are_numbers([each], end, begin))


def _check_places(
    files: Sequence[SavedFile], places: Sequence[Sequence[Any]], digests: Sequence[Optional[Sequence[Any]]]
) -> None:
    """Checks the columns of boxes or leaves."""
    numbers, *others = places
    if not _are_numbers(numbers, len(files), _NOWHERE):
        row, number = _wrong(numbers, len(files), _NOWHERE)
        raise ValueError(f"file of box {row}: expected a number below {len(files)}, got {number!r:.50}")
    for name, column in zip(("record", "offset", "nbytes"), others):
        if not _are_numbers(column):
            row, number = _wrong(column)
            raise ValueError(f"{name} of box {row}: expected a number of 0 or more, got {number!r:.50}")
    crc32, sha256 = ([value for value in column or () if value is not None] for column in digests)
    if not _are_numbers(crc32, 1 << 32):
        row, number = _wrong(crc32, 1 << 32)
        raise ValueError(f"crc32 of box {row}: {number!r:.50} is not a 32-bit number")
    bytes.fromhex("".join(sha256))


def _stored(kind: str, files: Sequence[SavedFile], place: Sequence[Any]) -> Stored:
    number, record, offset, nbytes, crc32, sha256 = place
    _check_places(files, ([number], [record], [offset], [nbytes]), ([crc32], [sha256]))
    if number == _NOWHERE:
        raise ValueError("expected the file of a value or part, got none")
    return Stored(kind, files[number], record, offset, nbytes, crc32, sha256, shape=(nbytes,))


def _properties(key: Sequence[Any]) -> TensorProperties:
    word, layout, requires_grad, memory_format, pin_memory = key
    dtype = _named(word, torch.dtype)
    try:
        stored_for_tensor(dtype)
    except NotImplementedError as error:
        raise FormatError(str(error)) from None
    return TensorProperties(
        dtype=dtype,
        layout=_named(layout, torch.layout),
        requires_grad=bool(requires_grad),
        memory_format=_named(memory_format, torch.memory_format),
        pin_memory=bool(pin_memory),
    )


def _named(word: str, kind: Any) -> Any:
    """The attribute of torch that has this name."""
    value = getattr(torch, word, None)
    if not isinstance(value, kind):
        raise FormatError(f"this torch ({torch.__version__}) has no {kind.__name__} {word!r:.50}")
    return value

"""A second, naive implementation of the file format, which tests use as their oracle.

It was written from docs/format.md alone, uses only the standard library, and is plain on purpose: the whole file is one
``bytes`` object, and every field is read by hand. It shares no code with the package, so the two agree only if both are
right.

``read_file`` turns bytes into a ``File`` with every field of every record. ``write_file`` turns tensors into bytes. By
default, it uses the layout of the reference releases, so their files can be reproduced byte for byte; arguments set
everything that the format leaves open. ``encode_*`` make single structures, for files that are wrong on purpose.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Callable, Optional, Union

MAGIC = b"|TZR|"
PROLOGUE_NBYTES = 73
RESERVED_INDEX_NBYTES = 256 * 1024  # what the reference releases reserve
LONG = 1 << 32  # the first dimension that needs eight bytes
PARAMETER, BUFFER, STATE_DICT = 0, 1, 2
CRC32, SHA256 = 0, 1
BOTH_HASHES = ("crc32", "sha256")

Path = tuple[Union[str, int], ...]


class BadFile(ValueError):
    """The bytes contradict the format."""


# --- values ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Entry:
    """One entry of the index."""

    version: Optional[int]  # the tag, or None in an untagged index
    name: bytes
    kind: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data_offset: int
    data_nbytes: int

    @property
    def path(self) -> Path:
        return decode_name(self.name)

    @property
    def wide(self) -> bool:
        return self.version == 5


@dataclasses.dataclass
class Header:
    """One record header; positions count from its first byte."""

    nbytes: int
    module_idx: int
    kind: int
    name: bytes
    dtype: str
    shape: tuple[int, ...]
    hashes: list[tuple[int, bytes]]
    hash_values_at: list[int]
    hash_block_slack: bytes
    crypt_begin: int  # [crypt_begin, crypt_end): the crypt_info block with its length prefix
    crypt_end: int
    padding: bytes
    data_nbytes: int
    raw: bytes

    @property
    def crypt_info(self) -> bytes:
        return self.raw[self.crypt_begin + 8 : self.crypt_end]

    def hash_input(self) -> bytes:
        """The part of the header that both digests cover."""
        zeroed = bytearray(self.raw)
        for (_, value), at in zip(self.hashes, self.hash_values_at):
            zeroed[at : at + len(value)] = bytes(len(value))
        return bytes(zeroed[: self.crypt_begin] + zeroed[self.crypt_end :])


@dataclasses.dataclass
class Record:
    """An index entry with its header and its payload as stored (ciphertext in an encrypted file)."""

    entry: Entry
    header: Header
    payload: bytes

    @property
    def path(self) -> Path:
        return self.entry.path

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor once loaded."""
        return math.prod(self.header.shape) * itemsize(self.header.dtype)

    @property
    def content(self) -> bytes:
        """The tensor's bytes in a plain record: zeros if no data are stored, and without surplus bytes."""
        if not self.payload:
            return bytes(self.nbytes)
        return self.payload[: self.nbytes]

    def hashes_hold(self, plaintext: Optional[bytes] = None) -> bool:
        """Whether every stored digest matches; an encrypted payload needs ``plaintext``."""
        data = self.header.hash_input() + (self.payload if plaintext is None else plaintext)
        return all(value == digest(kind, data) for kind, value in self.header.hashes)


@dataclasses.dataclass
class File:
    """Everything that a container holds."""

    version: int
    flags: int
    tensor_size: int
    reserved: bytes
    tensor_count: int
    index_nbytes: int
    index_slack: bytes
    records: list[Record]

    @property
    def annex(self) -> list[tuple[int, int, bytes]]:
        return read_annex(self.index_slack)

    @property
    def has_crypt_info(self) -> bool:
        return has_crypt_info(self.version, self.flags)

    def contents(self) -> dict[Path, bytes]:
        return {record.path: record.content for record in self.records}


def has_crypt_info(version: int, flags: int) -> bool:
    return version == 3 or (version >= 4 and bool(flags & 1))


def digest(kind: int, data: bytes) -> bytes:
    if kind == CRC32:
        return struct.pack("<I", zlib.crc32(data))
    return hashlib.sha256(data).digest()


# --- dtypes and names -----------------------------------------------------------------------------------------------


def split_dtype(stored: str) -> tuple[str, Optional[str]]:
    """The numpy part, and the torch name behind the separator if there is one."""
    parts = stored.split("\0")
    if len(parts) > 2 or not parts[0]:
        raise BadFile(f"dtype {stored!r}")
    return parts[0], parts[1] if len(parts) == 2 else None


def itemsize(stored: str) -> int:
    """Bytes per element, from the digits of the numpy part."""
    numpy_part, _ = split_dtype(stored)
    order, kind, digits = numpy_part[:1], numpy_part[1:2], numpy_part[2:]
    if order not in "<>|=" or kind not in "biufcV" or not digits.isdigit() or int(digits) == 0:
        raise BadFile(f"dtype {stored!r}")
    return int(digits)


def encode_name(path: Path) -> bytes:
    """The stored form of a path. Two names that the reference writes in an unreadable form are repaired."""
    if len(path) == 1 and isinstance(path[0], str) and path[0] and not path[0].startswith("\x1e"):
        return path[0].encode("utf-8")
    text = json.dumps(list(path), ensure_ascii=True, separators=(",", ":"))
    return b"\x1e" + text.replace("\x7f", "\\u007f").encode("ascii")


def decode_name(stored: bytes) -> Path:
    if not stored:
        raise BadFile("empty name")
    if stored[:1] != b"\x1e":
        try:
            return (stored.decode("utf-8"),)
        except UnicodeDecodeError as error:
            raise BadFile(f"name is not UTF-8: {error}") from None
    if len(stored) < 3 or stored[1:2] != b"[" or stored[-1:] != b"]" or b"\n" in stored or b"\r" in stored:
        raise BadFile(f"structured name {stored!r}")

    def refuse(text: str) -> None:
        raise BadFile(f"number {text!r} in a name")

    try:
        path = json.loads(stored[1:].decode("utf-8"), parse_float=refuse, parse_constant=refuse)
    except RecursionError:
        raise BadFile("nested name") from None
    except ValueError as error:
        raise BadFile(f"structured name {stored!r}: {error}") from None
    if not path:
        raise BadFile("empty path")
    for component in path:
        if type(component) not in (str, int) or (isinstance(component, int) and component < 0):
            raise BadFile(f"component {component!r} in a name")
    return tuple(path)


class PathRules:
    """The tree that the paths of one file form; ``add`` raises if a path contradicts it."""

    def __init__(self) -> None:
        self.root: dict = {}

    def add(self, path: Path) -> None:
        layer = self.root
        for depth, component in enumerate(path):
            if layer and type(next(iter(layer))) is not type(component):
                raise BadFile(f"{path}: integers and strings in one layer")
            last = depth == len(path) - 1
            if last and component in layer:
                raise BadFile(f"{path}: occurs twice, or is a branch already")
            if not last and component in layer and layer[component] is None:
                raise BadFile(f"{path}: passes through a leaf")
            if last:
                layer[component] = None
            else:
                layer = layer.setdefault(component, {})


# --- reading --------------------------------------------------------------------------------------------------------


class Cursor:
    """Takes bytes from the front, exactly as many as asked for."""

    def __init__(self, data: bytes, at: int = 0, end: Optional[int] = None) -> None:
        self.data, self.at, self.end = data, at, len(data) if end is None else end

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes < 0 or self.at + nbytes > min(self.end, len(self.data)):
            raise BadFile(f"{what}: expected {nbytes} bytes at {self.at}, got {self.end - self.at}")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def number(self, code: str, what: str) -> int:
        form = "<" + code
        (value,) = struct.unpack(form, self.take(struct.calcsize(form), what))
        return value

    def text(self, nbytes: int, what: str) -> str:
        try:
            return self.take(nbytes, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadFile(f"{what}: {error}") from None


def read_file(data: bytes, start: int = 0, check_extents: bool = True) -> File:
    """Reads a whole container that starts at byte ``start`` of ``data``. Digests are not compared here."""
    cursor = Cursor(data, start)
    if cursor.take(5, "magic") != MAGIC:
        raise BadFile("magic")
    version = cursor.number("I", "version")
    if not 1 <= version <= 5:
        raise BadFile(f"version {version}")
    flags = int.from_bytes(cursor.take(32, "flags"), "little")
    if flags > 3 or (flags & 2 and version < 5):
        raise BadFile(f"flags {flags}")
    tensor_size = cursor.number("Q", "tensor_size")
    reserved = cursor.take(8, "reserved")
    tensor_count = cursor.number("Q", "tensor_count")
    index_nbytes = cursor.number("Q", "metadata length")
    if index_nbytes == 0 or tensor_count == 0:
        raise BadFile("empty index")
    index_at = cursor.at
    cursor.take(index_nbytes, "metadata block")
    after_index = cursor.at

    cursor = Cursor(data, index_at, after_index)
    rules = PathRules()
    entries = []
    for _ in range(tensor_count):
        entry = read_entry(cursor, tagged=bool(flags & 2))
        rules.add(entry.path)
        entries.append(entry)
    slack = data[cursor.at : after_index]

    records = []
    free_from = after_index
    for entry in entries:
        if check_extents and (entry.offset < free_from or entry.data_offset < entry.offset):
            raise BadFile(f"{entry.name!r}: overlaps what is before it")
        record = read_record(data, entry, has_crypt_info(version, flags))
        records.append(record)
        free_from = entry.data_offset + len(record.payload)
    return File(version, flags, tensor_size, reserved, tensor_count, index_nbytes, slack, records)


def read_entry(cursor: Cursor, tagged: bool) -> Entry:
    version = cursor.number("I", "entry version") if tagged else None
    if version not in (None, 1, 5):
        raise BadFile(f"entry version {version}")
    name = cursor.take(cursor.number("H", "name length"), "name")
    decode_name(name)
    kind = read_kind(cursor)
    dtype = cursor.text(cursor.number("B", "dtype length"), "dtype")
    itemsize(dtype)
    shape = read_shape(cursor, wide=version == 5)
    offset = cursor.number("Q", "offset")
    data_offset = cursor.number("Q", "data_offset")
    return Entry(version, name, kind, dtype, shape, offset, data_offset, cursor.number("Q", "data_length"))


def read_kind(cursor: Cursor) -> int:
    kind = cursor.number("B", "tensor type")
    if kind not in (PARAMETER, BUFFER, STATE_DICT):
        raise BadFile(f"tensor type {kind}")
    return kind


def read_shape(cursor: Cursor, wide: bool) -> tuple[int, ...]:
    ndim = cursor.number("B", "ndim")
    return tuple(cursor.number("Q" if wide else "I", "dimension") for _ in range(ndim))


def read_record(data: bytes, entry: Entry, with_crypt_info: bool) -> Record:
    header = read_header(data, entry.offset, entry.wide, with_crypt_info)
    check_against_index(header, entry)
    payload = Cursor(data, entry.offset + header.nbytes).take(header.data_nbytes, f"payload of {entry.name!r}")
    return Record(entry, header, payload)


def read_header(data: bytes, at: int, wide: bool, with_crypt_info: bool) -> Header:
    nbytes = Cursor(data, at).number("Q", "header size")
    raw = Cursor(data, at).take(nbytes, "header")
    if nbytes < 16:
        raise BadFile(f"header of {nbytes} bytes")
    cursor = Cursor(raw, 8, nbytes - 8)
    module_idx = cursor.number("H", "module_idx")
    kind = read_kind(cursor)
    name = cursor.take(cursor.number("H", "name length"), "name")
    path = decode_name(name)
    if kind != STATE_DICT and not (len(path) == 1 and isinstance(path[0], str)):
        raise BadFile(f"structured name {name!r} outside of a state dict")
    dtype = cursor.text(cursor.number("B", "dtype length"), "dtype")
    numpy_part, torch_name = split_dtype(dtype)
    if numpy_part[1:2] == "V" and not (torch_name or "").startswith("torch."):
        raise BadFile(f"dtype {dtype!r} says too little")
    shape = read_shape(cursor, wide)

    block_end = cursor.number("H", "hash block length") + cursor.at
    block = Cursor(raw, cursor.at, min(block_end, nbytes - 8))
    hashes, values_at = [], []
    for _ in range(block.number("B", "number of hashes")):
        hash_kind = block.number("B", "hash type")
        if hash_kind not in (CRC32, SHA256):
            raise BadFile(f"hash type {hash_kind}")
        length = block.number("B", "hash length")
        values_at.append(block.at)
        hashes.append((hash_kind, block.take(length, "hash")))
    hash_slack = block.take(block_end - block.at, "hash block")

    cursor = Cursor(raw, block.at, nbytes - 8)
    crypt_begin = cursor.at
    if with_crypt_info:
        cursor.take(cursor.number("Q", "crypt_info length"), "crypt_info")
    crypt_end = cursor.at
    padding = raw[crypt_end : nbytes - 8]
    (data_nbytes,) = struct.unpack("<q", raw[-8:])
    if data_nbytes < 0:
        raise BadFile(f"data length {data_nbytes}")
    return Header(
        nbytes, module_idx, kind, name, dtype, shape, hashes, values_at, hash_slack, crypt_begin, crypt_end, padding,
        data_nbytes, raw,
    )  # fmt: skip


def check_against_index(header: Header, entry: Entry) -> None:
    """Compares header and index, which must agree except for the spellings that compatible writers need."""

    def differ(what: str, wanted: object, found: object) -> BadFile:
        return BadFile(f"{entry.name!r}: {what}: {wanted!r} in the index, {found!r} in the header")

    if decode_name(header.name) != entry.path:
        raise differ("name", entry.name, header.name)
    if header.data_nbytes != entry.data_nbytes:
        raise differ("data length", entry.data_nbytes, header.data_nbytes)
    needed = math.prod(header.shape) * itemsize(header.dtype)
    if 0 < header.data_nbytes < needed:
        raise differ("payload for the shape", needed, header.data_nbytes)


# --- writing --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tensor:
    """A tensor to write: ``data`` is None for a tensor without data (from the meta device)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    data: Optional[bytes]
    kind: int = STATE_DICT
    module_idx: int = 0
    index_dtype: Optional[str] = None  # another spelling for the index
    hashes: Sequence[str] = BOTH_HASHES
    padding: int = 0  # zeros at the end of the header

    @property
    def payload(self) -> bytes:
        return self.data or b""

    @property
    def long(self) -> bool:
        return any(dimension >= LONG for dimension in self.shape)


def choose_version(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """The lowest data version that holds the tensors, without encryption, and its flags."""
    if any(tensor.long for tensor in tensors):
        return 5, 2
    if any(tensor.data is None for tensor in tensors):
        return 4, 0
    return (2 if any("\0" in tensor.dtype for tensor in tensors) else 1), 0


def write_file(
    tensors: Sequence[Tensor],
    *,
    index_nbytes: Optional[int] = RESERVED_INDEX_NBYTES,
    start: int = 0,
    gap: int = 0,
    align: Optional[Callable[[int], int]] = None,
    version: Optional[int] = None,
    flags: Optional[int] = None,
    terminator: bytes = bytes(8),
    annex: Sequence[tuple[int, int, bytes]] = (),
) -> bytes:
    """Writes a container that begins at byte ``start`` of its file; the bytes before it are not part of the result.

    Args:
        tensors: The tensors in the order of the file.
        index_nbytes: Length of the metadata block; None for the length of the entries.
        start: Position of the first byte, which all stored offsets include.
        gap: Zeros between the metadata block and the first record.
        align: Maps the size of a payload to its alignment, which header padding provides.
        version: Data version; None for the lowest possible.
        flags: Feature flags; None for the flags of the version.
        terminator: The bytes after the last payload.
        annex: The sections of the annex as (type, flags, body), to which a digest of the index is added; None for no
            annex.
    """
    chosen_version, chosen_flags = choose_version(tensors)
    version = chosen_version if version is None else version
    flags = chosen_flags if flags is None else flags
    tagged = bool(flags & 2)
    if index_nbytes is None:
        index_nbytes = sum(len(encode_entry(tensor, 0, 0, tagged)) for tensor in tensors)
    records_at = start + PROLOGUE_NBYTES + index_nbytes + gap
    index, records = b"", b""
    for tensor in tensors:
        offset = records_at + len(records)
        padding = tensor.padding
        if align is not None:
            padding = -(offset + len(encode_header(tensor))) % align(len(tensor.payload))
        header = encode_header(tensor, padding)
        index += encode_entry(tensor, offset, offset + len(header), tagged)
        records += header + tensor.payload
    if len(index) > index_nbytes:
        raise ValueError(f"index needs {len(index)} bytes, has {index_nbytes}")
    tensor_size = sum(len(tensor.payload) for tensor in tensors)
    prologue = encode_prologue(version, flags, tensor_size, len(tensors), index_nbytes)
    if annex:
        index += encode_annex([*annex, (4, 0, index_digest(prologue, index, annex))])
    return prologue + index.ljust(index_nbytes, b"\0") + bytes(gap) + records + terminator


def encode_section(kind: int, flags: int, body: bytes) -> bytes:
    return struct.pack("<BBI", kind, flags, len(body)) + body


def encode_annex(sections: Sequence[tuple[int, int, bytes]], magic: bytes = b"TZRANNX1") -> bytes:
    body = b"".join(encode_section(*section) for section in sections)
    framed = magic + struct.pack("<I", len(body)) + body
    return framed + struct.pack("<I", zlib.crc32(framed))


def index_digest(prologue: bytes, index: bytes, sections: Sequence[tuple[int, int, bytes]]) -> bytes:
    """The content of section 4: SHA-256 of the prologue without its sizes, the entries, and the sections before it."""
    covered = prologue[5:41] + prologue[57:] + index + b"".join(encode_section(*section) for section in sections)
    return hashlib.sha256(covered).digest()


def read_annex(slack: bytes) -> list[tuple[int, int, bytes]]:
    """The sections of an annex; an empty list without an annex."""
    if not slack.startswith(b"TZRANNX1"):
        return []
    (nbytes,) = struct.unpack_from("<I", slack, 8)
    framed, end = slack[: 12 + nbytes], 12 + nbytes
    if len(slack) < end + 4 or struct.unpack_from("<I", slack, end)[0] != zlib.crc32(framed):
        raise BadFile("annex")
    sections, at = [], 12
    while at < end:
        kind, flags, length = struct.unpack_from("<BBI", slack, at)
        sections.append((kind, flags, slack[at + 6 : at + 6 + length]))
        at += 6 + length
    if at != end:
        raise BadFile("annex")
    return sections


def encode_prologue(
    version: int, flags: int, tensor_size: int, tensor_count: int, index_nbytes: int, reserved: bytes = bytes(8)
) -> bytes:
    fields = struct.pack("<Q8sQQ", tensor_size, reserved, tensor_count, index_nbytes)
    return MAGIC + struct.pack("<I", version) + flags.to_bytes(32, "little") + fields


def encode_shape(tensor: Tensor, wide: Optional[bool] = None) -> bytes:
    wide = tensor.long if wide is None else wide
    return struct.pack(f"<B{len(tensor.shape)}{'Q' if wide else 'I'}", len(tensor.shape), *tensor.shape)


def encode_entry(tensor: Tensor, offset: int, data_offset: int, tagged: bool = False) -> bytes:
    name = encode_name(tensor.path)
    dtype = (tensor.index_dtype or tensor.dtype).encode("utf-8")
    entry = struct.pack("<I", 5 if tensor.long else 1) if tagged else b""
    entry += struct.pack("<H", len(name)) + name + struct.pack("<BB", tensor.kind, len(dtype)) + dtype
    return entry + encode_shape(tensor) + struct.pack("<QQQ", offset, data_offset, len(tensor.payload))


def encode_header(tensor: Tensor, padding: int = 0, crypt_info: Optional[bytes] = None) -> bytes:
    """A record header with its digests; ``crypt_info`` is the block without its length prefix."""
    name, dtype = encode_name(tensor.path), tensor.dtype.encode("utf-8")
    fields = struct.pack("<HBH", tensor.module_idx, tensor.kind, len(name)) + name
    fields += struct.pack("<B", len(dtype)) + dtype + encode_shape(tensor)
    kinds = [{"crc32": CRC32, "sha256": SHA256}[name] for name in tensor.hashes]
    crypt = b"" if crypt_info is None else struct.pack("<Q", len(crypt_info)) + crypt_info
    tail = bytes(padding) + struct.pack("<q", len(tensor.payload))

    def hash_block(values: list[bytes]) -> bytes:
        block = struct.pack("<B", len(values))
        for kind, value in zip(kinds, values):
            block += struct.pack("<BB", kind, len(value)) + value
        return struct.pack("<H", len(block)) + block

    zeros = [bytes(4) if kind == CRC32 else bytes(32) for kind in kinds]
    nbytes = 8 + len(fields) + len(hash_block(zeros)) + len(crypt) + len(tail)
    front = struct.pack("<Q", nbytes) + fields
    covered = front + hash_block(zeros) + tail + tensor.payload
    return front + hash_block([digest(kind, covered) for kind in kinds]) + crypt + tail


def rewrite(file: File, start: int = 0) -> bytes:
    """Writes a plain file again, from the result of ``read_file``.

    It copies only choices that the format leaves open (room of the index, padding, kinds of digests, the spelling of
    dtypes in the index) and derives everything else. Equal bytes mean that the file has no other freedom.
    """
    names = {CRC32: "crc32", SHA256: "sha256"}
    tensors = [
        Tensor(
            path=record.path,
            dtype=record.header.dtype,
            shape=record.header.shape,
            data=None if not record.payload and record.nbytes else record.payload,
            kind=record.header.kind,
            module_idx=record.header.module_idx,
            index_dtype=record.entry.dtype,
            hashes=[names[kind] for kind, _ in record.header.hashes],
            padding=len(record.header.padding),
        )
        for record in file.records
    ]
    version, flags = choose_version(tensors)
    if file.version == 4 and version < 4:
        version = 4  # meta tensors without elements, and meta scalars that were written as zeros, look the same
    annex = [section for section in file.annex if section[0] != 4]
    return write_file(tensors, index_nbytes=file.index_nbytes, start=start, version=version, flags=flags, annex=annex)

"""Encrypted and signed files, and the altered files that an attacker could make from them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import reference_auth as auth
import reference_format as fmt
import torch
from samples import state_dict_bytes, tensor
from servers.file_server import serve_folder

import tensorizer
from tensorizer import DecryptionParams, EncryptionParams, SigningKey, TensorDeserializer

K = bytes(range(32))
KEY, OPEN = EncryptionParams(K), DecryptionParams.from_key(K)
SIGNER = SigningKey.from_bytes(K)
OTHER = SigningKey.from_bytes(bytes(32))
PUBLIC = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"

SIGNED_ANNEX = bytes.fromhex(
    "545a52414e4e5831b2000000"
    "050020000000fa15805cac6ebea817ae3655d4676edcfd3892137bb26c6a2eaca22039ec61de"
    "040020000000bdf4a00a6a2de6482343c8716811300fa30081a8fdfabf217588c44b259e283f"
    "07006000000003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    "fd6dfa482fe80d3cc228257564c00c093ea418a8979dec248128b9b76a494fb5"
    "a8a0ef2c901c1cbe0ff7ec3e6a2aa0fbb8817c58f117e2773b8afa4344c1a20c67725b1e"
)
W = {"w": torch.tensor([1.0, -2.5])}


def values() -> dict[str, torch.Tensor]:
    """Four tensors of one shape, a scalar, and a tensor of several cipher chunks; `g` is `a` under another name."""
    made = {name: tensor((6, 4), seed=i) for i, name in enumerate("abcd")}
    made["e"] = tensor((), torch.float64, seed=9)
    made["f"] = tensor((1100, 1000), seed=10)
    made["g"] = made["a"]
    return made


def encrypted(**options: Any) -> bytes:
    return state_dict_bytes(values(), encryption=KEY, ties="once", metadata={"k": "v"}, **options)


def signed(**options: Any) -> bytes:
    return state_dict_bytes(values(), signing_key=SIGNER, ties="once", metadata={"k": "v"}, **options)


def plain(**options: Any) -> bytes:
    return state_dict_bytes(values(), ties="once", metadata={"k": "v"}, **options)


def opened(data: Any, **options: Any) -> TensorDeserializer:
    return TensorDeserializer(io.BytesIO(data) if isinstance(data, bytes) else data, device="cpu", **options)


def vector(**options: Any) -> bytes:
    return state_dict_bytes(W, **options)


def names_exchanged(data: bytes) -> bytes:
    """`b` and `c` exchange names, in the index and in their headers."""
    return renamed(data, {b"b": b"c", b"c": b"b"})


def renamed(data: bytes, names: dict[bytes, bytes]) -> bytes:
    out = bytearray(data)
    at = fmt.PROLOGUE_NBYTES
    for record in fmt.read_file(data).records:
        new = names.get(record.entry.name, record.entry.name)
        out[at + 2 : at + 2 + len(new)] = new
        at += entry_nbytes(record.entry)
        place = record.entry.offset + 13
        out[place : place + len(new)] = new
    return bytes(out)


def entry_nbytes(entry: fmt.Entry) -> int:
    return 29 + len(entry.name) + len(entry.dtype.encode()) + 4 * len(entry.shape)


def patched(data: bytes, name: str, change: Callable[[fmt.Record, bytearray, int], None]) -> bytes:
    """Calls ``change(record, bytes of the file, position of its index entry)`` for records of a file."""
    out = bytearray(data)
    at = fmt.PROLOGUE_NBYTES
    for record in fmt.read_file(data).records:
        if record.path == (name,):
            change(record, out, at)
        at += entry_nbytes(record.entry)
    return bytes(out)


def reshaped(data: bytes) -> bytes:
    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        shape = struct.pack("<II", 4, 6)
        dims = at + 2 + 1 + 1 + 1 + 3 + 1
        out[dims : dims + 8] = shape
        dims = record.entry.offset + 13 + 1 + 1 + 3 + 1
        out[dims : dims + 8] = shape

    return patched(data, "b", change)


def retyped(data: bytes) -> bytes:
    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        out[at + 5 : at + 8] = b"<i4"
        out[record.entry.offset + 15 : record.entry.offset + 18] = b"<i4"

    return patched(data, "b", change)


def reindexed(data: bytes, entries: list[bytes], records: Optional[bytes] = None) -> bytes:
    """The same file with other entries in its index, followed by the annex."""
    file = fmt.read_file(data)
    annex = fmt.encode_annex([(k, f, records if k == auth.RECORDS and records else b) for k, f, b in file.annex])
    index = b"".join(entries) + annex
    out = bytearray(data)
    out[57:65] = struct.pack("<Q", len(entries))
    out[73 : 73 + file.index_nbytes] = index.ljust(file.index_nbytes, b"\0")
    return bytes(out)


def entries_in(data: bytes) -> list[bytes]:
    found, at = [], fmt.PROLOGUE_NBYTES
    for record in fmt.read_file(data).records:
        found.append(data[at : at + entry_nbytes(record.entry)])
        at += len(found[-1])
    return found


def dropped(data: bytes) -> bytes:
    """The file without `d`."""
    digests = auth.crypto.split(auth.record_digests(data), 32)
    keep = [i for i in range(len(digests)) if i != 3]
    return reindexed(data, [entries_in(data)[i] for i in keep], b"".join(digests[i] for i in keep))


def repeated(data: bytes) -> bytes:
    """The file with `a` again, under the name `h`, behind the last record."""
    record = fmt.read_file(data).records[0]
    header = bytearray(record.header.raw)
    header[13:14] = b"h"
    begin = len(data) - 8
    entry = bytearray(entries_in(data)[0])
    entry[2:3] = b"h"
    entry[-24:-8] = struct.pack("<QQ", begin, begin + len(header))
    digests = auth.record_digests(data) + hashlib.sha256(bytes(header)).digest()
    return reindexed(data[:-8] + bytes(header) + record.payload + bytes(8), [*entries_in(data), bytes(entry)], digests)


def reordered(data: bytes) -> bytes:
    """`b` and `c` exchange places in the index and in the file. The format allows this order."""
    b, c = fmt.read_file(data).records[1:3]
    entries, digests = entries_in(data), auth.crypto.split(auth.record_digests(data), 32)
    entries[1:3] = entries[2][:-24] + entries[1][-24:], entries[1][:-24] + entries[2][-24:]
    digests[1:3] = digests[2], digests[1]
    out = bytearray(reindexed(data, entries, b"".join(digests)))
    for to, other in ((b, c), (c, b)):
        out[to.entry.offset : to.entry.data_offset + len(to.payload)] = other.header.raw + other.payload
    return bytes(out)


def records_exchanged(data: bytes) -> bytes:
    """Headers and payloads of `b` and `c` exchange places and keep the right names; the index stays the same."""
    out = bytearray(data)
    b, c = fmt.read_file(data).records[1:3]
    for to, other in ((b, c), (c, b)):
        header = bytearray(other.header.raw)
        header[13:14] = to.entry.name
        assert len(header) == to.entry.data_offset - to.entry.offset
        out[to.entry.offset : to.entry.data_offset + len(to.payload)] = header + other.payload
    return bytes(out)


def tie_changed(data: bytes) -> bytes:
    ties = b'{"g":"b"}'
    return auth.with_annex(data, [(k, f, ties if k == auth.TIES else body) for k, f, body in fmt.read_file(data).annex])


def metadata_changed(data: bytes) -> bytes:
    return auth.with_annex(
        data,
        [(k, f, b'{"k":"w"}' if k == auth.METADATA else body) for k, f, body in fmt.read_file(data).annex],
    )


def version_changed(data: bytes) -> bytes:
    encrypted = fmt.read_file(data).has_crypt_info
    return data[:5] + struct.pack("<I", 4) + bytes([1 if encrypted else 0]) + data[10:]


def from_another_file(data: bytes) -> bytes:
    """The file with record `b` of another file under the same key."""
    options: dict[str, Any] = {"encryption": KEY} if fmt.read_file(data).has_crypt_info else {}
    other = state_dict_bytes({**values(), "b": tensor((6, 4), seed=77)}, ties="once", metadata={"k": "v"}, **options)
    out = bytearray(data)
    to, source = fmt.read_file(data).records[1], fmt.read_file(other).records[1]
    assert len(to.header.raw) == len(source.header.raw)
    out[to.entry.offset : to.entry.data_offset + len(to.payload)] = source.header.raw + source.payload
    return bytes(out)


def other_chunk_size(data: bytes) -> bytes:
    def change(record: fmt.Record, out: bytearray, at: int) -> None:
        place = record.entry.offset + record.header.crypt_begin + 8 + 2 + 8 + 2
        assert struct.unpack_from("<Q", out, place) == (2 << 20,)
        struct.pack_into("<Q", out, place, 1 << 20)

    return patched(data, "b", change)


AT_OPENING = [
    names_exchanged,
    lambda data: renamed(data, {b"d": b"z"}),
    reshaped,
    retyped,
    dropped,
    repeated,
    reordered,
    tie_changed,
    version_changed,
]
AT_THE_RECORD = [records_exchanged, from_another_file]
ANEW = [records_exchanged, from_another_file, *AT_OPENING]  # with sections 5 and 4 made anew


def ids(functions: list) -> list[str]:
    return [function.__name__.replace("<lambda>", "renamed") for function in functions]


@contextlib.contextmanager
def ways(tmp_path: Path, data: bytes, signature: Optional[bytes] = None):
    """The ways to read `b`: whole, lazily, as a slice or many slices; from memory, a file, a mapping and over HTTP."""
    path = tmp_path / "m.tensors"
    path.write_bytes(data)
    if signature is not None:
        (tmp_path / "m.tensors.sig").write_bytes(signature)

    def lazy(source: Any, read: Callable[[TensorDeserializer], Any], **options: Any) -> Any:
        with TensorDeserializer(source, device="cpu", lazy_load=True, **options) as file:
            return read(file)

    with serve_folder(tmp_path) as address:
        url = f"{address}/m.tensors"
        found: list[tuple[str, Callable[..., Any]]] = []
        for place, source in (("file", path), ("http", url)):
            found += [
                (f"whole {place}", lambda s=source, **o: dict(TensorDeserializer(s, device="cpu", **o))["b"]),
                (f"lazy {place}", lambda s=source, **o: lazy(s, lambda f: f["b"], **o)),
                (f"slice {place}", lambda s=source, **o: lazy(s, lambda f: f.get_slice("b")[1:3], **o)),
                (f"slices {place}", lambda s=source, **o: lazy(s, lambda f: f.get_slices({"b": 2})["b"], **o)),
                (f"load_file {place}", lambda s=source, **o: tensorizer.load_file(s, **o)["b"]),
                (
                    f"fills {place}",
                    lambda s=source, **o: lazy(s, lambda f: f.get_slices({"b": ...}, {"b": torch.empty(6, 4)}), **o),
                ),
            ]
        yield found

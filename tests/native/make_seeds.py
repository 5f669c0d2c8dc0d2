"""Makes seeds for the fuzz targets of the file format from the golden files.

Usage: ``python make_seeds.py GOLDEN_FOLDER TARGET``; writes ``TARGET/<fuzz target>/<golden>``. Each target's source
says how its input is put together.
"""

from __future__ import annotations

import gzip
import struct
import sys
import zlib
from pathlib import Path

PROLOGUE_NBYTES = 73
LARGEST_SEED = 16 << 10  # small inputs mutate faster


def containers(golden: Path) -> dict[str, bytes]:
    """Files that begin with a container, by name."""
    found = {}
    for path in sorted(golden.glob("*.tensors.gz")):
        data = gzip.decompress(path.read_bytes())
        if data.startswith(b"|TZR|") and len(data) > PROLOGUE_NBYTES:
            found[path.name.removesuffix(".tensors.gz")] = data
    return found


def record_headers(data: bytes, begin: int) -> list[bytes]:
    """Record headers met by walking from ``begin``, as long as they make sense."""
    headers = []
    at = begin
    while at + 8 <= len(data):
        (nbytes,) = struct.unpack_from("<Q", data, at)
        if nbytes < 16 or at + nbytes > len(data):
            break
        headers.append(data[at : at + nbytes])
        (data_nbytes,) = struct.unpack_from("<q", data, at + nbytes - 8)
        if data_nbytes < 0:
            break
        at += nbytes + data_nbytes
    return headers


def seeds_of(data: bytes) -> dict[str, list[bytes]]:
    """Inputs for every target from one file."""
    version, flags = struct.unpack_from("<IB", data, 5)
    count, metadata_nbytes = struct.unpack_from("<QQ", data, 57)
    end = PROLOGUE_NBYTES + metadata_nbytes
    tagged = version >= 5 and bool(flags & 2)
    encrypted = version == 3 or (version >= 4 and bool(flags & 1))
    block = data[PROLOGUE_NBYTES:end].rstrip(b"\0") + bytes(8)
    index = struct.pack("<BHQ", tagged, min(count, 0xFFFF), len(data)) + block
    headers = record_headers(data, end)
    names = []
    for header in headers:
        (name_nbytes,) = struct.unpack_from("<H", header, 11)
        names.append(header[13 : 13 + name_nbytes])
        names.append(header[14 + name_nbytes : 14 + name_nbytes + header[13 + name_nbytes]])
    wide = [bytes([encrypted | 2]) + header for header in headers] if tagged else []
    return {
        "fuzz_prologue": [data[:PROLOGUE_NBYTES]],
        "fuzz_index": [index],
        "fuzz_record_header": [bytes([encrypted]) + header for header in headers] + wide,
        "fuzz_tensor_path": [b"\n".join(names)],
    }


def made() -> dict[str, list[bytes]]:
    """Inputs of what golden files do not have: safetensors headers, indexes of shards, annexes."""
    row = b'{"dtype":"%s","shape":[%s],"data_offsets":[%d,%d]}'
    headers = [
        b"{}",
        b'{"w":' + row % (b"F32", b"2", 0, 8) + b"}  ",
        b'{"__metadata__":{"b.w":"a.w","k\\u00e9":"\\"\\n"},"a.w":' + row % (b"F4", b"2,8", 0, 8) + b"}",
        b' {"s":' + row % (b"I64", b"", 0, 8) + b',"e":' + row % (b"BOOL", b"0,3", 0, 0) + b"}",
        b'{"x":'
        + row % (b"F9", b"5", 0, 3)
        + b',"y":{"later":[{"z":[1.5e3,null,true]}],'
        + row[1:] % (b"U8", b"1", 3, 4)
        + b"}",
        b'{"metadata":{"total_size":8,"a":"b"},"weight_map":{"a":"m.safetensors"}}',
    ]
    ends = [0, 8, 8, 8, 4, 0]
    safetensors = [struct.pack("<Q", 8 + len(h) + end) + h for h, end in zip(headers, ends)]

    def section(kind: int, flags: int, body: bytes) -> bytes:
        return struct.pack("<BBI", kind, flags, len(body)) + body

    both = section(1, 0, b'{"k":"v"}') + section(2, 0, b'{"b":"a"}')
    digest, records = section(4, 0, bytes(32)), section(5, 0, bytes(64))
    derivation = struct.pack("<QHHQQiH", 42, 1, 1, 2, 8192, 2, 16) + bytes(16)
    framed = b"TZRANNX1" + struct.pack("<I", len(both)) + both
    annexes = [
        b"\1",
        b"\1" + both + digest,
        b"\1" + section(3, 0, bytes(100)) + section(9, 0, b"x"),
        b"\1" + section(9, 1, b""),
        b"\1" + records + digest + section(6, 0, b"\1\0" + bytes(32)) + section(7, 0, bytes(192)),
        b"\1" + both + records + digest + section(6, 0, b"\1\1" + derivation + bytes(32)),
        b"\1" + records + digest + section(7, 0, bytes(96)),  # a detached signature, too
    ]
    annexes.append(b"\0" + framed + struct.pack("<I", zlib.crc32(framed)))
    return {"fuzz_safetensors": safetensors, "fuzz_annex": annexes}


def main(golden: Path, target: Path) -> None:
    seen = set()
    sources = {name: seeds_of(data) for name, data in containers(golden).items()}
    sources["made"] = made()
    for name, fuzzers in sources.items():
        for fuzzer, seeds in fuzzers.items():
            folder = target / fuzzer
            folder.mkdir(parents=True, exist_ok=True)
            for number, seed in enumerate(seeds):
                if len(seed) > LARGEST_SEED or (fuzzer, seed) in seen:
                    continue
                seen.add((fuzzer, seed))
                (folder / f"{name}-{number}").write_bytes(seed)
    print(f"{len(seen)} seeds in {target}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Makes seeds for the fuzz targets of the file format from the golden files.

Usage: ``python make_seeds.py GOLDEN_FOLDER TARGET``; writes ``TARGET/<fuzz target>/<golden>``. Each target's source
says how its input is put together.
"""

from __future__ import annotations

import gzip
import struct
import sys
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


def main(golden: Path, target: Path) -> None:
    seen = set()
    for name, data in containers(golden).items():
        for fuzzer, seeds in seeds_of(data).items():
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

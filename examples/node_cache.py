"""A cache on the node, filled by an init step, then used without the network.

    python examples/node_cache.py fill FOLDER URI...   # as an init container does: whole objects, synced to the disk
    python examples/node_cache.py load FOLDER URI...   # as the server does: no request is sent

docs/node-cache.md has the same for Kubernetes.
"""

from __future__ import annotations

import sys

from tensorizer import TensorDeserializer, cache
from tensorizer.stream_io import CacheOptions


def fill(folder: str, uris: list[str]) -> None:
    for entry in cache.add(*uris, cache=CacheOptions(folder, max_size="2TB")):
        print(f"{entry.location}: {entry.cached:,} bytes are on the disk")


def load(folder: str, uris: list[str]) -> None:
    options = {"cache": CacheOptions(folder, offline=True)}
    for uri in uris:
        with TensorDeserializer(uri, device="cpu", stream_options=options) as model_file:
            print(f"{len(model_file)} tensors, {model_file.cached_bytes_read:,} bytes from the cache")


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in ("fill", "load"):
        sys.exit(__doc__)
    (fill if sys.argv[1] == "fill" else load)(sys.argv[2], sys.argv[3:])

"""A cache on the node, filled by an init step, then used without the network.

    python examples/node_cache.py                      # offline: a small file behind a server on this machine
    python examples/node_cache.py fill FOLDER URI...   # as an init container does: whole objects, synced to the disk
    python examples/node_cache.py load FOLDER URI...   # as the server does: no request is sent

docs/node-cache.md has the same for Kubernetes.
"""

from __future__ import annotations

import functools
import http.server
import sys
import tempfile
import threading

import torch

from tensorizer import TensorDeserializer, TensorSerializer, cache
from tensorizer.stream_io import CacheOptions


def fill(folder: str, uris: list[str]) -> None:
    for entry in cache.add(*uris, cache=CacheOptions(folder, max_size="2TB", min_free="1GB")):
        print(f"{entry.location}: {entry.cached:,} bytes are on the disk")


def load(folder: str, uris: list[str]) -> None:
    options = {"cache": CacheOptions(folder, offline=True)}
    for uri in uris:
        with TensorDeserializer(uri, device="cpu", stream_options=options) as model_file:
            print(f"{len(model_file)} tensors, {model_file.cached_bytes_read:,} bytes from the cache")


def demonstrate() -> None:
    """Both steps, with a small file behind a server in this process."""
    with tempfile.TemporaryDirectory() as text:
        with TensorSerializer(f"{text}/public/model.tensors") as serializer:
            serializer.write_state_dict({"weight": torch.ones(500, 500), "bias": torch.zeros(500)})
        handler = functools.partial(FileWithTag, directory=f"{text}/public")
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            uri = f"http://127.0.0.1:{server.server_port}/model.tensors"
            fill(f"{text}/cache", [uri])
            server.shutdown()
        load(f"{text}/cache", [uri])  # the server is gone


class FileWithTag(http.server.SimpleHTTPRequestHandler):
    """Sends the version of its files, as stores do. Without one, nothing is cached."""

    def end_headers(self) -> None:
        self.send_header("ETag", '"1"')
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if len(sys.argv) == 1:
        demonstrate()
    elif len(sys.argv) < 4 or sys.argv[1] not in ("fill", "load"):
        sys.exit(__doc__)
    else:
        (fill if sys.argv[1] == "fill" else load)(sys.argv[2], sys.argv[3:])

"""Runs inside a virtual environment with a release of the reference: reads files that hold metadata and ties.

    python annex_worker.py read FOLDER          every *.tensors, in several ways
    python annex_worker.py modules FOLDER       module-*.tensors into a module whose weights are tied, or not
    python annex_worker.py redis FOLDER PORT    stores every *.tensors in Redis and reads it from there
    python annex_worker.py s3 FOLDER OPTIONS    reads the objects of the same names from s3://annexes

Prints JSON. A file whose name ends with ``.sealed.tensors`` is encrypted with ``KEY``, with
``.phrase.tensors`` with ``PASSPHRASE``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import reference_worker as worker
import torch

KEY = bytes(range(32))
PASSPHRASE = "open sesame"


def options(path: Path) -> dict:
    if not path.name.endswith((".sealed.tensors", ".phrase.tensors")):
        return {}
    from tensorizer import DecryptionParams

    if path.name.endswith(".phrase.tensors"):
        return {"encryption": DecryptionParams.from_string(PASSPHRASE)}
    return {"encryption": DecryptionParams.from_key(KEY)}


WAYS = {
    "eager": {"verify_hash": True},
    "one reader": {"lazy_load": True, "num_readers": 1},
    "three readers": {"lazy_load": True, "num_readers": 3, "verify_hash": True},
}


def rows(source: str, **how) -> object:
    from tensorizer import TensorDeserializer

    try:
        with TensorDeserializer(source, device="cpu", **how) as deserializer:
            if how.get("lazy_load"):
                return worker.describe(deserializer.read_tensors())
            return sorted(deserializer.keys())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def read(folder: Path) -> dict:
    paths = sorted(folder.glob("*.tensors"))
    return {p.name: {way: rows(str(p), **options(p), **how) for way, how in WAYS.items()} for p in paths}


def modules(folder: Path) -> dict:
    from tensorizer import TensorDeserializer

    found = {}
    for path in sorted(folder.glob("module-*.tensors")):
        for tied in (True, False):
            target = worker.Net()
            with torch.no_grad():
                for value in target.parameters():
                    value.zero_()
            if not tied:
                target.tied.weight = torch.nn.Parameter(torch.zeros(4, 4))
            with TensorDeserializer(str(path), device="cpu", **options(path)) as deserializer:
                count = deserializer.load_into_module(target)
            state = {name: worker.raw(value).hex() for name, value in target.state_dict().items()}
            found[f"{path.name} {'tied' if tied else 'untied'}"] = [count, state]
    return found


def through_redis(folder: Path, port: int) -> dict:
    import redis

    from tensorizer import TensorDeserializer

    found = {}
    client = redis.Redis(port=port)
    for path in sorted(folder.glob("*.tensors")):
        with TensorDeserializer(str(path), device="cpu", lazy_load=True, **options(path)) as deserializer:
            deserializer.to_redis(client, path.name)
        source = f"redis://127.0.0.1:{port}/{path.name}"
        found[path.name] = rows(source, lazy_load=True, verify_hash=True, **options(path))
    return found


def from_s3(folder: Path, arguments: dict) -> dict:
    from tensorizer.stream_io import open_stream

    found = {}
    for path in sorted(folder.glob("*.tensors")):
        stream = open_stream(f"s3://annexes/{path.name}", "rb", **arguments)
        found[path.name] = rows(stream, lazy_load=True, verify_hash=True, **options(path))
    return found


if __name__ == "__main__":
    action, folder, *more = sys.argv[1:]
    if action == "redis":
        print(json.dumps(through_redis(Path(folder), int(more[0]))))
    elif action == "s3":
        print(json.dumps(from_s3(Path(folder), json.loads(more[0]))))
    else:
        print(json.dumps({"read": read, "modules": modules}[action](Path(folder))))

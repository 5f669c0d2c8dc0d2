"""Files with metadata and ties in the hands of installed releases of the reference: they read all that is listed."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

import annex_worker
import pytest
import reference_format as fmt
import reference_worker as worker
import samples
import torch
from conftest import REFERENCE_RELEASES
from servers import needs
from servers.redis_server import RedisServer, redis_is_installed
from servers.s3_server import S3Server, s3_is_installed

from tensorizer import DecryptionParams, EncryptionParams, SigningKey, TensorDeserializer

pytestmark = [pytest.mark.network, pytest.mark.slow]

METADATA = {  # around the sizes at which an index grows, and far beyond
    "none": {},
    "one": {"format": "pt"},
    "4-KiB": {"k": "v" * 4000},
    "256-KiB": {"k": "é" * 131_000},
    "2-MiB": {f"key {i}": "v" * 100 for i in range(18_000)},
}


def contents() -> dict:
    shared = worker.make("shared", "float32", (40,))
    plain = {"a": shared, "b": shared, "c": worker.make("c", "uint8", (7,))}
    return {
        "1": plain,
        "2": {**plain, "half": worker.make("half", "bfloat16", (9,))},
        "4": {**plain, "meta": torch.empty((3,), device="meta")},
        "5": {**plain, "long": torch.empty((1 << 32, 0), dtype=torch.int8)},
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("annexes")
    key = EncryptionParams(annex_worker.KEY)
    for ties in ("twice", "once"):
        for version, content in contents().items():
            for size, metadata in METADATA.items():
                if size in ("none", "one") or version == "1":
                    path = folder / f"v{version}-{ties}-{size}.tensors"
                    samples.write_state_dict(path, content, ties=ties, metadata=metadata)
        samples.write_module(
            folder / f"module-{ties}.tensors", worker.Net(), options={"ties": ties, "metadata": {"a": "b"}}
        )
        samples.write_state_dict(
            folder / f"v3-{ties}.sealed.tensors", contents()["1"], ties=ties, metadata={"k": "v"}, encryption=key
        )
        samples.write_state_dict(
            folder / f"v4-{ties}.sealed.tensors", contents()["4"], ties=ties, metadata={"k": "v"}, encryption=key
        )
        signed = {"ties": ties, "metadata": {"k": "v"}, "signing_key": SigningKey.from_bytes(annex_worker.KEY)}
        samples.write_state_dict(folder / f"v1-{ties}-signed.tensors", contents()["1"], **signed)
        samples.write_state_dict(folder / f"v3-{ties}-signed.sealed.tensors", contents()["1"], encryption=key, **signed)
        phrase = EncryptionParams.from_string(annex_worker.PASSPHRASE, 1, 8192)
        samples.write_state_dict(folder / f"v3-{ties}.phrase.tensors", contents()["1"], ties=ties, encryption=phrase)
    for path in folder.iterdir():
        assert fmt.read_file(path.read_bytes()).annex, path.name  # ties, metadata, or both
    return folder


def key_of(path: Path):
    if ".phrase." in path.name:
        return DecryptionParams.from_string(annex_worker.PASSPHRASE)
    return DecryptionParams.from_key(annex_worker.KEY) if ".sealed." in path.name else None


@functools.cache  # every release has to find the same
def listed(path: Path) -> list:
    """What each record of a file holds: what an earlier release has to find."""
    found = []
    key = key_of(path)
    file = fmt.read_file(path.read_bytes())
    with TensorDeserializer(path, device="cpu", encryption=key) as ours:
        for record in file.records:
            value = ours[record.path[0]]
            found.append((record.header.module_idx, record.header.kind, record.path[0], value))
    return worker.describe(found)


def run(python: Path, *arguments: str):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [str(python), "-I", annex_worker.__file__, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def readable(folder: Path, release: str) -> list:
    """Data version 5 came with 2.12."""
    return [path for path in sorted(folder.glob("*.tensors")) if release >= "2.12" or "v5" not in path.name]


releases = pytest.mark.parametrize(
    "release", [pytest.param(r, marks=pytest.mark.xdist_group(f"annex {r}")) for r in REFERENCE_RELEASES]
)


@releases
def test_a_release_reads_every_listed_tensor_verified(release, reference_python, written):
    found = run(reference_python(release), "read", str(written))
    for path in readable(written, release):
        wanted = listed(path)
        assert found[path.name]["eager"] == sorted(row[2][0] for row in wanted), path.name
        for way in ("one reader", "three readers"):
            assert found[path.name][way] == wanted, (path.name, way)


@releases
def test_modules_that_a_release_loads_are_whole_from_twice_and_from_once_where_they_are_tied_before(
    release, reference_python, written
):
    model = worker.Net()
    right = {name: worker.raw(value).hex() for name, value in model.state_dict().items()}
    found = run(reference_python(release), "modules", str(written))
    count = len(samples.module_names(model))
    for tied in ("tied", "untied"):
        loaded, state = found[f"module-twice.tensors {tied}"]
        assert (loaded, {name: state[name] for name in right}) == (count, right)
    loaded, state = found["module-once.tensors untied"]
    assert loaded == count - 1
    assert {name for name in right if state[name] != right[name]} == {"tied.weight"}  # left as it was


@releases
@pytest.mark.skipif(not redis_is_installed(), reason=needs("Redis"))
def test_a_release_stores_them_in_redis_and_the_annex_survives(release, reference_python, written):
    with RedisServer() as server:
        found = run(reference_python(release), "redis", str(readable_only(written, release)), str(server.port))
        for path in (path for path in readable(written, release) if path.name in found):
            assert found[path.name] == listed(path), path.name
            key = key_of(path)
            source = f"redis://127.0.0.1:{server.port}/{path.name}"
            with (
                TensorDeserializer(source, device="cpu", encryption=key) as ours,
                TensorDeserializer(path, device="cpu", encryption=key) as direct,
            ):
                assert (ours.ties, ours.metadata) == (direct.ties, direct.metadata)
                assert (ours.authenticated, ours.index_digest) == (direct.authenticated, direct.index_digest)
                assert (ours.authenticated is None) == (key is None)
            if "signed" in path.name:  # it was copied with the head of the file
                signer = SigningKey.from_bytes(annex_worker.KEY).public_key
                with TensorDeserializer(source, device="cpu", encryption=key, public_key=signer) as ours:
                    assert ours.authenticated == ("signature" if key is None else "both")


@pytest.mark.skipif(not s3_is_installed(), reason=needs("OpenStack Swift"))
def test_releases_read_authenticated_files_from_s3(reference_python, written, tmp_path):
    with S3Server() as store:
        client = store.client()
        client.create_bucket(Bucket="annexes")
        for path in written.glob("v[13]-*.tensors"):
            if any(kind in path.name for kind in ("signed", ".sealed.", ".phrase.")):
                (tmp_path / path.name).symlink_to(path)
                client.put_object(Bucket="annexes", Key=path.name, Body=path.read_bytes())
        paths = sorted(tmp_path.glob("*.tensors"))
        assert len(paths) == 8
        for release in REFERENCE_RELEASES:
            found = run(reference_python(release), "s3", str(tmp_path), json.dumps(store.arguments))
            for path in paths:
                assert found[path.name] == listed(path), (release, path.name)
        for path in paths:
            signed = {"public_key": SigningKey.from_bytes(annex_worker.KEY).public_key} if "signed" in path.name else {}
            with TensorDeserializer(
                f"s3://annexes/{path.name}",
                device="cpu",
                encryption=key_of(path),
                require_authenticated=True,
                stream_options=store.arguments,
                **signed,
            ) as ours:
                assert ours.authenticated is not None


def readable_only(written: Path, release: str) -> Path:
    """A folder with the files that a release can read."""
    folder = written / f"for {release}"
    folder.mkdir(exist_ok=True)
    for path in readable(written, release):
        if "MiB" not in path.name and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    return folder

"""Everything that a wheel promises, once: run with the Python that it is installed for.

    smoke.py --folder DIR [--inside DIR] [--http URL] [--https URL --authority PEM] [--redis URL] [--rediss URL]
             [--s3 ENDPOINT --s3-bucket NAME --s3-key NAME --s3-secret TEXT]

The addresses hold the file that this script writes first; S3 receives it. Prints one line for what works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch

import tensorizer._C
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, stream_io
from tensorizer.stream_io import CAInfo, HTTPOptions


def make_model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"embedding": (5000, 128), "small": (3,), "scalar": (), "empty": (0, 4)}
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    model["half"] = torch.randn((300, 41), generator=generator).to(torch.bfloat16)
    model["whole"] = torch.arange(1001)
    return model


def require_equal(found: object, wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def save(target: object, model: dict[str, torch.Tensor], **options: object) -> None:
    with TensorSerializer(target, **options) as serializer:
        serializer.write_state_dict(model)


def load(source: object, model: dict[str, torch.Tensor], **options: object) -> None:
    with TensorDeserializer(source, device="cpu", verify_hash=True, **options) as tensors:
        require_equal(tensors, model)


def check_encryption(folder: Path, model: dict[str, torch.Tensor]) -> None:
    path = folder / "encrypted.tensors"
    save(str(path), model, encryption=EncryptionParams.random())
    from_text = EncryptionParams.from_string(
        "a passphrase", EncryptionParams.OpsLimit.MIN, EncryptionParams.MemLimit.MIN
    )
    save(str(path), model, encryption=from_text)
    load(str(path), model, encryption=DecryptionParams.from_string("a passphrase"))


def check_damage(folder: Path, model: dict[str, torch.Tensor]) -> None:
    path = folder / "damaged.tensors"
    save(str(path), model)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    try:
        load(str(path), model)
    except tensorizer.errors.TensorizerError:
        return
    raise AssertionError("damage was not seen")


def check_versions() -> None:
    """A wheel's list of components is what its module runs with."""
    files = importlib.metadata.files("tensorizer") or []
    lists = [file for file in files if file.match("*.dist-info/sboms/*.cdx.json")]
    for file in lists:
        components = json.loads(file.read_text())["components"]
        listed = {component["name"]: component["version"] for component in components}
        found = tensorizer._C.library_versions()
        assert found == {name: listed[name] for name in found}, (found, listed)
        print("libraries", *(f"{name} {version}" for name, version in found.items()))


def check_kernels() -> None:
    """What the processor can do is found out: a build that sees nothing is right and slow."""
    found = tensorizer._C.available_kernels()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    wanted = {"avx2": {"avx2"}, "avx512": {"avx2", "avx512f"}, "avx512ifma": {"avx2", "avx512f", "avx512ifma"}}
    missing = [name for name, needed in wanted.items() if needed <= flags and name not in found]
    assert not missing, f"the processor could run {missing}: found {found}"
    print("cipher", *found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--inside", type=Path, help="the folder that the module must have been imported from")
    for name in ("http", "https", "authority", "redis", "rediss", "s3", "s3-bucket", "s3-key", "s3-secret"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    module = Path(tensorizer._C.__file__)
    assert options.inside is None or options.inside in module.parents, f"imported from {module}"
    version = importlib.metadata.version("tensorizer")
    print(f"tensorizer {version}, Python {sys.version.split()[0]}, torch {torch.__version__}")
    check_versions()
    check_kernels()
    model = make_model()
    plain = options.folder / "model.tensors"
    save(str(plain), model)
    load(str(plain), model)
    print("save, load, checksums")
    check_damage(options.folder, model)
    check_encryption(options.folder, model)
    print("encryption, damage")
    settings = HTTPOptions(proxy="")
    if options.http:
        load(stream_io.open_stream(options.http, http_options=settings), model)
        print("http")
    if options.https:
        trust = CAInfo(cacert=options.authority)
        load(stream_io.open_stream(options.https, certificate_handling=trust, http_options=settings), model)
        print("https")
    if options.redis:
        load(options.redis, model)
        print("redis")
    if options.rediss:
        load(stream_io.open_stream(options.rediss, certificate_handling=CAInfo(cacert=options.authority)), model)
        print("rediss")
    if options.s3:
        credentials: dict[str, Any] = {
            "force_http": True,
            "s3_access_key_id": options.s3_key,
            "s3_secret_access_key": options.s3_secret,
        }
        credentials["s3_endpoint"] = options.s3
        uri = f"s3://{options.s3_bucket}/model.tensors"
        with stream_io.open_stream(uri, "wb", **credentials) as target:
            save(target, model)
        load(stream_io.open_stream(uri, "rb", **credentials), model)
        print("s3")


if __name__ == "__main__":
    main()

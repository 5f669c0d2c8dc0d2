"""What every wheel must do on the machine that it is installed on: run with the Python that has it.

    smoke.py [FOLDER_OF_THE_MODULE]

Prints one line for what works. It lies in a checkout, whose tests bring the HTTP server. More servers and certificates
are for the tests (noxfile.py, bare.sh).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch

import tensorizer._C
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.cli.main import main as tensorizer_command

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from servers.file_server import serve_folder


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


def check_http(folder: Path, model: dict[str, torch.Tensor]) -> None:
    save(str(folder / "served.tensors"), model)
    with serve_folder(folder) as address:
        load(f"{address}/served.tensors", model)


def run_command(*arguments: object) -> str:
    """What ``tensorizer`` with these arguments prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = tensorizer_command([str(argument) for argument in arguments])
    assert status == 0, (arguments, status, printed.getvalue())
    return printed.getvalue()


def check_commands(folder: Path, model: dict[str, torch.Tensor]) -> None:
    plain, closed, key = folder / "plain.tensors", folder / "closed.tensors", folder / "key"
    save(str(plain), model)
    listed = run_command("inspect", plain)
    assert all(name in listed for name in model), listed
    run_command("verify", plain)
    run_command("encrypt", "--generate-key", key, plain, closed)
    run_command("decrypt", "--key-file", key, closed, folder / "opened.tensors")
    load(str(folder / "opened.tensors"), model)


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
    if platform.machine() == "aarch64":  # all have it; below qemu-user the file is that of another processor
        wanted = {"neon": set()}
    missing = [name for name, needed in wanted.items() if needed <= flags and name not in found]
    assert not missing, f"the processor could run {missing}: found {found}"
    print("cipher", *found)


def main() -> None:
    inside, module = Path(*sys.argv[1:2]), Path(tensorizer._C.__file__)
    assert not sys.argv[1:] or inside.resolve() in module.parents, f"imported from {module}"
    version = importlib.metadata.version("tensorizer")
    print(f"tensorizer {version}, Python {sys.version.split()[0]}, torch {torch.__version__}, {platform.machine()}")
    check_versions()
    check_kernels()
    model = make_model()
    with tempfile.TemporaryDirectory() as text:
        plain = str(Path(text) / "model.tensors")
        save(plain, model)
        load(plain, model)
        print("save, load, checksums")
        check_damage(Path(text), model)
        check_encryption(Path(text), model)
        print("encryption, damage")
        check_http(Path(text), model)
        check_commands(Path(text), model)
        print("HTTP; tensorizer inspect, verify, encrypt, decrypt")


if __name__ == "__main__":
    main()

"""What it costs that files are authenticated: ``python -m benchmarks.authenticity [--tensors N…] [--json PATH]``.

Each row is one file with and without: an encrypted file of this release beside the same one as earlier releases wrote
it (made by the oracle of the tests), and a file in clear with its signature checked beside the same one unchecked.
Times are the least of several rounds, of wall clock and of processor time (which a busy machine disturbs less); the two
of a row take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tensorizer import DecryptionParams, EncryptionParams, SigningKey, TensorDeserializer, TensorSerializer

K = bytes(range(32))
OPEN = DecryptionParams.from_key(K)
SIGNER = SigningKey.from_bytes(K)


def content(tensors: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.full((nbytes // 4,), float(i)) for i in range(tensors)}


def write(path: Path, state: dict[str, torch.Tensor], **options: Any) -> None:
    with TensorSerializer(path, fsync=False, **options) as serializer:
        serializer.write_state_dict(state)


def least(with_it: Callable[[], Any], without: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Least seconds, with and without, by wall clock and by processor time."""
    found: dict[str, list[list[float]]] = {"wall": [[], []], "cpu": [[], []]}
    for _ in range(rounds):
        for side, run in enumerate((with_it, without)):
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            found["cpu"][side].append(time.process_time() - cpu)
            found["wall"][side].append(time.perf_counter() - wall)
    return {clock: [min(sides[0]), min(sides[1])] for clock, sides in found.items()}


def opened(path: Path, read: Callable[[TensorDeserializer], Any], **options: Any) -> None:
    with TensorDeserializer(path, device="cpu", lazy_load=True, **options) as file:
        read(file)


def measure(folder: Path, tensors: int, nbytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
    import reference_auth

    state = content(tensors, nbytes)
    encrypted, before, signed = (folder / name for name in ("encrypted", "before", "signed"))
    write(encrypted, state, encryption=EncryptionParams(K))
    before.write_bytes(reference_auth.as_before(encrypted.read_bytes(), K))
    write(signed, state, signing_key=SIGNER)
    name = f"layers.{tensors // 2}.weight"
    reads: dict[str, Callable[[TensorDeserializer], Any]] = {
        "open": lambda file: None,
        "open, one tensor": lambda file: file[name],
        "open, all tensors": lambda file: file._open_file.load(file._open_file.selection),
    }
    results = {}
    key = SIGNER.public_key
    for what, read in reads.items():
        results[f"encrypted: {what}"] = least(
            lambda read=read: opened(encrypted, read, encryption=OPEN),  # type: ignore[misc]
            lambda read=read: opened(before, read, encryption=OPEN),  # type: ignore[misc]
            rounds,
        )
        results[f"signed: {what}"] = least(
            lambda read=read: opened(signed, read, public_key=key),  # type: ignore[misc]
            lambda read=read, verify=what != "open": opened(signed, read, verify_hash=verify),  # type: ignore[misc]
            rounds,
        )
    results["save, in clear: signed"] = least(
        lambda: write(folder / "a", state, signing_key=SIGNER), lambda: write(folder / "a", state), rounds
    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[1000, 10_000, 100_000], help="of 1 KiB each")
    parser.add_argument("--large", type=int, default=64, help="and so many of 4 MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = {}
    for tensors, nbytes in (*((n, 1024) for n in arguments.tensors), (arguments.large, 4 << 20)):
        if tensors == 0:
            continue
        with tempfile.TemporaryDirectory() as folder:
            results = measure(Path(folder), tensors, nbytes, arguments.rounds)
        print(f"\n{tensors:,} tensors of {nbytes:,} bytes: ms with, without, and their ratio; wall clock, processor")
        for what, clocks in results.items():
            columns = [f"{a * 1e3:9.2f} {b * 1e3:9.2f} {a / b:6.3f}" for a, b in (clocks["wall"], clocks["cpu"])]
            print(f"  {what:32} {'   '.join(columns)}", flush=True)
        report[f"{tensors}x{nbytes}"] = results
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

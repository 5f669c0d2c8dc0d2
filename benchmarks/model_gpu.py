"""Loads to and saves from a modelled GPU: how much of its link they fill, on a machine that has none.

``python -m benchmarks.model_gpu`` runs each case in a process of its own, over the fake driver of the tests with a
model of a link, of allocation and of pinning (``tests/native/fake_cuda/link.h``). The figures say whether the schedule
hides costs of the stated size; they are no speed of any device. A case is measured against the time that its bytes take
on the modelled link, the network against the same load to the CPU.

``--package FOLDER`` measures another build beside this one, in turn: the folder that holds its ``tensorizer``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
#: What allocation and pinning cost, so that their share is that of a real device (docs/gpu.md).
COSTS = "alloc_us=3000,pin_us_per_mib=1200"
KEY = bytes(range(32))
#: Of the network: latency, and the rate of a connection.
LATENCY_MS, CONNECTION_RATE, FAST_CONNECTION_RATE = 20, 20_000_000, 1_000_000_000


@dataclass(frozen=True)
class Case:
    """One row: its model, its file, and what must be reached, as a share of its bound."""

    name: str
    model: str
    required: float
    kind: str = "load"  # load, save, http, http_cpu (its processor time), beside (a small load meanwhile)
    hashes: tuple[str, ...] = ()
    encrypted: bool = False
    shapes: str = "large"
    options: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    devices: str = "one"  # one, in_turn, halves, files
    fresh: bool = False  # the first load of a process
    network: Optional[tuple[int, int]] = None  # slots, rate of a connection


_LINK = "gbps={gbps},discard=1,{costs}"
# Kernels have to work when they are tested. Later, what they would compute on the host is left out.
_KERNELS = "gbps={gbps},{costs},kernel_gbps={kernel_gbps},launch_us=20"
CASES = (
    Case("plain", _LINK, 0.95),
    Case("first-load", _LINK, 0.80, fresh=True),
    Case("verified-crc32", _LINK, 0.92, hashes=("crc32",), options=(("verify_hash", True),)),
    Case("verified-sha256", "gbps=8,discard=1", 0, hashes=("sha256",), options=(("verify_hash", True),)),
    Case("encrypted-host", _LINK, 0.92, encrypted=True, environment=(("TENSORIZER_CUDA_DECRYPT", "0"),)),
    Case("encrypted-device", _KERNELS, 0.95, encrypted=True, environment=(("TENSORIZER_CUDA_DECRYPT", "1"),)),
    Case("network-16-slots", _LINK, 0.90, kind="http", network=(16, CONNECTION_RATE)),
    Case("network-4-slots", _LINK, 0.90, kind="http", network=(4, CONNECTION_RATE)),
    Case("network-processor", "gbps={gbps},discard=1", 1 / 1.3, kind="http_cpu", network=(16, FAST_CONNECTION_RATE)),
    Case("two-devices-in-turn", _LINK, 1.9, devices="in_turn"),
    Case("two-devices-halves", _LINK, 1.9, devices="halves"),
    Case("two-devices-two-files", _LINK, 1.9, devices="files"),
    Case("small", "gbps={gbps},discard=1,call_us=3", 0.90, shapes="small"),
    Case("load-beside-a-load", "gbps={gbps},discard=1", 1 / 3, kind="beside"),
    Case("save", "gbps={gbps},discard=1,{costs}", 0.90, kind="save"),
)
BY_NAME = {case.name: case for case in CASES}
CI_CASES = ("plain", "encrypted-host", "encrypted-device", "network-16-slots", "network-4-slots", "two-devices-in-turn")


# ---- in a process of its own: one case ------------------------------------------------------------------------------


def _load_accelerators() -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import accelerators

    return accelerators


def _file(case: Case, nbytes: int, folder: Path, part: str = "") -> Path:
    """The file of a case, made once per folder."""
    import torch

    from tensorizer import EncryptionParams, TensorSerializer

    kind = f"{case.shapes}-{'-'.join(case.hashes) or 'bare'}{'-encrypted' if case.encrypted else ''}{part}"
    path = folder / f"{kind}-{nbytes}.tensors"
    if path.exists():
        return path
    each = (28 if case.shapes == "large" else 0.25) * MIB
    encryption = EncryptionParams(KEY) if case.encrypted else None
    serializer = TensorSerializer(path, encryption=encryption, hashes=case.hashes)
    large = torch.rand(int(each) // 4)
    for i in range(max(1, int(nbytes / each))):
        serializer.write_tensor(0, f"t{i:05}", 2, large)
        if case.shapes == "large":
            for j in range(9):
                serializer.write_tensor(0, f"t{i:05}.small{j}", 2, large[:2048])
    serializer.close()
    return path


def _load(case: Case, path: Any, device: Any) -> Any:

    from tensorizer import DecryptionParams, TensorDeserializer

    options = dict(case.options)
    if case.encrypted:
        options["encryption"] = DecryptionParams.from_key(KEY)
    return TensorDeserializer(path, device=device, **options)


def _device_of(case: Case, count: int) -> Any:
    """Where the tensors of a case go."""
    import torch

    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    if case.devices == "in_turn":
        return lambda name: devices[int(name[1:6]) % 2]
    if case.devices == "halves":
        return lambda name: devices[int(name[1:6]) * 2 >= count]
    return devices[0]


def run_case(case: Case, nbytes: int, runs: int, folder: Path, url: Optional[str]) -> dict[str, Any]:
    """The seconds of each run, after one warm load unless the case is of the first."""
    import torch

    accelerators = _load_accelerators()
    driver = accelerators.fake_driver()
    gpu = accelerators.FakeDevice(driver)
    gpu.install(_Setter())
    path = _file(case, nbytes, folder)
    stored = path.stat().st_size
    count = max(1, nbytes // (28 * MIB))
    on_device: Callable[[], Any]
    if case.kind == "save":
        state = {f"t{i:05}": gpu.put(torch.rand(7 * MIB)) for i in range(count)}
        on_device = functools.partial(_save, state)
    elif case.kind in ("http", "http_cpu"):
        on_device = functools.partial(_load, case, f"{url}/{path.name}", "cuda:0")
    elif case.devices == "files":
        path = _sharded(folder, count)
        on_device = functools.partial(_load, case, path, _device_of(BY_NAME["two-devices-halves"], count))
    else:
        on_device = functools.partial(_load, case, path, _device_of(case, count))
    if not case.fresh:
        on_device()
    if case.model == _KERNELS:
        driver.model(f"{os.environ['FAKE_CUDA_MODEL']},discard=1".encode())
    found: dict[str, Any] = {"seconds": [], "cpu": [], "reports": [], "bytes": stored, "host": [], "host_cpu": []}
    if case.kind == "beside":
        return {**found, **_beside(case, on_device, _file(case, 64 * MIB, folder), runs)}
    for _ in range(runs):
        driver.report()
        began, cpu = time.perf_counter(), time.process_time()
        result = on_device()
        found["seconds"].append(time.perf_counter() - began)
        found["cpu"].append(time.process_time() - cpu)
        found["reports"].append(json.loads(driver.report()))
        del result
        if case.kind in ("http", "http_cpu"):
            began, cpu = time.perf_counter(), time.process_time()
            result = _load(case, f"{url}/{path.name}", "cpu")
            found["host"].append(time.perf_counter() - began)
            found["host_cpu"].append(time.process_time() - cpu)
            del result
    return found


def _beside(case: Case, on_device: Callable[[], Any], path: Path, runs: int) -> dict[str, list[float]]:
    """The seconds of a small load while large ones run one after the other; as ``host`` those of it without them."""

    def small() -> float:
        began = time.perf_counter()
        _load(case, path, "cuda:0")
        return time.perf_counter() - began

    def large() -> None:
        while not over.is_set():
            on_device()

    alone = [small() for _ in range(runs)]
    over = threading.Event()
    thread = threading.Thread(target=large)
    thread.start()
    try:
        time.sleep(0.2)
        seconds = [small() for _ in range(runs)]
    finally:
        over.set()
        thread.join()
    return {"seconds": seconds, "host": alone, "cpu": [0.0]}


def _save(state: dict[str, Any]) -> Any:
    """The file, which is gone with what is returned: removing it takes time too."""
    from tensorizer import TensorSerializer

    file = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115
    serializer = TensorSerializer(file.name, hashes=())
    serializer.write_state_dict(state)
    serializer.close()
    return file


def _sharded(folder: Path, count: int) -> Path:
    """The index of a model in two files."""
    import torch

    from tensorizer import TensorSerializer

    index = folder / f"sharded-{count}" / "model.tensors.index.json"
    if index.exists():
        return index
    index.parent.mkdir()
    large = torch.rand(7 * MIB)
    names: dict[str, str] = {}
    for shard in range(2):
        file = f"model-{shard + 1:05}-of-00002.tensors"
        serializer = TensorSerializer(index.parent / file, hashes=())
        for i in range(count):
            if (i * 2 >= count) == bool(shard):
                serializer.write_tensor(0, f"t{i:05}", 2, large)
                names[f"t{i:05}"] = file
        serializer.close()
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


class _Setter:
    setattr = staticmethod(setattr)


# ---- all cases ------------------------------------------------------------------------------------------------------


def bound_of(case: Case, found: dict[str, Any], settings: argparse.Namespace) -> float:
    """The seconds that the bytes of one run take on one modelled link."""
    gbps = 8.0 if case.name == "verified-sha256" else settings.gbps
    return float(found["bytes"]) / (gbps * 1e9)


def share_of(case: Case, found: dict[str, Any], settings: argparse.Namespace) -> float:
    """Of the link, or of the rate (the processor time) of the same load to the CPU, or of that without the other."""
    which, beside = ("cpu", "host_cpu") if case.kind == "http_cpu" else ("seconds", "host")
    seconds: float = statistics.median(found[which])
    if case.kind != "load" and found[beside]:
        return float(statistics.median(found[beside])) / seconds
    return bound_of(case, found, settings) / seconds


def measure(
    case: Case, package: Path, settings: argparse.Namespace, folder: Path, url: Optional[str]
) -> dict[str, Any]:
    """One process."""
    model = case.model.format(gbps=settings.gbps, kernel_gbps=5 * settings.gbps, costs=settings.costs)
    environment = {
        **os.environ,
        **dict(case.environment),
        "FAKE_CUDA_MODEL": model,
        "FAKE_CUDA_DELAY_US": "0:0",
        "PYTHONPATH": f"{package}{os.pathsep}{ROOT}",
    }
    runs = 1 if case.fresh else settings.runs
    command = [sys.executable, "-P", str(Path(__file__)), "--one", case.name, "--size", str(settings.size)]
    command += ["--runs", str(runs), "--folder", str(folder), *(["--url", url] if url else [])]
    if sys.version_info < (3, 11):
        command.remove("-P")
    parts: list[dict[str, Any]] = []
    for _ in range(settings.runs if case.fresh else 1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{case.name}: {done.stderr[-2000:]}")
        parts.append(json.loads(done.stdout.splitlines()[-1]))
    joined = parts[0]
    for part in parts[1:]:
        for key in ("seconds", "cpu", "reports", "host", "host_cpu"):
            joined[key] += part[key]
    return joined


def _store(folder: Path, rate: int) -> subprocess.Popen[str]:
    from benchmarks.environments import compiled

    program = compiled("servers/object_store", folder)
    return subprocess.Popen(
        [str(program), str(folder), str(LATENCY_MS), str(rate)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES], choices=[*BY_NAME, "ci"])
    parser.add_argument("--size", type=int, default=1_000_000_000, help="bytes of a file")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gbps", type=float, default=2.0, help="of a link; a fifth of what the processors copy")
    parser.add_argument("--costs", default=COSTS, help="of allocation and pinning, as FAKE_CUDA_MODEL has them")
    parser.add_argument("--package", type=Path, default=None, help="another build to measure in turn")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/tensorizer-model-gpu"))
    parser.add_argument("--require", action="store_true", help="fail where a share is more than 5 points too low")
    parser.add_argument("--url", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    settings.folder.mkdir(parents=True, exist_ok=True)
    if settings.one:
        case = BY_NAME[settings.one]
        if case.network:
            from tensorizer.cuda import set_pinned_memory

            set_pinned_memory(slots=case.network[0])
        print(json.dumps(run_case(case, settings.size, settings.runs, settings.folder, settings.url)))
        return 0
    names = CI_CASES if settings.cases == ["ci"] else settings.cases
    packages = [ROOT] if settings.package is None else [settings.package, ROOT]
    too_low = []
    print(f"{'case':24}{'required':>9}" + "".join(f"{word:>18}" for word in ("before", "now")[-len(packages) :]))
    for name in names:
        case = BY_NAME[name]
        store = _store(settings.folder, case.network[1]) if case.network else None
        url = f"http://127.0.0.1:{store.stdout.readline().strip()}" if store and store.stdout else None
        line = f"{case.name:24}{case.required:9.0%}"
        try:
            for package in packages:
                found = measure(case, package, settings, settings.folder, url)
                share = share_of(case, found, settings)
                cpu = statistics.median(found["cpu"])
                line += f"{share:9.1%} {cpu:5.2f}s CPU"
                if case.fresh:
                    line += f" ({found['reports'][0]['pinned_at_first_copy'] >> 20} MiB pinned)"
            if share < case.required - 0.05:
                too_low.append(case.name)
        finally:
            if store and store.stdin:
                store.stdin.close()
                store.wait()
        print(line, flush=True)
    if too_low:
        print("too low: " + ", ".join(too_low))
    return 1 if settings.require and too_low else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the cache of the node costs and brings: ``python -m benchmarks.node_cache [--nbytes 1GB] [--folder DIR]``.

nginx on loopback serves a file. Every load is a process of its own, which times the constructor of TensorDeserializer;
ways that are compared take turns, and medians are shown. Needs nginx.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import torch

from benchmarks.report import machine
from tensorizer import _C, TensorSerializer
from tensorizer._system.sizes import parse_size

_LOAD = """
import json, sys, time
from tensorizer import TensorDeserializer
from tensorizer.stream_io import HTTPOptions
uri, cache, connections = json.loads(sys.argv[1])
options = {"http_options": HTTPOptions(connections=connections), "cache": cache or False}
remote = {"stream_options": options} if "://" in uri else {}
begin = time.perf_counter()
file = TensorDeserializer(uri, device="cpu", **remote)
seconds = time.perf_counter() - begin
print(json.dumps([seconds, file.cached_bytes_read]))
"""


class Bench:
    def __init__(self, folder: Path, nbytes: int, repeats: int) -> None:
        self.folder, self.repeats = folder, repeats
        (folder / "root").mkdir()
        self.path = folder / "root" / "model.tensors"
        with TensorSerializer(str(self.path)) as serializer:
            serializer.write_state_dict({f"t{i}": torch.randn(nbytes // 64) for i in range(16)})
        old = time.time() - 3600
        os.utime(self.path, (old, old))
        self.nbytes = self.path.stat().st_size
        self.cache = folder / "cache"
        self.preload = ""

    @contextlib.contextmanager
    def server(self, lines: str = "") -> Iterator[str]:
        from tests.servers.nginx import nginx

        work = self.folder / "nginx"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        with nginx(work, self.folder / "root", server_lines=lines) as url:
            yield f"{url}/model.tensors"

    def sent(self) -> int:
        """Bytes of bodies that the server has sent."""
        time.sleep(0.1)
        return sum(int(n) for n in re.findall(r'HTTP/1\.1" 20\d (\d+)', (self.folder / "nginx/access.log").read_text()))

    def start(self, uri: str, cache: Optional[Path], connections: int = 8) -> subprocess.Popen[str]:
        argument = json.dumps([uri, None if cache is None else str(cache), connections])
        environment = {**os.environ, "TENSORIZER_CACHE_MIN_FREE": "0", "no_proxy": "127.0.0.1"}
        environment["LD_PRELOAD"] = self.preload
        command = [sys.executable, "-c", _LOAD, argument]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def load(self, uri: str, cache: Optional[Path], connections: int = 8) -> float:
        out, _ = self.start(uri, cache, connections).communicate()
        return float(json.loads(out)[0])

    def clear(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)
        os.sync()

    def first_load(self, what: str, lines: str, preload: str = "") -> None:
        """With and without a cache, in turns; `preload` is loaded into the processes before all else."""
        self.preload = preload
        without, kept = [], []
        with self.server(lines) as uri:
            self.load(uri, None)
            for _ in range(self.repeats):
                without.append(self.load(uri, None))
                self.clear()
                kept.append(self.load(uri, self.cache))
            stored = sum(entry.disk_nbytes for entry in _C.CacheFolder(str(self.cache), False).scan())
        share = stored / self.nbytes
        a, b = statistics.median(without), statistics.median(kept)
        show(f"first load, {what}", f"{a:.2f} s without, {b:.2f} s with: {b / a:.3f} x; {share:.0%} stored")

    def hits(self, cold: bool) -> None:
        """From the cache, and the same file without one, in turns."""
        from_cache, local = [], []
        self.clear()
        with self.server() as uri:
            subprocess.run(
                [sys.executable, "-m", "tensorizer", "cache", "add", uri, "--cache", str(self.cache)],
                check=True,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "TENSORIZER_CACHE_MIN_FREE": "0"},
            )
            (data,) = self.cache.glob("tensorizer-1/*/*/*/data")
            for _ in range(self.repeats + 1):
                for times, path, place, cache in (
                    (local, self.path, str(self.path), None),
                    (from_cache, data, uri, self.cache),
                ):
                    forget(path) if cold else path.read_bytes()
                    times.append(self.load(place, cache))
        a, b = statistics.median(local[1:]), statistics.median(from_cache[1:])
        speed = self.nbytes / b / 1e9
        show(f"hit, {'cold' if cold else 'warm'}", f"{a:.3f} s local, {b:.3f} s ({speed:.2f} GB/s): {b / a:.3f} x")

    def together(self, count: int) -> None:
        """So many processes that start at the same time on an empty cache."""
        self.clear()
        with self.server("limit_rate 20m;") as uri:
            begin = time.perf_counter()
            processes = [self.start(uri, self.cache) for _ in range(count)]
            seconds = [json.loads(process.communicate()[0])[0] for process in processes]
            wall = time.perf_counter() - begin
            times = self.sent() / self.nbytes
        show(
            f"{count} processes at once", f"{max(seconds):.2f} s ({wall:.2f} s with starting), {times:.2f} x its bytes"
        )

    def thousand_entries(self) -> None:
        """Opening a folder that has 1,000, and one step of filling: the scan."""
        self.clear()
        self.cache.mkdir(mode=0o700)
        folder = _C.CacheFolder(str(self.cache), True)
        user = self.cache / "tensorizer-1" / str(os.geteuid())
        for i in range(1000):
            place = user / f"{i:032x}" / f"{i:032x}"
            place.mkdir(parents=True, mode=0o700)
            for name in ("data", "lock", "about.json"):
                (place / name).write_bytes(b"x")
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            _C.CacheFolder(str(self.cache), False)
            folder.scan()
            times.append(time.perf_counter() - begin)
        show("1,000 entries, opening and one step", f"{1e3 * statistics.median(times):.1f} ms")


def forget(path: Path) -> None:
    """Drops a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def slow_disk(folder: Path) -> str:
    """What makes the disk of the processes that preload it slow."""
    library = folder / "slow_disk.so"
    source = Path(__file__).with_name("slow_disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return str(library)


def show(what: str, found: str) -> None:
    print(f"{what:50} {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", default="1GB", help="of the file")
    parser.add_argument("--folder", help="where everything is made and removed again; the disk is that of the cache")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(machine(), default=str)[:300])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(Path(folder), parse_size("--nbytes", arguments.nbytes), arguments.repeats)
        bench.first_load("network of 160 MB/s", "limit_rate 20m;")
        bench.first_load("the same, disk of 80 MB/s", "limit_rate 20m;", slow_disk(Path(folder)))
        bench.first_load("network as fast as loopback", "")
        bench.hits(cold=False)
        bench.hits(cold=True)
        bench.together(4)
        bench.thousand_entries()


if __name__ == "__main__":
    main()

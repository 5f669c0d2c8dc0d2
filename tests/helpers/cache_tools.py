"""Tools for tests of the node's cache: models, a server with a log, and the content of a cache folder."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from pathlib import Path

import pytest
import torch
from servers.nginx import PROGRAM as NGINX
from servers.nginx import nginx

from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer._io.node_cache import finish

MIB = 1 << 20

needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TENSORIZER_CACHE", "TENSORIZER_CACHE_SIZE", "TENSORIZER_CACHE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TENSORIZER_CACHE_MIN_FREE", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def tensors(nbytes=12 * MIB, seed=0):
    """Six tensors of the same size."""
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randn(nbytes // 24, generator=generator) for i in range(6)}


def write(path, content, **arguments):
    serializer = TensorSerializer(str(path), **arguments)
    serializer.write_state_dict(content)
    serializer.close()
    old = time.time() - 3600
    os.utime(path, (old, old))
    return content


def load(uri, cache=None, **arguments):
    """Loads all tensors; returns them and the closed file, after the cache has written its copy."""
    options = {} if cache is None else {"cache": cache}
    with TensorDeserializer(uri, device="cpu", stream_options=options, **arguments) as file:
        found = {name: tensor.detach().clone() for name, tensor in file.items()}
    finish()
    return found, file


def load_one(uri, name, folder, **arguments):
    """Loads one tensor of a file in the same way."""
    options = {"cache": folder}
    with TensorDeserializer(uri, device="cpu", lazy_load=True, stream_options=options, **arguments) as file:
        found = file[name].detach().clone()
    finish()
    return found


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def files_below(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != "lock")


def entries(folder, file="data"):
    """The folders of cache entries that have a copy, or another `file`."""
    # Unlike pathlib's glob, this one skips folders that another process renames or removes meanwhile.
    return sorted(Path(found).parent for found in glob.glob(f"{glob.escape(str(folder))}/tensorizer-1/*/*/*/{file}"))


class Site:
    """A folder that nginx serves, and the requests to it."""

    def __init__(self, url, root, log):
        self.url, self.root, self._log, self._seen = url, root, log, 0

    def requests(self):
        """(status, bytes of the body) of the requests since the last call."""
        time.sleep(0.05)
        found = [
            (int(status), int(nbytes))
            for status, nbytes in re.findall(r'HTTP/1\.1" (\d+) (\d+)', self._log.read_text())
        ]
        new, self._seen = found[self._seen :], len(found)
        return new


@contextlib.contextmanager
def serving(tmp_path, server_lines=""):
    (tmp_path / "root").mkdir(exist_ok=True)
    work = tmp_path / f"nginx{len(list(tmp_path.glob('nginx*')))}"
    work.mkdir()
    with nginx(work, tmp_path / "root", server_lines=server_lines) as url:
        yield Site(url, tmp_path / "root", work / "access.log")


@pytest.fixture
def site(tmp_path):
    if NGINX is None:
        pytest.skip("nginx is not installed")
    with serving(tmp_path) as found:
        yield found


def sent(requests):
    return sum(nbytes for status, nbytes in requests if status in (200, 206))


LOADER = """
import hashlib, sys, time
from tensorizer import TensorDeserializer
print("ready", flush=True)
with TensorDeserializer(sys.argv[1], device="cpu", stream_options={"cache": sys.argv[2]}) as file:
    digest = hashlib.sha256()
    for name in sorted(file):
        digest.update(file[name].detach().numpy().tobytes())
    print(digest.hexdigest(), file.cached_bytes_read, time.monotonic())
"""


@pytest.fixture
def start(fork_server, environment):
    """Starts a program, by default one that loads a file, with the URI and the folder of the cache as arguments."""

    def begin(uri, folder, program=LOADER):
        return fork_server.start(program, uri, folder)

    return begin


def result(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return [word for word in out.split() if word != "ready"]


def digest_of(content):
    import hashlib

    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(content[name].numpy().tobytes())
    return digest.hexdigest()

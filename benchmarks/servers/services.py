"""What the cases of remote sources start beside the contenders, in the process of the runner.

The servers that the tests use serve here, too. Everything ends with the ``with`` block.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.case import Stage, Unavailable
from benchmarks.contender import S3Place
from benchmarks.environments import compiled

#: Of the emulated object store.
LATENCY_MS = 20
BYTES_PER_SECOND = 80_000_000
STORE_CONNECTIONS = 32
#: One request in so many of the store with a slow tail takes so many times as long.
SLOW_EVERY, SLOW_FACTOR = 50, 20
#: Requests that the busy store answers at the same time; others get a 503.
MOST_REQUESTS = 8
#: Of the raw sockets elsewhere: no number gave more on loopback.
LOOPBACK_CONNECTIONS = 4


def settings_of(stage: Stage, connections: int, **more: str) -> dict[str, str]:
    """What every remote case tells its workers."""
    return {"limits_net": str(compiled("limits_net", stage.cache)), "connections": str(connections), **more}


@contextmanager
def web_server(stage: Stage) -> Iterator[dict[str, str]]:
    """nginx over the cache folder.

    Raises:
        Unavailable: It is not installed.
    """
    from tests.servers import nginx

    if nginx.PROGRAM is None:
        raise Unavailable("nginx is not installed")
    with tempfile.TemporaryDirectory() as work, nginx.nginx(Path(work), stage.cache) as url:
        yield settings_of(stage, LOOPBACK_CONNECTIONS, http=url)


@contextmanager
def tls_web_server(stage: Stage) -> Iterator[dict[str, str]]:
    """The same over TLS; ``authority`` is the file that trusts it.

    Raises:
        Unavailable: It is not installed, or the openssl program is not.
    """
    from tests.servers import nginx
    from tests.servers.certificates import make_certificates

    if nginx.PROGRAM is None or shutil.which("openssl") is None:
        raise Unavailable("nginx or openssl is not installed")
    with tempfile.TemporaryDirectory() as work:
        certificates = make_certificates(Path(work))
        (Path(work) / "nginx").mkdir()
        with nginx.nginx(Path(work) / "nginx", stage.cache, tls=certificates) as url:
            yield settings_of(stage, LOOPBACK_CONNECTIONS, http=url, authority=str(certificates.authority))


@contextmanager
def object_store(stage: Stage, *manners: int, connections: int = STORE_CONNECTIONS) -> Iterator[dict[str, str]]:
    """The emulated object store (``object_store.cpp``, where ``manners`` are explained) over the cache folder."""
    program = compiled("servers/object_store", stage.cache)
    command = [str(program), str(stage.cache), *map(str, (LATENCY_MS, BYTES_PER_SECOND, *manners))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            yield settings_of(stage, connections, http=f"http://127.0.0.1:{port}")
        finally:
            process.stdin.close()  # it ends with its input, so it cannot outlive this process


def slow_tail_store(stage: Stage) -> AbstractContextManager[dict[str, str]]:
    """That store, where a few requests take much longer than the others."""
    return object_store(stage, SLOW_EVERY, SLOW_FACTOR)


def busy_store(stage: Stage) -> AbstractContextManager[dict[str, str]]:
    """That store, which refuses more than a few requests at the same time."""
    return object_store(stage, 0, 1, MOST_REQUESTS, connections=MOST_REQUESTS)


@contextmanager
def s3_store(stage: Stage) -> Iterator[dict[str, str]]:
    """OpenStack Swift with its S3 API, and every contender's files in a bucket.

    Raises:
        Unavailable: It is not installed.
    """
    from tests.servers.s3_server import S3Server, s3_is_installed

    if not s3_is_installed():
        raise Unavailable("the S3 server (Swift) is not installed")
    with S3Server() as server:
        store = server.client()
        store.create_bucket(Bucket="bench")
        for path in stage.files:
            with path.open("rb") as file:
                store.put_object(Bucket="bench", Key=f"{path.parent.name}/{path.name}", Body=file)
        yield settings_of(
            stage,
            LOOPBACK_CONNECTIONS,
            s3_endpoint=server.endpoint,
            s3_access_key=server.access_key,
            s3_secret_key=server.secret_key,
        )


def s3_place(settings: dict[str, str], key: str) -> S3Place:
    """A place in the bucket of :func:`s3_store`."""
    return S3Place(f"s3://bench/{key}", settings["s3_endpoint"], settings["s3_access_key"], settings["s3_secret_key"])


@contextmanager
def redis_server(stage: Stage) -> Iterator[dict[str, str]]:
    """redis-server, with this project's files of the models stored by ``to_redis``.

    Raises:
        Unavailable: It is not installed.
    """
    import redis

    from tensorizer import TensorDeserializer
    from tests.servers.redis_server import RedisServer, redis_is_installed

    if not redis_is_installed():
        raise Unavailable("redis-server is not installed")
    with RedisServer() as server:
        client = redis.Redis(host="127.0.0.1", port=server.port)
        for folder in stage.folders:
            with TensorDeserializer(folder / "ours.tensors", device="cpu", lazy_load=True) as tensors:
                tensors.to_redis(client, folder.name)
        client.close()
        yield settings_of(stage, LOOPBACK_CONNECTIONS, redis_host="127.0.0.1", redis_port=str(server.port))

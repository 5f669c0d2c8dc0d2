"""Remote files, host memory: HTTP, an object store, S3 and Redis, all over loopback.

The limit of the loads is ``limits_net.cpp``: plain sockets that receive into fresh huge-page memory. Servers and
contenders share the machine's cores; the limit pays for that as everybody does.
"""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

from benchmarks import models
from benchmarks.case import Bench, Case, Goal
from benchmarks.cases.local import streamed_into
from benchmarks.contender import HttpPlace, S3Place, State
from benchmarks.contenders.sockets import Sockets
from benchmarks.memory import PeakSampler
from benchmarks.servers import services

S3_LARGEST = 500_000_000  # Swift is written in Python
REDIS_LARGEST = 1_000_000_000  # of memory, beside the model's


def http_place(bench: Bench, path: Path) -> HttpPlace:
    """Where the server of the cache folder has the file."""
    url = f"{bench.settings['http']}/{path.parent.name}/{path.name}"
    return HttpPlace(url, int(bench.settings["connections"]))


def https_place(bench: Bench, path: Path) -> HttpPlace:
    """The same over TLS, whose authority the process then trusts: every contender knows one of these variables."""
    for name in ("SSL_CERT_FILE", "CURL_CA_BUNDLE"):
        os.environ[name] = bench.settings["authority"]
    return http_place(bench, path)


def s3_place(bench: Bench, path: Path) -> S3Place:
    """Where the object store has the file."""
    return services.s3_place(bench.settings, f"{path.parent.name}/{path.name}")


def redis_place(bench: Bench, path: Path) -> str:
    """Where Redis has the model; its file is this project's for everybody."""
    return f"redis://{bench.settings['redis_host']}:{bench.settings['redis_port']}/{path.parent.name}"


def limit(bench: Bench, what: str, target: str) -> float:
    """Seconds of one limit; ``bench.contender`` is the raw sockets."""
    assert isinstance(bench.contender, Sockets)
    return bench.contender.limit(bench.settings["limits_net"], what, int(bench.settings["connections"]), target)


def ranges_target(url: str, nbytes: int) -> str:
    """The limit's words for one object of an HTTP server."""
    host, _, path = url.partition("://")[2].partition("/")
    address, _, port = host.partition(":")
    return f"{address} {port} /{path} {nbytes}"


def load(bench: Bench) -> float:
    """All tensors, by the contender's ``needs`` method."""
    with bench.clock():
        state: State = getattr(bench.contender, bench.case.needs)(bench.place)
    bench.check(state)
    return bench.seconds


def load_http(bench: Bench) -> float:
    """All tensors of a file of an HTTP server."""
    if isinstance(bench.contender, Sockets):
        return limit(bench, "http", ranges_target(bench.place.url, bench.path.stat().st_size))
    return load(bench)


def stream_http(bench: Bench) -> float:
    """All tensors of a file of an HTTP server one after the other, each copied to where an engine has it."""
    if isinstance(bench.contender, Sockets):
        return load_http(bench)
    state = models.read_base(bench.folder)
    for tensor in state.values():
        tensor.zero_()
    return streamed_into(bench, state)


def open_http(bench: Bench) -> float:
    """From the URL to an index in hand."""
    with bench.clock():
        tensors = bench.contender.open_http(bench.place)
    if tensors != bench.manifest.tensors:
        raise RuntimeError(f"{bench.contender.label}: {tensors} tensors, expected {bench.manifest.tensors}")
    return bench.seconds


def count_requests(bench: Bench) -> float:
    """Requests that the object store has seen so far."""
    with urllib.request.urlopen(f"{bench.settings['http']}/-/requests") as answer:
        return float(answer.read())


def open_http_requests(bench: Bench) -> float:
    """Requests between the URL and an index in hand."""
    before = count_requests(bench)
    open_http(bench)
    return count_requests(bench) - before


def load_s3(bench: Bench) -> float:
    """All tensors of an object."""
    if isinstance(bench.contender, Sockets):
        from benchmarks.servers.s3_client import client

        place = bench.place
        url = client(place).generate_presigned_url("get_object", Params={"Bucket": place.bucket, "Key": place.key})
        return limit(bench, "http", ranges_target(url, bench.path.stat().st_size))
    return load(bench)


def load_redis(bench: Bench) -> float:
    """All tensors that are stored in Redis."""
    if isinstance(bench.contender, Sockets):
        return limit(bench, "redis", redis_target(bench))
    return load(bench)


def redis_target(bench: Bench) -> str:
    """The limit's words for everything that is stored of the model."""
    import redis

    host, port = bench.settings["redis_host"], bench.settings["redis_port"]
    with redis.Redis(host=host, port=int(port)) as client:
        keys = sorted(client.scan_iter(match=f"{bench.folder.name}:*", count=4096))
        lengths = [client.strlen(key) for key in keys]
    return "\n".join([f"{host} {port}", *(f"{key.decode()} {nbytes}" for key, nbytes in zip(keys, lengths))])


def upload_tiny(bench: Bench) -> None:
    """One object that is not measured, so that nothing happens the first time."""
    path = bench.tiny / bench.path.name
    bench.contender.upload_s3(models.read_base(bench.tiny), path, s3_place(bench, bench.tiny / "wake-up"))


def check_and_delete(bench: Bench, place: S3Place) -> None:
    """Make sure that the object is whole.

    Raises:
        RuntimeError: It is too short.
    """
    from benchmarks.servers.s3_client import client

    store = client(place)
    found = store.head_object(Bucket=place.bucket, Key=place.key)["ContentLength"]
    store.delete_object(Bucket=place.bucket, Key=place.key)
    if found < bench.manifest.nbytes:
        raise RuntimeError(f"{bench.contender.label}: an object of {found} bytes for {bench.manifest.nbytes}")


def upload(bench: Bench) -> float:
    """The whole state dict as an object, until the store has it."""
    upload_tiny(bench)
    state = models.read_base(bench.folder)
    place = s3_place(bench, bench.target)
    with bench.clock():
        bench.contender.upload_s3(state, bench.path, place)
    check_and_delete(bench, place)
    return bench.seconds


def upload_memory(bench: Bench) -> float:
    """Highest memory owned during an upload, beyond what was there before (the model among it)."""
    upload_tiny(bench)
    state = models.read_base(bench.folder)
    place = s3_place(bench, bench.target)
    sampler = PeakSampler()
    before = sampler.start()
    bench.contender.upload_s3(state, bench.path, place)
    peak = sampler.stop()
    check_and_delete(bench, place)
    return max(0, peak.owned - before.owned)


CASES = (
    Case(
        "http-loopback",
        "load over HTTP, nginx on loopback",
        "load_http",
        load_http,
        limit="sockets",
        goals=(
            Goal("sockets", at_least=0.8),
            Goal("reference", at_least=3.0),
            Goal("ours", at_least=0.97, who="ours-safetensors"),
        ),
        locate=http_place,
        service=services.web_server,
    ),
    Case(
        "https-loopback",
        "load over HTTPS, nginx on loopback",
        "load_http",
        load,
        goals=(Goal("ours", at_least=0.97, who="ours-safetensors"),),
        locate=https_place,
        service=services.tls_web_server,
    ),
    Case(
        "http-object-store",
        "load from a store: 20 ms, 80 MB/s a connection",
        "load_http",
        load_http,
        limit="sockets",
        goals=(
            Goal("sockets", at_least=0.85),
            Goal("reference", at_least=5.0),
            Goal("ours", at_least=0.97, who="ours-safetensors"),
        ),
        locate=http_place,
        service=services.object_store,
    ),
    Case(
        "stream-http",
        "that store, tensor by tensor into memory of an engine",
        "stream_http",
        stream_http,
        limit="sockets",
        goals=(Goal("sockets", at_least=0.9),),
        locate=http_place,
        service=services.object_store,
    ),
    Case(
        "http-slow-tail",
        "that store, one request in 50 takes 20 times as long",
        "load_http",
        load,
        locate=http_place,
        service=services.slow_tail_store,
    ),
    Case(
        "http-busy-store",
        "that store, 503 to more than 8 requests at once",
        "load_http",
        load_http,
        limit="sockets",
        locate=http_place,
        service=services.busy_store,
    ),
    Case(
        "http-index",
        "that store: until the index is there",
        "open_http",
        open_http,
        unit="ms",
        locate=http_place,
        service=services.object_store,
    ),
    Case(
        "http-index-requests",
        "that store: requests for the index",
        "open_http",
        open_http_requests,
        unit="requests",
        goals=(Goal(at_most=2.0),),
        locate=http_place,
        service=services.object_store,
    ),
    Case(
        "s3-load",
        "load from an S3 server (500 MB at most)",
        "load_s3",
        load_s3,
        limit="sockets",
        goals=(Goal("ours", at_least=0.97, who="ours-safetensors"),),
        largest=S3_LARGEST,
        locate=s3_place,
        service=services.s3_store,
    ),
    Case(
        "s3-upload",
        "save to an S3 server (500 MB at most)",
        "upload_s3",
        upload,
        goals=(Goal("boto3", at_least=1.0),),
        largest=S3_LARGEST,
        locate=s3_place,
        service=services.s3_store,
    ),
    Case(
        "memory-s3-upload",
        "memory of a save to S3 beyond the model",
        "upload_s3",
        upload_memory,
        unit="MB",
        goals=(Goal(at_most=268.4),),
        largest=S3_LARGEST,
        locate=s3_place,
        service=services.s3_store,
    ),
    Case(
        "redis-load",
        "load from Redis (1 GB at most)",
        "load_redis",
        load_redis,
        limit="sockets",
        goals=(Goal("sockets", at_least=0.85),),
        largest=REDIS_LARGEST,
        locate=redis_place,
        service=services.redis_server,
    ),
)

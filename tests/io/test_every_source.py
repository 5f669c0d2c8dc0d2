"""One behavioural suite over every kind of source: a file, a file object, memory, HTTP, HTTPS, S3, Redis, fsspec.

What a kind does beyond this, and what networks do to it, is tested in the kind's own suite.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, Callable

import pytest
import torch
from http_tools import nothing_left, tuned
from samples import assert_same, tensor
from servers import needs
from servers.certificates import make_certificates
from servers.http_faults import FaultyServer
from servers.redis_server import RedisServer, redis_is_installed
from servers.s3_server import S3Server

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.errors import CryptographyError, FormatError, HashMismatchError, TruncatedError
from tensorizer.stream_io import CAInfo

KINDS = ["path", "file_object", "memory", "http", "https", "s3", "redis", "fsspec"]
MIB = 1 << 20

#: Puts the bytes where the kind has them; returns a loader that takes the keywords of ``TensorDeserializer``.
Put = Callable[[bytes], Callable[..., TensorDeserializer]]

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("every source")]


def state() -> dict[str, torch.Tensor]:
    """More than the first request of a remote source brings, in tensors of all sizes."""
    return {
        "big": tensor((3 * MIB // 4, 4), torch.float32, seed=1),
        **{f"small.{i}": tensor((i, 3), torch.float16, seed=i) for i in range(1, 40)},
        "bool": tensor((77,), torch.bool),
        "none": tensor((0, 4), torch.bfloat16),
        "scalar": tensor((), torch.int64),
    }


def saved(tensors: dict[str, torch.Tensor], **options: Any) -> bytes:
    """A file of these tensors."""
    buffer = io.BytesIO()
    serializer = TensorSerializer(buffer, **options)
    serializer.write_state_dict(tensors)
    content = buffer.getvalue()
    serializer.close()
    return content


@contextlib.contextmanager
def local(kind: str, tmp_path: Any) -> Iterator[Put]:
    path = tmp_path / "model.tensors"

    def put(content: bytes) -> Callable[..., TensorDeserializer]:
        path.write_bytes(content)
        if kind == "path":
            return partial(TensorDeserializer, path)
        if kind == "memory":
            return lambda **options: TensorDeserializer(io.BytesIO(content), **options)
        return lambda **options: TensorDeserializer(path.open("rb"), **options)

    yield put


@contextlib.contextmanager
def web(kind: str, tmp_path: Any) -> Iterator[Put]:
    certificates = make_certificates(tmp_path) if kind == "https" else None
    trust = CAInfo(cacert=str(certificates.authority)) if certificates else None
    options = {"http_options": tuned(proxy="", certificate_handling=trust, unit_nbytes=MIB)}
    with FaultyServer(tls=certificates.context() if certificates else None) as server:

        def put(content: bytes) -> Callable[..., TensorDeserializer]:
            server.content = content
            return partial(TensorDeserializer, server.url, stream_options=options)

        yield put


@contextlib.contextmanager
def fsspec_memory() -> Iterator[Put]:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")

    def put(content: bytes) -> Callable[..., TensorDeserializer]:
        memory.pipe_file("/every/model.tensors", content)
        return partial(TensorDeserializer, "memory://every/model.tensors")

    yield put
    memory.store.clear()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    if not redis_is_installed():
        pytest.skip(needs("Redis"))
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> S3Server:
    s3_server.client().create_bucket(Bucket="every")
    return s3_server


@pytest.fixture
def put(request: Any, tmp_path: Any) -> Iterator[Put]:
    kind = request.param
    if kind == "redis":
        server = request.getfixturevalue("redis_server")

        def put_into_redis(content: bytes) -> Callable[..., TensorDeserializer]:
            client = server.client()
            client.flushall()
            client.set("every:head:0", content[:5000])  # a file is the union of its keys
            client.set("every:rest:5000", content[5000:])
            client.close()
            return partial(TensorDeserializer, server.uri("every"))

        yield put_into_redis
    elif kind == "s3":
        server = request.getfixturevalue("bucket")

        def put_into_s3(content: bytes) -> Callable[..., TensorDeserializer]:
            server.client().put_object(Bucket="every", Key="model", Body=content)
            return partial(TensorDeserializer, "s3://every/model", stream_options=dict(server.arguments))

        yield put_into_s3
    else:
        opened = (
            local(kind, tmp_path) if kind in KINDS[:3] else fsspec_memory() if kind == "fsspec" else web(kind, tmp_path)
        )
        with opened as made:
            yield made


every_source = pytest.mark.parametrize("put", KINDS, indirect=True)


@every_source
def test_the_tensors_are_those_that_were_written(put: Put) -> None:
    expected = state()
    with put(saved(expected))(device="cpu", verify_hash=True) as loaded:
        assert_same(dict(loaded), expected)


@every_source
def test_lazy_access_works_in_any_order(put: Put) -> None:
    expected = state()
    with put(saved(expected))(device="cpu", lazy_load=True) as loaded:
        assert list(loaded) == list(expected)
        for name in reversed(list(expected)):
            assert_same(loaded[name], expected[name])


@every_source
def test_parts_of_tensors_are_those_of_the_whole_and_little_else_is_read(put: Put) -> None:
    expected = state()
    with put(saved(expected))(device="cpu", lazy_load=True) as loaded:
        before = loaded.total_bytes_read
        rows = loaded.get_slice("big")[1000 : 1000 + MIB // 4]
        assert loaded.total_bytes_read - before <= 1.05 * 4 * MIB
        assert loaded.total_bytes_read >= 4 * MIB
        assert_same(rows, expected["big"][1000 : 1000 + MIB // 4])
        for index in [
            (slice(None, None, 7), slice(1, 3)),
            (slice(5, 2000), 2),
            [700_000, 3, 4],
            -1,
            (..., slice(2, 3)),
        ]:
            assert_same(loaded.get_slice("big")[index], expected["big"][index])
        parts = {f"small.{i}": (slice(i // 2, None), slice(0, 2)) for i in range(1, 40)}
        found = loaded.get_slices({**parts, "bool": [76, 1], "none": ..., "scalar": ()})
        assert_same(found["small.20"], expected["small.20"][10:, :2])
        assert_same(found["bool"], expected["bool"][[76, 1]])
        assert_same(found["scalar"], expected["scalar"])
    key = os.urandom(32)
    with put(saved(expected, encryption=EncryptionParams(key)))(
        device="cpu", lazy_load=True, encryption=DecryptionParams.from_key(key)
    ) as loaded:
        assert_same(loaded.get_slice("big")[500_000:700_000, 1:3], expected["big"][500_000:700_000, 1:3])


@every_source
def test_a_filter_selects(put: Put) -> None:
    expected = {name: value for name, value in state().items() if name.startswith("small.")}
    with put(saved(state()))(device="cpu", filter_func=lambda name: name.startswith("small.")) as loaded:
        assert_same(dict(loaded), expected)


@every_source
def test_several_readers_bring_the_same(put: Put) -> None:
    expected = state()
    with put(saved(expected))(device="cpu", num_readers=3) as loaded:
        assert_same(dict(loaded), expected)


@every_source
def test_encrypted_tensors_are_decrypted_and_a_wrong_key_is_an_error(put: Put) -> None:
    expected, params = state(), EncryptionParams.random()
    load = put(saved(expected, encryption=params))
    with load(device="cpu", encryption=DecryptionParams.from_key(params.key)) as loaded:
        assert_same(dict(loaded), expected)
    with pytest.raises(CryptographyError):
        load(device="cpu", encryption=DecryptionParams.from_key(os.urandom(32)))


@every_source
def test_a_flipped_bit_is_found_by_the_stored_hashes(put: Put) -> None:
    content = bytearray(saved(state()))
    content[len(content) // 2] ^= 1  # within the large tensor
    with pytest.raises(HashMismatchError, match="big"):
        put(bytes(content))(device="cpu", verify_hash=True)


@every_source
@pytest.mark.parametrize("missing", [9, 100_000, 12 * MIB - 100])
def test_a_file_that_is_cut_short_is_truncated(put: Put, missing: int) -> None:
    load = put(saved(state())[:-missing])  # the last 8 bytes belong to no tensor
    with pytest.raises(TruncatedError):
        load(device="cpu")


@every_source
def test_what_is_no_tensors_file_is_a_format_error(put: Put) -> None:
    with pytest.raises(FormatError):
        put(os.urandom(20_000))(device="cpu")


@every_source
def test_nothing_is_left_after_loads_and_failures(put: Put) -> None:
    good = saved(state())
    put(good)(device="cpu").close()  # what libraries keep from their first use on
    with nothing_left():
        put(good)(device="cpu").close()
        with pytest.raises(TruncatedError):
            put(good[: len(good) // 2])(device="cpu")
        gc.collect()


def missing(kind: str, request: Any) -> Callable[..., TensorDeserializer]:
    """A loader of what is not there."""
    if kind == "redis":
        return partial(TensorDeserializer, request.getfixturevalue("redis_server").uri("nobody"))
    if kind == "s3":
        options = dict(request.getfixturevalue("bucket").arguments)
        return partial(TensorDeserializer, "s3://every/nothing", stream_options=options)
    if kind == "fsspec":
        pytest.importorskip("fsspec")
        return partial(TensorDeserializer, "memory://every/nothing")
    return partial(TensorDeserializer, request.getfixturevalue("tmp_path") / "nothing")


@pytest.mark.parametrize("kind", ["path", "s3", "redis", "fsspec"])
def test_what_is_not_there_is_a_file_not_found_error(kind: str, request: Any) -> None:
    with pytest.raises(FileNotFoundError):
        missing(kind, request)(device="cpu")

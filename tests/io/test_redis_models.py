"""Models in Redis: what to_redis stores, the deserializer loads, whatever is in it."""

from __future__ import annotations

import io

import pytest
import torch
from samples import assert_same, tensor
from servers import needs
from servers.http_faults import FaultyServer
from servers.redis_server import RedisServer, redis_is_installed

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer._io.redis import RedisStreamFile
from tensorizer.errors import StreamError, TruncatedError

pytest.importorskip("redis")
pytestmark = [pytest.mark.skipif(not redis_is_installed(), reason=needs("Redis")), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def server():
    with RedisServer() as running:
        yield running


def state():
    return {
        "plain": tensor((300, 700), torch.float32),
        'with space \'and "quotes"': tensor((5,), torch.bfloat16),
        "co:lon:12": tensor((3, 3), torch.int64),
        "empty": tensor((0, 3), torch.float16),
        "nested": {"list": [tensor((2,), torch.int8), {"deep ü": tensor((1000,), torch.float64)}]},
        "last": tensor((), torch.bool),
    }


@pytest.fixture
def stored(server, tmp_path):
    """A file that went to Redis: its state, its URI, its path."""
    server.client().flushall()
    path = tmp_path / "model.tensors"
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(state())
    with TensorDeserializer(path, device="cpu", lazy_load=True) as source:
        source.to_redis(server.client(), "org/model name")
    return server.uri("org/model name"), path


@pytest.mark.parametrize("lazy", [False, True])
def test_everything_comes_back(stored, lazy):
    uri, _ = stored
    with TensorDeserializer(uri, device="cpu", lazy_load=lazy, verify_hash=True) as loaded:
        assert_same(loaded.tree(), state())


@pytest.mark.parametrize("readers", [1, 3])
def test_a_stream_object_serves_as_well(stored, readers):
    uri, path = stored
    with RedisStreamFile(uri) as stream:
        loaded = TensorDeserializer(stream, device="cpu", num_readers=readers)
        assert_same(loaded.tree(), state())
        assert loaded.total_bytes_read <= path.stat().st_size


def test_lazy_access_fetches_what_is_asked_for(stored):
    uri, _ = stored
    loaded = TensorDeserializer(uri, device="cpu", lazy_load=True)
    for name in ("last", "plain", "co:lon:12"):
        assert_same({name: loaded[name]}, {name: state()[name]})
    assert loaded.total_bytes_read < 1_700_000


def test_meta_tensors_and_modules(server, tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    module.register_parameter("marker", torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False))
    path = tmp_path / "module.tensors"
    with TensorSerializer(path) as serializer:
        serializer.write_module(module)
    TensorDeserializer(path, device="cpu", lazy_load=True).to_redis(server.client(), "module")
    target = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    target.register_parameter("marker", torch.nn.Parameter(torch.ones(3), requires_grad=False))
    with TensorDeserializer(server.uri("module"), device="cpu") as loaded:
        loaded.load_into_module(target)
    assert not target.marker.any()
    assert torch.equal(target[0].weight, module[0].weight)


def test_a_file_that_was_loaded_and_closed_is_read_again_in_the_same_version(server, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    path = tmp_path / "module.tensors"
    with TensorSerializer(path) as serializer:
        serializer.write_module(model)
    content = path.read_bytes()

    def eager(uri):
        return TensorDeserializer(uri, device="cpu")

    def into_module(uri):
        loaded = TensorDeserializer(uri, device="cpu", lazy_load=True)
        loaded.load_into_module(torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20)))
        return loaded

    with FaultyServer(content) as web:
        for load in (eager, into_module):
            for uri in (path, str(path), f"file://{path}", web.url):
                server.client().flushall()
                load(uri).to_redis(server.client(), "again")
                with TensorDeserializer(server.uri("again"), device="cpu", verify_hash=True) as stored:
                    assert torch.equal(stored["0.weight"], model[0].weight)
        loaded = [eager(path), eager(web.url)]
        web.content = content[:-50] + b"x" * 50
        other = tmp_path / "other.tensors"
        other.write_bytes(web.content)
        other.rename(path)
        server.client().flushall()
        for one in loaded:
            with pytest.raises(StreamError, match="changed since it was loaded"):
                one.to_redis(server.client(), "changed")
        assert not list(server.client().scan_iter("changed*"))
    with pytest.raises(ValueError, match="lazy_load=True"):
        TensorDeserializer(io.BytesIO(content), device="cpu").to_redis(server.client(), "object")


def test_encrypted_files_stay_encrypted(server, tmp_path):
    path = tmp_path / "secret.tensors"
    key = EncryptionParams.random()
    with TensorSerializer(path, encryption=key) as serializer:
        serializer.write_state_dict({"w": tensor((3_000_000,), torch.uint8)})
    params = DecryptionParams.from_key(key.key)
    TensorDeserializer(path, device="cpu", lazy_load=True, encryption=params).to_redis(server.client(), "secret")
    plain = tensor((3_000_000,), torch.uint8).numpy().tobytes()[:64]
    assert not any(plain in server.client().get(k) for k in server.client().scan_iter("secret:*"))
    with TensorDeserializer(server.uri("secret"), device="cpu", encryption=params) as loaded:
        assert_same({"w": loaded["w"]}, {"w": tensor((3_000_000,), torch.uint8)})


def test_a_filter_stores_and_loads_what_it_selects(server, tmp_path):
    path = tmp_path / "many.tensors"
    expected = {f"t{i}": tensor((1000 + i,), torch.float32, seed=i) for i in range(20)}
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict(expected)

    def chosen(name):
        return name in ("t3", "t7", "t8")

    TensorDeserializer(path, device="cpu", lazy_load=True, filter_func=chosen).to_redis(server.client(), "filtered")
    with TensorDeserializer(server.uri("filtered"), device="cpu", filter_func=chosen) as loaded:
        assert_same(dict(loaded.items()), {name: expected[name] for name in ("t3", "t7", "t8")})


def test_a_missing_record_is_a_truncated_file(stored, server):
    uri, _ = stored
    client = server.client()
    (victim,) = [key for key in client.scan_iter("*") if client.strlen(key) == 300 * 700 * 4]
    client.delete(victim)
    with pytest.raises(TruncatedError, match="no key holds byte"):
        TensorDeserializer(uri, device="cpu")


def test_redis_is_not_written_to_by_a_serializer(server):
    with pytest.raises(ValueError, match="redis"):
        TensorSerializer(server.uri("new"))


def test_columns_of_a_tensor_come_in_few_requests_and_count_as_read(server):
    """Nothing is read in vain between tensors; within one, a request for each number would take far longer."""
    client = server.client()
    client.flushall()
    value = tensor((20_000, 8), torch.float32)
    buffer = io.BytesIO()
    with TensorSerializer(buffer) as serializer:
        serializer.write_state_dict({"table": value})
        content = buffer.getvalue()
    client.set("columns:model:0", content)

    def requests() -> int:
        return sum(stats["calls"] for name, stats in client.info("commandstats").items() if "get" in name.lower())

    with TensorDeserializer(server.uri("columns:model"), device="cpu", lazy_load=True) as loaded:
        before, read = requests(), loaded.total_bytes_read
        assert_same(loaded.get_slice("table")[:, 3:4], value[:, 3:4])
        assert requests() - before < 20
        assert value.nbytes // 8 <= loaded.total_bytes_read - read <= value.nbytes
        assert_same(loaded["table"], value)
    assert loaded.total_bytes_read >= value.nbytes

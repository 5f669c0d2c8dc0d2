"""Loading over HTTP: the same tensors as from a file, what is asked for, and what misbehaving servers do to a load."""

from __future__ import annotations

import io
import threading

import golden_files
import pytest
import samples
import torch
from http_tools import nothing_left, quick
from servers.http_faults import GOOD, FaultyServer, Reply

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.errors import CryptographyError, FormatError, HashMismatchError, StreamError, TensorizerError
from tensorizer.stream_io import open_stream
from tensorizer.torch import safe_open

KEY = EncryptionParams.random()


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"small.{i}": torch.randn(33, generator=generator) for i in range(50)}
    tensors["large"] = torch.randn(1000, 1000, generator=generator)
    tensors["half"] = torch.randn(300, 300, generator=generator).to(torch.bfloat16)
    tensors["empty"] = torch.empty(0, 7)
    return tensors


TENSORS = make_tensors()


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """The bytes of a plain and of an encrypted file."""
    folder = tmp_path_factory.mktemp("files")
    result = {}
    for kind, encryption in (("plain", None), ("encrypted", KEY)):
        serializer = TensorSerializer(folder / kind, encryption=encryption)
        serializer.write_state_dict(TENSORS)
        serializer.close()
        result[kind] = (folder / kind).read_bytes()
    return result


def load(server: FaultyServer, *, options: dict | None = None, **arguments: object) -> TensorDeserializer:
    return TensorDeserializer(
        server.url, device="cpu", stream_options={"http_options": quick(**(options or {}))}, **arguments
    )


def assert_complete(loaded: TensorDeserializer) -> None:
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("kind", ["plain", "encrypted"])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("reply", [GOOD, Reply(ignore_range=True), Reply(http10=True, ignore_range=True)])
def test_tensors_are_those_of_the_file(contents, kind, lazy, reply):
    encryption = DecryptionParams.from_key(KEY.key) if kind == "encrypted" else None
    with nothing_left(), FaultyServer(contents[kind], default=reply) as server:
        loaded = load(server, lazy_load=lazy, encryption=encryption, verify_hash=True)
        assert_complete(loaded)
        loaded.close()


def _tensors_of(source: object, golden: dict) -> list[tuple]:
    source.seek(golden.get("start", 0))
    secret = golden_files.secret(golden)
    encryption = None
    if secret is not None:
        key, passphrase = secret.get("key"), secret.get("passphrase")
        encryption = DecryptionParams.from_key(key) if key else DecryptionParams.from_string(passphrase)
    with TensorDeserializer(source, device="cpu", lazy_load=True, encryption=encryption) as loaded:
        return [(index, kind, name, tensor.dtype, tensor.shape, samples.raw(tensor))
                for index, kind, name, tensor in loaded.read_tensors()]  # fmt: skip


@golden_files.each(golden_files.distinct(golden_files.select(refused=False)))
def test_every_golden_file_loads_over_http_as_from_memory(golden):
    content = golden_files.read(golden)
    from_memory = _tensors_of(io.BytesIO(content), golden)
    assert from_memory
    for reply in (GOOD, Reply(ignore_range=True)):
        with FaultyServer(content, default=reply) as server:
            stream = open_stream(server.url, http_options=quick(head_nbytes=1000))
            assert _tensors_of(stream, golden) == from_memory


def test_an_open_stream_is_read_through_its_connections(contents):
    with (
        FaultyServer(contents["plain"]) as server,
        open_stream(server.url, http_options=quick()) as stream,
        TensorDeserializer(stream, device="cpu") as loaded,
    ):
        assert_complete(loaded)
        assert loaded.total_bytes_read >= loaded.total_tensor_bytes
        assert stream.closed


def test_opening_takes_two_round_trips_however_large_the_index_is(contents):
    with FaultyServer(contents["plain"]) as server, load(server, lazy_load=True, options={"head_nbytes": 1 << 20}):
        assert len(server.requests) == 1
    with FaultyServer(contents["plain"]) as server, load(server, lazy_load=True, options={"head_nbytes": 100}):
        assert len(server.requests) <= 2


def test_tensors_that_the_filter_leaves_out_are_not_downloaded(contents):
    with FaultyServer(contents["plain"]) as server:
        with load(server, filter_func=lambda name: name.startswith("small.")) as loaded:
            assert len(loaded) == 50
        asked = sum(request.range[1] - request.range[0] + 1 for request in server.requests)
        assert asked < len(contents["plain"]) / 2


MANY = {f"t{i:03}": torch.full((5000,), float(i)) for i in range(300)}
MANY_FILE = samples.state_dict_bytes(MANY)


def test_a_loop_over_a_lazy_object_reads_ahead():
    whole = {"unit_nbytes": 16 << 20}
    with FaultyServer(MANY_FILE) as server, load(server, lazy_load=True, options=whole) as loaded:
        for name, tensor in loaded.items():
            assert torch.equal(tensor, MANY[name]), name
        assert len(server.requests) < 30


def test_a_loop_over_safe_open_reads_ahead_and_keeps_16_mib_at_most():
    stream_options = {"http_options": quick(unit_nbytes=16 << 20)}
    with FaultyServer(MANY_FILE) as server, safe_open(server.url, stream_options=stream_options) as file:
        for name in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(name), MANY[name]), name
        assert len(server.requests) < 30
        file.get_tensor("t100").zero_()
        assert torch.equal(file.get_tensor("t100"), MANY["t100"])
        assert sum(tensor.nbytes for tensor in file._file._waiting.values()) <= 16 << 20
        assert not file._file.kept


def test_damage_is_found_at_its_tensor_when_safe_open_reads_ahead():
    sealed = samples.state_dict_bytes(MANY, encryption=KEY)
    damaged = bytearray(sealed)
    damaged[len(sealed) // 2] ^= 1
    key = DecryptionParams.from_key(KEY.key)
    right = []
    with (
        FaultyServer(bytes(damaged)) as server,
        safe_open(server.url, encryption=key, stream_options={"http_options": quick()}) as file,
    ):
        for name in file.keys():  # noqa: SIM118
            try:
                right.append(torch.equal(file.get_tensor(name), MANY[name]))
            except CryptographyError as error:
                right.append(name in str(error))
    assert right == [True] * len(MANY)


def test_what_is_asked_for_out_of_order_is_read_alone():
    with FaultyServer(MANY_FILE) as server, load(server, lazy_load=True) as loaded:
        before = loaded.total_bytes_read
        for i in (200, 201, 202, 100, 99, 98, 97, 96, 250):
            assert torch.equal(loaded[f"t{i:03}"], MANY[f"t{i:03}"])
        assert loaded.total_bytes_read - before < 9 * 25_000


def test_damage_is_found_at_the_tensor_that_has_it_also_when_reading_ahead():
    damaged = bytearray(MANY_FILE)
    damaged[damaged.rfind(samples.raw(MANY["t037"])) + 5] ^= 1
    with FaultyServer(bytes(damaged)) as server, load(server, lazy_load=True, verify_hash=True) as loaded:
        for i in range(37):
            assert torch.equal(loaded[f"t{i:03}"], MANY[f"t{i:03}"])
        with pytest.raises(HashMismatchError, match="t037"):
            loaded["t037"]
        assert torch.equal(loaded["t038"], MANY["t038"])


def test_num_readers_is_the_number_of_connections(contents):
    most = now = 0
    lock = threading.Lock()

    def count(_request):
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        threading.Event().wait(0.05)
        with lock:
            now -= 1
        return GOOD

    for readers in (1, 3):
        most = 0
        with FaultyServer(contents["plain"], default=count) as server:
            assert_complete(load(server, num_readers=readers))
        assert most == readers


def test_the_cache_status_of_the_response_is_shown(contents):
    hit = Reply(headers={"X-Cache-Status": "HIT"})
    with FaultyServer(contents["plain"], default=hit) as server, load(server) as loaded:
        assert loaded.cache_status == "HIT"


FLAKY = [Reply(cut_after=5000), Reply(status=503), GOOD, Reply(drop=True), Reply(cut_after=30_000, reset=True), GOOD]


def test_a_load_outlasts_a_bad_network(contents):
    with nothing_left(), FaultyServer(contents["plain"], FLAKY * 3) as server:
        assert_complete(load(server, verify_hash=True))


@pytest.mark.parametrize("lazy", [False, True])
def test_an_object_that_changes_during_a_load_is_an_error_and_never_a_mixture(contents, lazy):
    with nothing_left(), FaultyServer(contents["plain"]) as server:

        def change(_request):
            server.content = contents["encrypted"]
            return GOOD

        server.script.extend([GOOD, GOOD, change])
        with pytest.raises(StreamError, match=r"changed|412"):
            assert_complete(load(server, lazy_load=lazy))


def test_an_object_that_is_shorter_than_its_index_says_is_an_error(contents):
    with FaultyServer(contents["plain"][:-100_000]) as server, pytest.raises(TensorizerError) as caught:
        load(server)
    assert isinstance(caught.value, (FormatError, OSError))


def test_what_is_no_tensors_file_is_a_value_error():
    with FaultyServer(b"<html>Please log in</html>" * 100) as server, pytest.raises(ValueError):
        load(server)


def test_a_failing_server_fails_the_load_with_its_url_alone(contents):
    with nothing_left(), FaultyServer(contents["plain"], [GOOD], default=Reply(status=500)) as server:
        url = server.url + "?Signature=s3cret"
        with pytest.raises(StreamError, match="500") as caught:
            TensorDeserializer(url, device="cpu", stream_options={"http_options": quick(retries=1)})
        assert server.url in str(caught.value)
        assert "s3cret" not in str(caught.value)


def test_ctrl_c_ends_a_load_that_waits(contents, fresh_process):
    program = """
import os, signal, sys, threading
from tensorizer import TensorDeserializer
from http_tools import tuned
threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
options = {"http_options": tuned(head_nbytes=4096, stall_timeout=60, proxy="")}
try:
    TensorDeserializer(sys.argv[1], device="cpu", stream_options=options)
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
"""
    with FaultyServer(contents["plain"], [GOOD], default=Reply(stall_after=1000)) as server:
        run = fresh_process(program, server.url, timeout=100)
        assert run.stdout == "interrupted 1\n", run.stderr

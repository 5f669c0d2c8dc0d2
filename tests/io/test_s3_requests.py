"""S3 requests as a store sees them: signatures, headers, checksums, parts at the same time, the caller's parameters."""

from __future__ import annotations

import base64
import contextlib
import gc
import io
import logging
import os
import signal
import ssl
import tempfile
import threading
import time
import traceback
import warnings
import zlib

import pytest
import torch
from http_tools import tuned
from samples import assert_same, tensor
from servers.s3_recorder import S3Recorder
from torch_versions import has_checkpoints

import tensorizer
from tensorizer import AuthenticationError, TensorDeserializer, TensorSerializer, convert, stream_io
from tensorizer._io import http_options
from tensorizer._io.call_options import CallOptions
from tensorizer._io.s3.client import s3_code
from tensorizer._io.s3.objects import S3Prefix
from tensorizer.errors import FormatError, StreamError, StreamExistsError
from tensorizer.stream_io import HTTPOptions, open_stream
from tensorizer.torch import save_file

botocore = pytest.importorskip("botocore")
boto3 = pytest.importorskip("boto3")
pytestmark = pytest.mark.timeout(180)

PART = 64 << 10
KEY, SECRET = "A" * 32, "topsecret/+key"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No credentials or settings but those of a test."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    monkeypatch.setattr(stream_io, "_s3_default_config_paths", ())
    monkeypatch.setattr("tensorizer._io.s3.upload._without_checksums", set())
    monkeypatch.setattr("tensorizer._io.s3.upload.MIN_PART_NBYTES", PART)
    monkeypatch.setattr("tensorizer._io.s3.upload.MAX_PART_NBYTES", PART)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()


@pytest.fixture
def store():
    with S3Recorder() as recorder:
        yield recorder
        assert recorder.bad_signatures == []


def temporary_files():
    return os.listdir(tempfile.gettempdir())


def state(parts=6, seed=0):
    """Tensors of about that many parts together."""
    return {f"t{i}": tensor((PART // 4,), torch.float32, seed=seed + i) for i in range(parts)}


def crc32_of(data):
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def save(store, expected, uri="s3://bucket/model", **options):
    with TensorSerializer(uri, stream_options={**store.arguments, **options}) as serializer:
        serializer.write_state_dict(expected)


def loads(store, expected, uri="s3://bucket/model", **options):
    with open_stream(uri, **{**store.arguments, **options}) as stream:
        assert_same(dict(TensorDeserializer(stream, device="cpu", verify_hash=True).items()), expected)


@pytest.fixture
def clients(monkeypatch):
    """The clients that botocore has made."""
    made, create = [], botocore.client.ClientCreator.create_client

    def counted(*arguments, **options):
        made.append(1)
        return create(*arguments, **options)

    monkeypatch.setattr("botocore.client.ClientCreator.create_client", counted)
    return made


class TestOneCallMakesOneClient:
    def test_to_open_forty_shards(self, store, clients):
        tensors = {f"t{i:02}": torch.full((2,), float(i)) for i in range(40)}
        save_file(tensors, "s3://bucket/m/model.safetensors", max_shard_size=8, stream_options=store.arguments)
        assert len(clients) == 1
        assert sum(path.endswith(".safetensors") for path in store.objects) == 40
        for place in ("s3://bucket/m", "s3://bucket/m/model.safetensors.index.json"):
            clients.clear()
            assert_same(tensorizer.load_file(place, stream_options=store.arguments), tensors)
            assert len(clients) == 1, place

    def test_of_models_of_transformers(self, store, clients):
        transformers = pytest.importorskip("transformers")
        from tensorizer.integrations.huggingface import from_pretrained, save_pretrained

        config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
        options = {"stream_options": store.arguments}
        save_pretrained(transformers.GPT2LMHeadModel(config), "s3://bucket/model", **options)
        assert len(clients) == 1
        clients.clear()
        from_pretrained("s3://bucket/model", **options)
        assert len(clients) == 1

    @has_checkpoints
    def test_of_conversions_and_checkpoints(self, store, clients, tmp_path):
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        from tensorizer.distributed import TensorizerReader, TensorizerWriter, dcp_to_files

        save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
        options = {"stream_options": store.arguments}
        calls = [
            lambda: convert(tmp_path / "model.safetensors", "s3://bucket/model.tensors", **options),
            lambda: dcp.save({"a": torch.ones(3)}, storage_writer=TensorizerWriter("s3://bucket/c", **options), **one),
            lambda: dcp.load({"a": torch.ones(3)}, storage_reader=TensorizerReader("s3://bucket/c", **options), **one),
            lambda: dcp_to_files("s3://bucket/c", tmp_path / "c.safetensors", **options),
        ]
        one = {"no_dist": True}
        for call in calls:
            clients.clear()
            call()
            assert len(clients) == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGUF\x03\0\0\0" + bytes(100), "a GGUF file"),
        (b'{"message": "Forbidden"}', "an error message in JSON: 'Forbidden'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer"),
        (b"# xet version 0\nfilesize = 1\nhash = '0'\n", "a Xet pointer"),
    ],
)
def test_an_object_of_another_kind_is_told_what_it_is(store, data, words):
    store.objects["/bucket/model.safetensors"] = data
    doors = (tensorizer.inspect, tensorizer.verify, lambda source, **options: TensorDeserializer(source, **options))
    for door in doors:
        with pytest.raises(tensorizer.FormatError, match=words):
            door("s3://bucket/model.safetensors", stream_options=store.arguments)


def test_only_uploads_over_https_need_certificates(store, monkeypatch):
    for name in ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(http_options, "_found", None)
    nothing = ssl.get_default_verify_paths()._replace(cafile=None, capath=None)  # a machine that has none
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: nothing)
    monkeypatch.setattr(http_options, "_of_certifi", lambda: None)
    expected = state()
    save(store, expected)
    loads(store, expected)
    for endpoint in ("https://127.0.0.1:1", "HTTPS://127.0.0.1:1"):
        with pytest.raises(StreamError, match="no certificate to trust"):
            save(store, expected, s3_endpoint=endpoint, force_http=False)


def test_a_key_with_the_names_of_folders_above_is_read_as_it_stands_also_where_nothing_is_signed(store):
    store.objects.update({"/bucket/key": b"another", "/bucket/dir/../key": b"wanted"})
    nobody = {"s3_access_key_id": "", "s3_secret_access_key": ""}
    with open_stream("s3://bucket/dir/../key", **{**store.arguments, **nobody}) as stream:
        assert stream.read() == b"wanted"


def test_all_requests_go_by_the_proxy_of_the_settings_and_none_to_hosts_without_one(monkeypatch):
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    expected = state()
    with S3Recorder() as proxy:
        options = HTTPOptions(proxy=proxy.endpoint)
        save(proxy, expected, s3_endpoint="http://store.invalid", http_options=options)
        loads(proxy, expected, s3_endpoint="http://store.invalid", http_options=options)
    with S3Recorder() as store:
        nobody = "http://127.0.0.1:9"
        monkeypatch.setenv("http_proxy", nobody)
        save(store, expected, http_options=HTTPOptions(proxy=""))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        save(store, expected)
        save(store, expected, http_options=HTTPOptions(proxy=nobody))
        assert len(store.of("CompleteMultipartUpload")) == 3


class TestStreamsOfSerializers:
    def test_a_new_stream_is_taken_over_and_goes_up_in_parts_without_a_file(self, store):
        for number, mode in enumerate(("wb+", "wb")):
            expected = state(seed=number)
            with open_stream(f"s3://bucket/{mode}", mode, **store.arguments) as stream:
                serializer = TensorSerializer(stream)
                serializer.write_state_dict(expected)
                assert f"/bucket/{mode}" not in store.objects
                assert temporary_files() == []
                serializer.close()
            loads(store, expected, f"s3://bucket/{mode}")
        assert len(store.of("UploadPart")) > 2 * 5
        assert store.of("PutObject") == []

    def test_closing_the_stream_completes_what_an_unclosed_serializer_wrote(self, store):
        expected = state()
        with open_stream("s3://bucket/kept", "wb+", **store.arguments) as stream:
            serializer = TensorSerializer(stream)
            serializer.write_state_dict(expected)
        loads(store, expected, "s3://bucket/kept")
        serializer.close()
        stream.close()
        with open_stream("s3://bucket/collected", "wb+", **store.arguments) as stream:
            TensorSerializer(stream).write_state_dict(expected)
            gc.collect()
        loads(store, expected, "s3://bucket/collected")

    def test_a_failure_leaves_the_old_object_and_no_upload(self, store):
        def in_stream(stream):
            with stream:
                TensorSerializer(stream).write_state_dict(state())
                raise RuntimeError("on purpose")

        def in_serializer(stream):
            with TensorSerializer(stream) as serializer:
                serializer.write_state_dict(state())
                raise RuntimeError("on purpose")

        def in_call(stream):
            with stream:
                TensorSerializer(stream).write_state_dict({"a": tensor((PART,), torch.float32), "b": "no tensor"})

        def before_a_call(stream):
            with stream:
                TensorSerializer(stream)

        for fails in (in_stream, in_serializer, in_call, before_a_call):
            store.objects["/bucket/old"] = b"old"
            with contextlib.suppress(RuntimeError, TypeError):
                fails(open_stream("s3://bucket/old", "wb+", **store.arguments))
            gc.collect()
            assert store.objects["/bucket/old"] == b"old", fails.__name__
            assert store.open_uploads == {}, fails.__name__
            assert temporary_files() == []

    def test_a_store_that_fails_a_part_makes_close_raise_and_stores_nothing(self, store):
        store.refuse_all["UploadPart"] = (403, "AccessDenied")
        stream = open_stream("s3://bucket/denied", "wb+", **store.arguments)
        serializer = TensorSerializer(stream)
        with pytest.raises(StreamError, match="AccessDenied"):
            self.write_and_close(serializer, state(12))
        with contextlib.suppress(StreamError):
            stream.close()
        assert store.objects == store.open_uploads == {}

    def write_and_close(self, serializer, tensors):
        serializer.write_state_dict(tensors)
        serializer.close()

    def test_a_stream_that_was_written_to_keeps_its_file(self, store):
        with open_stream("s3://bucket/by-hand", "wb+", **store.arguments) as stream:
            stream.write(b"front")
            with TensorSerializer(stream) as serializer:
                serializer.write_state_dict(state(1))
        assert store.objects["/bucket/by-hand"].startswith(b"front|TZR|")

    def test_a_stream_that_was_only_looked_at_is_taken_over(self, store):
        expected = state()
        stream = open_stream("s3://bucket/looked-at", "wb+", **store.arguments)
        assert (stream.seek(0), stream.tell(), stream.seekable(), os.fstat(stream.fileno()).st_size) == (0, 0, True, 0)
        with TensorSerializer(stream) as serializer:
            serializer.write_state_dict(expected)
            assert temporary_files() == []
        loads(store, expected, "s3://bucket/looked-at")

    def test_a_stream_of_a_serializer_can_only_be_closed(self, store):
        with open_stream("s3://bucket/taken", "wb+", **store.arguments) as stream:
            TensorSerializer(stream)
            assert (stream.readable(), stream.writable(), stream.seekable()) == (False, False, False)
            for use in (stream.tell, lambda: stream.seek(0), lambda: stream.name, lambda: stream.write(b"x")):
                with pytest.raises(io.UnsupportedOperation, match="s3://bucket/taken"):
                    use()
            with pytest.raises(ValueError, match="s3://bucket/taken"):
                TensorSerializer(stream)

    def test_memory_is_bounded_as_with_a_uri(self, store):
        stream = open_stream("s3://bucket/bounded", "wb+", memory_budget=4 * PART, **store.arguments)
        sink = stream.take_over()
        data = os.urandom(40 * PART)
        sink.reserve(len(data))
        for at in range(0, len(data), PART):
            sink.write_at(at, data[at : at + PART])
        sink.publish(len(data))
        stream.close()
        assert sink.peak_nbytes <= 4 * PART
        assert store.objects["/bucket/bounded"] == data


class TestStreamsByHand:
    @pytest.mark.parametrize("mode", ["ab", "ab+", "ba", "a+b", "a"])
    def test_an_object_cannot_be_appended_to_and_stays_as_it_is(self, store, mode):
        store.objects["/bucket/log"] = b"old"
        with pytest.raises(ValueError, match="cannot be appended to"):
            open_stream("s3://bucket/log", mode, **store.arguments)
        assert store.objects == {"/bucket/log": b"old"}
        assert store.requests == []

    def test_a_stream_that_was_never_written_uploads_nothing(self, store):
        store.objects["/bucket/old"] = b"old"
        for mode in ("wb", "wb+"):
            with open_stream("s3://bucket/old", mode, **store.arguments):
                pass
            stream = open_stream("s3://bucket/old", mode, **store.arguments)
            stream.seek(0)
            del stream
            gc.collect()
        assert store.objects == {"/bucket/old": b"old"}
        assert temporary_files() == []

    def test_an_empty_object_is_stored_by_an_empty_write(self, store):
        with open_stream("s3://bucket/empty", "wb", **store.arguments) as stream:
            stream.write(b"")
        assert store.objects == {"/bucket/empty": b""}

    def test_what_was_written_through_the_descriptor_is_uploaded(self, store):
        with open_stream("s3://bucket/descriptor", "wb", **store.arguments) as stream:
            os.write(stream.fileno(), b"abc")
        assert store.objects == {"/bucket/descriptor": b"abc"}

    def test_a_stream_that_is_collected_while_an_exception_is_handled_uploads_nothing(self, store, caplog):
        def fail():
            stream = open_stream("s3://bucket/half", "wb", **store.arguments)
            stream.write(b"half")
            raise RuntimeError("on purpose")

        try:
            fail()
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # which held the stream
            gc.collect()
        assert store.objects == {}
        assert "s3://bucket/half" in caplog.text

    def test_a_stream_of_an_exception_handler_is_uploaded(self, store):
        try:
            raise RuntimeError("on purpose")
        except RuntimeError:
            stream = open_stream("s3://bucket/fallback", "wb", **store.arguments)
            stream.write(b"x")
            owned = [stream]
            del stream
            with pytest.warns(ResourceWarning, match="s3://bucket/fallback: the stream was not closed"):
                owned.clear()
        assert store.objects == {"/bucket/fallback": b"x"}

    @pytest.mark.parametrize("mode", ["wb", "wb+"])
    def test_a_stream_that_is_forgotten_is_stored_and_said_aloud(self, store, caplog, mode):
        def fail():
            stream = open_stream("s3://bucket/half", mode, **store.arguments)
            stream.write(b"half")
            raise RuntimeError("on purpose")

        told = pytest.warns(ResourceWarning, match="s3://bucket/half: the stream was not closed")
        with told, contextlib.suppress(RuntimeError):
            fail()
        assert store.objects == {"/bucket/half": b"half"}
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("tensorizer.stream_io", logging.WARNING)
        assert "s3://bucket/half" in record.getMessage()
        assert SECRET not in caplog.text

    def test_a_generator_that_raises_inside_writelines_ends_the_stream(self, store, caplog):
        def lines():
            yield b"half"
            raise KeyError("on purpose")

        stream = open_stream("s3://bucket/lines", "wb", **store.arguments)
        with pytest.raises(KeyError):
            stream.writelines(lines())
        assert stream.closed
        stream.close()
        assert store.objects == {}
        assert "s3://bucket/lines: nothing will be stored, as KeyError ended a write" in caplog.text
        with pytest.raises(ValueError, match="closed"):
            stream.write(b"more")


END = """
import sys, torch, tensorizer, warnings
warnings.simplefilter("always")
from tensorizer.stream_io import open_stream
options = dict(s3_access_key_id=sys.argv[1], s3_secret_access_key=sys.argv[2], s3_endpoint=sys.argv[3], force_http=True)
how, ending = sys.argv[4:]
if how == "hand":
    stream = open_stream("s3://bucket/key", "wb", **options)
    stream.write(b"new")
elif how == "stream":
    writer = tensorizer.TensorSerializer(open_stream("s3://bucket/key", "wb+", **options))
    writer.write_state_dict({"a": torch.ones(10)})
else:
    writer = tensorizer.TensorSerializer("s3://bucket/key", stream_options=options)
    writer.write_state_dict({"a": torch.ones(10)})
if ending == "exception": raise RuntimeError("on purpose")
"""


@pytest.fixture
def run_to_the_end(fresh_process, store):
    return lambda how, ending: (
        fresh_process(END, store.access_key, store.secret_key, store.endpoint, how, ending).stderr
    )


class TestUnclosed:
    def test_a_forgotten_serializer_of_a_uri_says_that_nothing_was_stored(self, store, caplog):
        serializer = TensorSerializer("s3://bucket/forgotten", stream_options=store.arguments)
        serializer.write_state_dict(state())
        owned = [serializer]
        del serializer
        with pytest.warns(ResourceWarning, match="s3://bucket/forgotten"):
            owned.clear()
        assert "s3://bucket/forgotten" in caplog.text
        assert SECRET not in caplog.text
        assert store.objects == store.open_uploads == {}

    def test_serializers_that_ended_say_nothing(self, store, caplog):
        def failed():
            with TensorSerializer("s3://bucket/failed", stream_options=store.arguments) as serializer:
                serializer.write_state_dict(state())
                raise RuntimeError("on purpose")

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(store, state())
            with contextlib.suppress(RuntimeError):
                failed()
            gc.collect()
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    def test_the_end_of_the_interpreter_says_it_too(self, store, run_to_the_end):
        store.objects["/bucket/key"] = b"old"
        shown = run_to_the_end("uri", "exit")
        assert "ResourceWarning" in shown
        assert shown.count("s3://bucket/key") >= 2, "a warning and a line in the log"
        assert store.objects == {"/bucket/key": b"old"}

    def test_an_exception_that_ends_the_program_uploads_nothing(self, store, run_to_the_end):
        for how in ("hand", "stream", "uri"):
            store.objects["/bucket/key"] = b"old"
            assert "on purpose" in run_to_the_end(how, "exception")
            assert store.objects == {"/bucket/key": b"old"}, how
            assert store.open_uploads == {}

    def test_streams_that_are_open_at_the_end_are_completed(self, store, run_to_the_end):
        for how in ("hand", "stream"):
            store.objects["/bucket/key"] = b"old"
            shown = run_to_the_end(how, "exit")
            assert store.objects["/bucket/key"] != b"old"
            assert "ResourceWarning" in shown
            assert shown.count("s3://bucket/key: the stream was not closed") == 2, "a warning and a line in the log"


class TestParts:
    def test_as_many_parts_go_at_the_same_time_as_there_are_connections(self, store):
        store.hold_parts = 32
        expected = state(60)
        save(store, expected, http_options=HTTPOptions(connections=32))
        assert store.most_parts == 32
        store.hold_parts = 0
        loads(store, expected)

    def test_memory_follows_the_connections(self, store):
        data = os.urandom(60 * PART)
        for connections in (1, 8, 32):
            options = HTTPOptions(connections=connections)
            arguments = {"http_options": options, **store.arguments}
            sink = stream_io.open_stream("s3://bucket/memory", "wb", **arguments).detach_sink()
            sink.reserve(len(data))
            for at in range(0, len(data), PART):
                sink.write_at(at, data[at : at + PART])
            sink.publish(len(data))
            sink.finish()
            sink.finish()
            assert sink.peak_nbytes <= (connections + 2) * PART
            assert store.objects["/bucket/memory"] == data


class TestChecksums:
    def test_each_part_and_each_whole_object_carries_its_crc32(self, store):
        save(store, state())
        save(store, {"a": torch.ones(3)}, "s3://bucket/small")
        sent = store.of("UploadPart") + store.of("PutObject")
        assert len(sent) > 5
        for request in sent:
            assert request.headers["x-amz-checksum-crc32"] == crc32_of(request.body)
            assert "x-amz-checksum-crc32" in request.query["X-Amz-SignedHeaders"]
        assert store.of("CreateMultipartUpload")[0].headers["x-amz-checksum-algorithm"] == "CRC32"
        complete = store.of("CompleteMultipartUpload")[0].body.decode()
        for request in store.of("UploadPart"):
            assert f"<ChecksumCRC32>{request.headers['x-amz-checksum-crc32']}</ChecksumCRC32>" in complete

    def test_a_store_that_compares_nothing_gets_no_checksums_at_the_end(self, store):
        store.echoes_checksums = False
        save(store, state())
        assert b"Checksum" not in store.of("CompleteMultipartUpload")[0].body

    def test_a_part_that_was_altered_on_the_way_is_sent_again(self, store):
        store.fail_once["UploadPart"] = (400, "BadDigest")
        expected = state()
        save(store, expected, http_options=tuned(first_retry_delay=0.01))
        loads(store, expected)

    def test_a_store_that_refuses_checksums_gets_none_from_then_on(self, store):
        for operation, answer in (
            ("CreateMultipartUpload", (501, "NotImplemented")),
            ("UploadPart", (501, "NotImplemented")),
            ("UploadPart", (400, "InvalidArgument")),
            ("PutObject", (400, "InvalidRequest")),
            ("CreateMultipartUpload", (403, "SignatureDoesNotMatch")),
            ("CreateMultipartUpload", (400, "UnsupportedHeader")),
            ("UploadPart", (403, "AccessDenied")),
            ("UploadPart", (405, "MethodNotAllowed")),
            ("UploadPart", (400, "XNotKnown")),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tensorizer._io.s3.upload._without_checksums", set())
                store.refuse = {operation: answer}
                expected = state() if operation != "PutObject" else {"a": torch.ones(2)}
                save(store, expected)
                store.requests.clear()
                save(store, expected)
                loads(store, expected)
                assert not [r for r in store.requests if any("checksum" in field for field in r.headers)], operation
                assert store.open_uploads == {}

    def test_a_whole_object_that_is_refused_with_any_code_is_tried_without_its_checksum(self, store):
        for status, code in ((403, "SignatureDoesNotMatch"), (400, "XNotKnown"), (422, "Unprocessable")):
            store.refuse = {"PutObject": (status, code)}
            expected = {"a": torch.full((2,), float(status))}
            save(store, expected)
            loads(store, expected)

    def test_what_is_refused_without_checksums_too_is_an_error_that_names_them_and_turns_none_off(self, store):
        for operation, expected in (
            ("CreateMultipartUpload", state()),
            ("UploadPart", state()),
            ("PutObject", {"a": torch.ones(2)}),
        ):
            store.refuse_all = {operation: (403, "AccessDenied")}
            with pytest.raises(StreamError, match=r"AccessDenied.*checksum.*AccessDenied") as caught:
                save(store, expected)
            assert caught.value.status == 403
            assert s3_code(caught.value.__cause__) in ("", "AccessDenied")
            assert len(store.of(operation)) >= 2
            store.refuse_all = {}
            store.requests.clear()
            save(store, expected)
            assert any("x-amz-checksum-crc32" in r.headers for r in store.requests), operation
        assert store.open_uploads == {}

    def test_a_refusal_that_is_about_something_else_is_tried_once(self, store):
        for status, code in ((404, "NoSuchBucket"), (412, "PreconditionFailed"), (403, "InvalidAccessKeyId")):
            store.refuse_all = {"CreateMultipartUpload": (status, code)}
            store.requests.clear()
            with pytest.raises(StreamError, match=code) as caught:
                save(store, state())
            assert "checksum" not in str(caught.value)
            assert len(store.of("CreateMultipartUpload")) == 1

    def test_the_aws_variable_turns_them_off(self, store, monkeypatch):
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "WHEN_REQUIRED")
        save(store, state())
        assert not [r for r in store.requests if any("checksum" in field for field in r.headers)]

    def test_the_aws_configuration_file_turns_them_off_and_insists(self, store, tmp_path):
        (tmp_path / "aws-config").write_text("[default]\nrequest_checksum_calculation = when_required\n")
        save(store, state())
        assert not [r for r in store.requests if any("checksum" in field for field in r.headers)]
        (tmp_path / "aws-config").write_text("[default]\nrequest_checksum_calculation = when_supported\n")
        store.refuse = {"UploadPart": (501, "NotImplemented")}
        with pytest.raises(StreamError, match="NotImplemented"):
            save(store, state())

    def test_a_value_that_botocore_does_not_know_is_botocores_error(self, store, monkeypatch):
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "sometimes")
        with pytest.raises(botocore.exceptions.BotoCoreError, match="sometimes"):
            save(store, state())

    def test_uploads_of_files_follow_the_variable_as_botocore_does(self, store, monkeypatch):
        def upload():
            store.requests.clear()
            with open_stream("s3://bucket/file", "wb", **store.arguments) as stream:
                stream.write(b"abc")
            return any("checksum" in field for field in store.of("PutObject")[0].headers)

        assert not upload()
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
        assert upload()


@pytest.mark.parametrize("named", ["by the settings", "by the environment"])
def test_a_proxy_that_boto3_does_not_know_is_told_of_without_its_password(monkeypatch, named):
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxy = "socks5://user:topsecret@127.0.0.1:1"
    arguments = {"s3_access_key_id": KEY, "s3_secret_access_key": SECRET, "s3_endpoint": "store.invalid"}
    options = HTTPOptions(proxy=proxy if named == "by the settings" else None)
    if named == "by the environment":
        monkeypatch.setenv("http_proxy", proxy)
    stream = open_stream("s3://bucket/hand", "wb", force_http=True, http_options=options, **arguments)
    stream.write(b"x")
    with pytest.raises(botocore.exceptions.ProxyConnectionError, match=r"127\.0\.0\.1:1") as caught:
        stream.close()
    assert "topsecret" not in "".join(traceback.format_exception(caught.type, caught.value, caught.tb))


class TestAnswersOfOtherServers:
    """A gateway or a login page answers everything, and stores nothing."""

    ANSWERS = (
        (200, {}, b""),
        (200, {}, b"<html>login</html>"),
        (200, {}, b"<!DOCTYPE html><p>login"),
        (200, {"ETag": ""}, b""),
        (204, {}, b""),
    )

    @pytest.fixture(autouse=True, params=["our own client", "new clients of a program", "one client of a program"])
    def clients(self, request, monkeypatch, store):
        if request.param == "our own client":
            return

        def make_client():
            settings = {"endpoint_url": store.endpoint, "region_name": "us-east-1"}
            keys = {"aws_access_key_id": store.access_key, "aws_secret_access_key": store.secret_key}
            return boto3.client("s3", **settings, **keys)

        one = make_client()
        factory = make_client if request.param == "new clients of a program" else lambda: one
        monkeypatch.setattr(S3Recorder, "arguments", property(lambda self: {"s3_client_factory": factory}))

    def answer(self, monkeypatch, store, operation, answer):
        monkeypatch.setattr(store, f"_{operation}", lambda request: answer)
        store.requests.clear()

    def test_a_small_object_that_was_not_stored_is_an_error(self, store, monkeypatch):
        for answer in (*self.ANSWERS, (200, {}, b"<Error><Code>InternalError</Code></Error>")):
            self.answer(monkeypatch, store, "PutObject", answer)
            with pytest.raises(StreamError, match=r"s3://bucket/model .*no ETag; the server does not speak S3"):
                save(store, {"a": torch.ones(2)})
            assert [request.operation for request in store.requests] == ["PutObject"], answer

    def test_a_stream_by_hand_that_was_not_stored_is_an_error(self, store, monkeypatch):
        for answer in ((200, {}, b""), (204, {}, b"")):
            self.answer(monkeypatch, store, "PutObject", answer)
            stream = open_stream("s3://bucket/hand", "wb", **store.arguments)
            stream.write(b"x")
            with pytest.raises(StreamError, match=r"s3://bucket/hand .*no ETag; the server does not speak S3"):
                stream.close()

    def test_an_upload_that_was_not_completed_is_an_error_and_aborted(self, store, monkeypatch):
        cases = [(operation, a) for operation in ("CompleteMultipartUpload", "UploadPart") for a in self.ANSWERS]
        for operation, answer in [*cases, ("UploadPart", (200, {"ETag": '"\xe9"'}, b""))]:
            with monkeypatch.context() as patch:
                self.answer(patch, store, operation, answer)
                with pytest.raises(StreamError, match=r"s3://bucket/model "):
                    save(store, state())
                assert len(store.of("AbortMultipartUpload")) == 1, (operation, answer)
                assert store.open_uploads == store.objects == {}

    def test_an_upload_that_is_gone_is_complete_only_if_the_object_is_that_of_its_parts(self, store, monkeypatch):
        old, new = state(), state(seed=100)
        save(store, old)
        store.fail_once["CompleteMultipartUpload"] = 404, "NoSuchUpload"
        with pytest.raises(StreamError, match=r"Failed to complete the upload of s3://bucket/model .*NoSuchUpload"):
            save(store, new)  # the old object has as many parts
        loads(store, old)
        complete = store._CompleteMultipartUpload

        def lose_the_answer(request):
            answer = complete(request)
            return (500, {}, b"") if answer[0] == 200 else answer

        monkeypatch.setattr(store, "_CompleteMultipartUpload", lose_the_answer)
        save(store, new)
        loads(store, new)

    def test_an_upload_that_never_began_is_a_stream_error(self, store, monkeypatch):
        for answer in self.ANSWERS:
            self.answer(monkeypatch, store, "CreateMultipartUpload", answer)
            with pytest.raises(StreamError, match=r"Failed to begin the upload of s3://bucket/model "):
                save(store, state())
            assert {request.operation for request in store.requests} == {"CreateMultipartUpload"}, answer

    def test_a_list_that_is_none_or_is_not_whole_is_an_error(self, store, monkeypatch):
        store.objects["/bucket/folder/a"] = b"x"
        folder = S3Prefix("s3://bucket/folder", CallOptions.to_write(stream_options=store.arguments))
        assert folder.names() == ["a"]
        cut = b"<ListBucketResult><IsTruncated>true</IsTruncated><NextMarker>b</NextMarker></ListBucketResult>"
        for answer in (*self.ANSWERS, (200, {}, cut), (206, {}, b"<ListBucketResult><IsTruncated>fal")):
            self.answer(monkeypatch, store, "ListObjectsV2", answer)
            with pytest.raises(StreamError, match=r"Failed to list s3://bucket/folder/_ ") as caught:
                folder.names()
            assert "\n" not in str(caught.value)


class TestInterrupts:
    def test_ctrl_c_ends_a_save_that_a_silent_store_holds_up(self, store, monkeypatch, caplog):
        released = threading.Event()

        def be_silent(request):
            released.wait(60)
            return 500, {}, b""

        def be_silent_and_interrupt(request):
            if not interrupted.is_set():
                interrupted.set()
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            return be_silent(request)

        for operation, aborts in (
            ("CreateMultipartUpload", False),
            ("CompleteMultipartUpload", True),
            ("CompleteMultipartUpload", False),
        ):
            interrupted = threading.Event()
            with monkeypatch.context() as patch:
                patch.setattr(store, f"_{operation}", be_silent_and_interrupt)
                if not aborts:
                    patch.setattr("tensorizer._io.s3.upload.ABORT_SECONDS", 0.5)
                    patch.setattr(store, "_AbortMultipartUpload", be_silent)
                started = time.monotonic()
                with pytest.raises(KeyboardInterrupt):
                    save(store, state())
                assert time.monotonic() - started < 10, operation
                assert store.objects == {}
                if aborts:
                    assert store.open_uploads == {}
        released.set()
        assert "the store does not answer, parts of the upload may stay" in caplog.text


class TestExtraArguments:
    CUSTOMER = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": KEY}  # noqa: RUF012

    def test_reads_are_signed_with_them(self, store):
        expected = state(40)
        save(store, expected)
        store.requests.clear()
        extra = {"get": {"VersionId": "v7", "RequestPayer": "requester", **self.CUSTOMER}}
        options = tuned(head_nbytes=1000)
        loads(store, expected, s3_extra_args=extra, http_options=options)
        assert len(store.of("GetObject")) > 1
        for request in store.of("GetObject"):
            assert request.query["versionId"] == "v7"
            assert request.headers["x-amz-request-payer"] == "requester"
            assert (
                request.headers["x-amz-server-side-encryption-customer-key"] == base64.b64encode(KEY.encode()).decode()
            )
            assert "x-amz-server-side-encryption-customer-key-md5" in request.query["X-Amz-SignedHeaders"]

    def test_a_version_in_the_uri_is_read(self, store):
        expected = state(1)
        save(store, expected)
        loads(store, expected, "s3://bucket/model?versionId=abc%2B1")
        assert {request.query["versionId"] for request in store.of("GetObject")} == {"abc+1"}
        with open_stream("s3://bucket/model?versionId=abc", **store.arguments) as stream:
            assert "versionId=abc" in repr(stream)

    def test_a_version_cannot_be_written(self, store):
        for write in (open_stream, TensorSerializer):
            with pytest.raises(ValueError, match="versionId=abc"):
                write(
                    "s3://bucket/model?versionId=abc",
                    **({"mode": "wb", **store.arguments} if write is open_stream else {}),
                )

    def test_writes_send_each_where_it_belongs(self, store):
        extra = {
            "StorageClass": "STANDARD_IA",
            "IfNoneMatch": "*",
            "RequestPayer": "requester",
            "Metadata": {"made-by": "x"},
            **self.CUSTOMER,
        }
        save(store, state(), s3_extra_args={"put": extra})
        save(store, {"a": torch.ones(2)}, "s3://bucket/small", s3_extra_args={"put": extra})
        customer = "x-amz-server-side-encryption-customer-key"
        wanted = {
            "CreateMultipartUpload": {"x-amz-storage-class", "x-amz-request-payer", "x-amz-meta-made-by", customer},
            "UploadPart": {"x-amz-request-payer", customer},
            "CompleteMultipartUpload": {"if-none-match", "x-amz-request-payer", customer},
            "PutObject": {
                "x-amz-storage-class",
                "if-none-match",
                "x-amz-request-payer",
                "x-amz-meta-made-by",
                customer,
            },
        }
        every = set().union(*wanted.values())
        for operation, names in wanted.items():
            assert store.of(operation)
            for request in store.of(operation):
                assert set(request.headers) & every == names, operation
        with open_stream(
            "s3://bucket/file", "wb", s3_extra_args={"put": {"StorageClass": "X"}}, **store.arguments
        ) as file:
            file.write(b"x")
        assert store.of("PutObject")[-1].headers["x-amz-storage-class"] == "X"

    def test_an_object_that_is_there_is_not_replaced(self, store):
        store.fail_once["CompleteMultipartUpload"] = (412, "PreconditionFailed")
        with pytest.raises(StreamError, match="PreconditionFailed"):
            save(store, state(), s3_extra_args={"put": {"IfNoneMatch": "*"}})
        assert store.objects == store.open_uploads == {}

    def test_signatures_of_version_2_and_anonymous_requests_carry_them_too(self, store):
        store.objects["/bucket/k"] = b"abc"
        extra = {"get": {"RequestPayer": "requester"}}
        with open_stream("s3://bucket/k", s3_signature_version="s3", s3_extra_args=extra, **store.arguments):
            pass
        assert store.requests[-1].query["x-amz-request-payer"] == "requester"
        keys = {"s3_access_key_id": "", "s3_secret_access_key": ""}
        with open_stream("s3://bucket/k", s3_extra_args=extra, **{**store.arguments, **keys}):
            pass
        assert store.requests[-1].headers["x-amz-request-payer"] == "requester"
        assert store.requests[-1].query == {}

    def test_unknown_names_are_refused_before_anything_is_asked(self, store):
        for mode, extra, named in (
            ("rb", {"get": {"VersionID": "x"}}, "VersionID"),
            ("rb", {"get": {"Range": "bytes=0-1"}}, "Range"),
            ("wb", {"put": {"VersionId": "x"}}, "VersionId"),
            ("wb", {"put": {"Body": b""}}, "Body"),
            ("wb", {"put": {"ChecksumSHA256": "x"}}, "ChecksumSHA256"),
            ("wb", {"PUT": {}}, "PUT"),
        ):
            with pytest.raises(ValueError, match=named):
                open_stream("s3://bucket/k", mode, s3_extra_args=extra, **store.arguments)
        with pytest.raises(TypeError, match="s3_extra_args"):
            open_stream("s3://bucket/k", s3_extra_args={"get": "VersionId"}, **store.arguments)
        assert store.requests == []

    def test_customer_keys_are_not_shown(self, store, caplog):
        caplog.set_level(logging.DEBUG, "tensorizer")
        with pytest.raises(OSError) as caught:
            open_stream("s3://bucket/none", s3_extra_args={"get": self.CUSTOMER}, **store.arguments)
        assert KEY not in repr(caught.value) + str(caught.value) + caplog.text


class TestExpress:
    BUCKET = "models--usw2-az1--x-s3"

    def test_requests_are_signed_for_a_session_as_botocore_does(self, store):
        expected = state(20)
        options = {"s3_region_name": "us-west-2"}
        save(store, expected, f"s3://{self.BUCKET}/model", **options)
        loads(store, expected, f"s3://{self.BUCKET}/model", **options)
        signed = store.of("GetObject") + store.of("UploadPart")
        assert len(signed) > 2
        for request in signed:
            assert request.query["X-Amz-Credential"].split("/")[0] == store.session_key
            assert request.query["X-Amz-Credential"].endswith("/us-west-2/s3express/aws4_request")
            assert request.query["X-Amz-S3session-Token"] == store.session_token
        assert store.of("CreateSession")


NAMES = ["run#1", "lr=1e-4?seed=1", "/lead", "a//b", "what?", "k?versionId=1/x", "a?b=c&d#e"]


@pytest.mark.parametrize("name", NAMES)
class TestKeys:
    """``#``, ``?`` and slashes are characters of keys like others."""

    def test_an_object_has_the_key_that_its_uri_names(self, store, name):
        store.objects["/bucket/run"] = store.objects["/bucket/what"] = store.objects["/bucket/lead"] = b"precious"
        before = dict(store.objects)
        save(store, state(1), f"s3://bucket/{name}/small.tensors")
        save(store, state(6), f"s3://bucket/{name}/large.tensors")
        with open_stream(f"s3://bucket/{name}/by hand", "wb", **store.arguments) as stream:
            stream.write(b"1")
        written = {f"/bucket/{name}/{file}" for file in ("small.tensors", "large.tensors", "by hand")}
        assert store.objects.keys() == before.keys() | written
        assert {path: store.objects[path] for path in before} == before
        loads(store, state(1), f"s3://bucket/{name}/small.tensors")
        with pytest.raises(FileNotFoundError) as caught:
            open_stream(f"s3://bucket/{name}/none", **store.arguments)
        assert f"s3://bucket/{name}/none " in str(caught.value)

    @has_checkpoints
    def test_a_checkpoint_is_below_the_prefix_that_the_uri_names(self, store, name):
        checkpoint = pytest.importorskip("torch.distributed.checkpoint")
        from tensorizer.distributed import TensorizerReader, TensorizerWriter

        store.objects["/bucket/run"] = b"precious"
        for value in (1.0, 2.0):  # the second removes the files of the first
            writer = TensorizerWriter(f"s3://bucket/{name}", stream_options=store.arguments)
            checkpoint.save({"a": torch.full((3,), value)}, storage_writer=writer)
        target = {"a": torch.zeros(3)}
        reader = TensorizerReader(f"s3://bucket/{name}/", stream_options=store.arguments)
        checkpoint.load(target, storage_reader=reader)
        assert target["a"].tolist() == [2.0] * 3
        assert store.objects.pop("/bucket/run") == b"precious"
        assert len(store.objects) == 2
        assert all(path.startswith(f"/bucket/{name}/") for path in store.objects)

    def test_two_names_are_two_objects_of_a_cache(self, store, name, tmp_path):
        store.objects.update({f"/bucket/{name}/x?1": b"one", f"/bucket/{name}/x?2": b"two"})
        for _ in range(2):
            for number, content in (("1", b"one"), ("2", b"two")):
                with open_stream(f"s3://bucket/{name}/x?{number}", cache=tmp_path, **store.arguments) as stream:
                    assert stream.read() == content


@pytest.mark.parametrize(
    "name", [n if n in ("a?b=c&d#e", "/lead") else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_shards_and_what_lies_beside_them_are_below_the_prefix_that_the_uri_names(store, tmp_path, name):
    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(3)}
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "m.safetensors")
    where = {"stream_options": store.arguments}
    for target in (f"s3://bucket/{name}/", f"s3://bucket/{name}/model.tensors"):
        for size in (4096, None, "1GB"):
            options = {"max_shard_size": size, "all_files": True, **where}
            if size == "1GB":  # the shards of the first are another form of it
                with pytest.raises(StreamExistsError, match="another form"):
                    convert(tmp_path / "m.safetensors", target, format="tensors", **options)
                store.objects.clear()
            report = convert(tmp_path / "m.safetensors", target, format="tensors", **options)
            assert all(file.startswith(f"s3://bucket/{name}/model") for file in report["files"])
            prefixes = [f"s3://bucket/{name}", f"s3://bucket/{name}/"]
            if size is None:  # a save to one named file removes no other one
                assert f"/bucket/{name}/model.tensors.index.json" in store.objects
                for prefix in prefixes:
                    with pytest.raises(FormatError, match="found both model"):
                        TensorDeserializer(prefix, device="cpu", **where)
                prefixes = []
            for place in (*prefixes, report["files"][-1]):
                with TensorDeserializer(place, device="cpu", **where) as file:
                    assert_same(dict(file.items()), tensors)
            if size is None:
                del store.objects[f"/bucket/{name}/model.tensors"]
        assert f"/bucket/{name}/model.tensors.index.json" not in store.objects
        assert store.objects[f"/bucket/{name}/config.json"] == b"{}"
        assert all(path.startswith(f"/bucket/{name}/") for path in store.objects)
        store.objects.clear()


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Llama-3.1-8B.v2", "org/Phi-3.5", "x.tensors.d"])
def test_a_folder_with_a_dot_in_its_name_is_a_prefix(store, name):
    for size, file in ((None, "model.safetensors"), (4096, "model.tensors")):
        store.objects.clear()
        save_file(state(1), f"s3://bucket/{name}/{file}", max_shard_size=size, stream_options=store.arguments)
        for place, options in ((f"s3://bucket/{name}", store.arguments), (f"{store.endpoint}/bucket/{name}", None)):
            for slash in ("", "/"):
                assert_same(tensorizer.load_file(place + slash, stream_options=options), state(1))


def test_a_name_with_a_dot_may_be_a_file(store):
    store.objects["/bucket/m.v2"] = tensorizer.save(state(1))
    assert_same(tensorizer.load_file("s3://bucket/m.v2", stream_options=store.arguments), state(1))
    for name, requests in (("none.v2", 5), ("none.tensors", 1), ("none.safetensors.sig", 1)):
        store.requests.clear()
        with pytest.raises(FileNotFoundError, match=f"bucket/{name} "):
            tensorizer.load_file(f"s3://bucket/{name}", stream_options=store.arguments)
        assert len(store.requests) == requests


def test_what_can_be_no_object_of_a_store_is_a_value_error(store):
    from tensorizer.distributed import TensorizerWriter

    for uri in ("s3://", "s3:///key", "s3://bucket", "s3://bucket/", "s3://bucket/?versionId=1", "s3://bucket?x/key",
                "s3://bucket#1/key", "s3://bucket/key?versionId="):  # fmt: skip
        for door in (
            lambda uri: open_stream(uri, **store.arguments),
            lambda uri: open_stream(uri, "wb", **store.arguments),
            lambda uri: TensorSerializer(uri, stream_options=store.arguments),
            lambda uri: save_file(state(1), uri, stream_options=store.arguments),
        ):
            with pytest.raises(ValueError):
                door(uri)
    for uri in ("s3://", "s3:///key", "s3://bucket/dir?versionId=1"):
        with pytest.raises(ValueError):
            TensorizerWriter(uri)
    assert store.requests == []


def test_a_whole_bucket_is_a_prefix(store):
    for bucket in ("bucket", "my.bucket"):
        for place in (f"s3://{bucket}", f"s3://{bucket}/"):
            save(store, state(1), f"s3://{bucket}/model.tensors")
            with TensorDeserializer(place, device="cpu", stream_options=store.arguments) as file:
                assert_same(dict(file.items()), state(1))


def test_the_other_form_of_a_model_is_removed_whatever_the_case_of_the_scheme():
    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(3)}
    with S3Recorder() as store:
        for size in (4096, "1GB"):
            save_file(tensors, "S3://bucket/m.tensors", max_shard_size=size, stream_options=store.arguments)
            assert ("/bucket/m.tensors.index.json" in store.objects) == (size == 4096)


def test_the_other_form_of_a_model_is_removed_below_a_name_that_ends_with_a_slash_and_no_namesake_is():
    tensors, names = {"w": torch.ones(1000)}, ("/bucket/a/m.tensors.index.json", "/bucket/a//m.tensors.index.json")
    with S3Recorder() as store:
        store.objects.update(dict.fromkeys(names, b"{}"))
        save_file(tensors, "s3://bucket/a//m.tensors", max_shard_size="1GB", stream_options=store.arguments)
        assert sorted(store.objects) == ["/bucket/a//m.tensors", "/bucket/a/m.tensors.index.json"]


@pytest.fixture
def unlisted(store, monkeypatch):
    """A store whose keys may not list: it answers so for missing names, lest they learn which are there."""
    error = store._error
    monkeypatch.setattr(
        store, "_error", lambda *answer: error(403, "AccessDenied") if answer[0] == 404 else error(*answer)
    )
    monkeypatch.setattr(store, "_ListObjectsV2", lambda request: error(403, "AccessDenied"))
    return store


class TestKeysThatMayNotList:
    """403 for a name that is only tried is as good as 404."""

    def test_models_of_any_form_are_saved(self, unlisted, tmp_path):
        options = {"stream_options": unlisted.arguments}
        save_file({"w": torch.ones(1000)}, "s3://bucket/m.tensors", max_shard_size="1GB", **options)
        assert list(unlisted.objects) == ["/bucket/m.tensors"]
        convert("s3://bucket/m.tensors", "s3://bucket/new.tensors", force=False, **options)
        with pytest.raises(FileExistsError):
            convert("s3://bucket/m.tensors", "s3://bucket/new.tensors", force=False, **options)
        key = tensorizer.SigningKey.generate()
        tensorizer.sign("s3://bucket/m.tensors", key, **options)
        TensorDeserializer("s3://bucket/m.tensors", device="cpu", public_key=key.public_key, **options).close()
        with pytest.raises(AuthenticationError, match="403"):
            TensorDeserializer("s3://bucket/new.tensors", device="cpu", public_key=key.public_key, **options)

    @pytest.mark.parametrize("size", [4096, None])
    def test_prefixes_are_loaded(self, unlisted, size):
        tensors, options = {f"w{i}": torch.ones(1000) for i in range(3)}, {"stream_options": unlisted.arguments}
        for name in ("model.tensors", "model.safetensors"):
            unlisted.objects.clear()
            save_file(tensors, f"s3://bucket/dir/{name}", max_shard_size=size, **options)
            for place in ("s3://bucket/dir", "s3://bucket/dir/"):
                assert_same(tensorizer.load_file(place, **options), tensors)

    @has_checkpoints
    def test_checkpoints_are_written_and_looked_for(self, unlisted):
        checkpoint = pytest.importorskip("torch.distributed.checkpoint")
        from tensorizer.distributed import TensorizerReader, TensorizerWriter, dcp_default, is_complete

        options = {"stream_options": unlisted.arguments}
        assert not is_complete("s3://bucket/c", **options)
        state = {"a": torch.ones(3)}
        checkpoint.save(state, storage_writer=TensorizerWriter("s3://bucket/c", overwrite=False, **options))
        assert is_complete("s3://bucket/c", **options)
        with pytest.raises(BaseException, match="overwrite=False"):
            checkpoint.save(state, storage_writer=TensorizerWriter("s3://bucket/c", overwrite=False, **options))
        target = {"a": torch.zeros(3)}
        checkpoint.load(target, storage_reader=TensorizerReader("s3://bucket/c", **options))
        assert target["a"].tolist() == [1.0] * 3
        with dcp_default(reader=options), pytest.raises(BaseException, match="403"):
            checkpoint.load(target, checkpoint_id="s3://bucket/none")
        for name in list(unlisted.objects):
            if name.endswith(".tensors"):
                del unlisted.objects[name]
        assert not is_complete("s3://bucket/c", **options)

    def test_what_is_not_found_may_be_forbidden(self, unlisted):
        for place in ("s3://bucket/none", "s3://bucket/none/", "s3://bucket/none.tensors"):
            with pytest.raises(StreamError, match="403") as caught:
                tensorizer.load_file(place, stream_options=unlisted.arguments)
            assert caught.value.status == 403
            assert ".tensors" in place or "may not list the bucket" in str(caught.value)

    def test_wrong_keys_are_an_error_of_the_first_question(self, store, monkeypatch):
        from tensorizer.distributed import is_complete

        error = store._error
        for code in ("SignatureDoesNotMatch", "InvalidAccessKeyId", "RequestTimeTooSkewed"):
            monkeypatch.setattr(store, "_GetObject", lambda request, code=code: error(403, code))
            with pytest.raises(StreamError, match=code):
                is_complete("s3://bucket/c", stream_options=store.arguments)
            store.requests.clear()
            with pytest.raises(StreamError, match=code):
                tensorizer.load_file("s3://bucket/dir", stream_options=store.arguments)
            assert {request.path for request in store.requests} == {"/bucket/dir"}

    def test_from_pretrained_finds_its_files(self, unlisted, tmp_path):
        transformers = pytest.importorskip("transformers")
        from tensorizer.integrations.huggingface import from_pretrained, save_pretrained

        config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
        model = transformers.GPT2LMHeadModel(config)
        options = {"stream_options": unlisted.arguments}
        save_pretrained(model, "s3://bucket/model#1", **options)
        loaded = from_pretrained("s3://bucket/model#1", **options)
        assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight)
        for name in list(unlisted.objects):
            if name.endswith(".tensors"):
                del unlisted.objects[name]
        for place in ("s3://bucket/model#1", "s3://bucket/none"):
            with pytest.raises(FileNotFoundError, match=r"403.*may not list"):
                from_pretrained(place, **options)

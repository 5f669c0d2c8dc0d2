"""S3 against a real object store: reads, uploads that stream, and that nothing half-written is left."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import resource
import tempfile
import threading
import time

import golden_files
import pytest
import torch
from conftest import open_descriptors, tcp_sockets, thread_count, threads_end
from http_tools import tuned
from samples import assert_same, tensor
from servers import needs
from servers.http_faults import FaultyServer, Reply
from servers.redis_server import free_port
from servers.s3_server import s3_is_installed

from tensorizer import TensorDeserializer, TensorSerializer, stream_io
from tensorizer.errors import StreamError, StreamNotFoundError
from tensorizer.stream_io import open_stream

botocore = pytest.importorskip("botocore")
pytest.importorskip("boto3")
pytestmark = [pytest.mark.skipif(not s3_is_installed(), reason=needs("OpenStack Swift")), pytest.mark.timeout(300)]

MIB = 1 << 20


@pytest.fixture(scope="module")
def store(s3_server):
    client = s3_server.client()
    client.create_bucket(Bucket="bucket")
    client.create_bucket(Bucket="public")
    client.put_bucket_acl(Bucket="public", ACL="public-read")
    s3_server.boto = client
    return s3_server


@pytest.fixture(autouse=True)
def no_other_credentials(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(stream_io, "_s3_default_config_paths", ())


@pytest.fixture
def small_parts(monkeypatch):
    """The smallest parts that S3 takes, so that small objects have many."""
    monkeypatch.setattr("tensorizer._io.s3.upload.MIN_PART_NBYTES", 5 * MIB)


def random_bytes(nbytes, seed=1):
    return random.Random(seed).randbytes(nbytes)


def exists(store, key, bucket="bucket"):
    found = store.boto.list_objects_v2(Bucket=bucket, Prefix=key).get("Contents", [])
    return any(item["Key"] == key for item in found)


def uploads(store):
    return [upload["Key"] for upload in store.boto.list_multipart_uploads(Bucket="bucket").get("Uploads", [])]


def state(mib, count=6, seed=0):
    """Tensors of about that many MiB together, some of them small."""
    each = mib * MIB // 4 // max(1, count - 2)
    tensors = {f"big.{i}": tensor((each,), torch.float32, seed=seed + i) for i in range(count - 2)}
    return {**tensors, "small": tensor((3, 5), torch.int16, seed=seed), "none": tensor((0, 4), torch.float16)}


def fail_inside(context, write):
    with context as opened:
        write(opened)
        raise RuntimeError("on purpose")


class TestReading:
    def test_an_object_is_read_in_pieces_and_whole(self, store):
        data = random_bytes(5 * MIB)
        store.boto.put_object(Bucket="bucket", Key="dir/a b ü", Body=data)
        with open_stream("s3://bucket/dir/a b ü", **store.arguments) as stream:
            assert stream.read(100) == data[:100]
            stream.seek(4 * MIB)
            assert stream.read(1000) == data[4 * MIB : 4 * MIB + 1000]
            stream.seek(0)
            assert stream.read() == data
        with open_stream("s3://bucket/dir/a b ü", begin=1000, end=3000, **store.arguments) as stream:
            assert stream.read() == data[1000:3000]

    @pytest.mark.parametrize("key", ["a/./b", "a/../b", "..", "d/..", "a//b", "a+b %20%", "a&b=c;d", "é\n\t'\"<>"])
    def test_a_key_is_used_as_it_stands(self, store, key):
        expected = state(1)
        with TensorSerializer(f"s3://bucket/{key}", stream_options=store.arguments) as serializer:
            serializer.write_state_dict(expected)
        assert exists(store, key)
        with TensorDeserializer(f"s3://bucket/{key}", device="cpu", stream_options=store.arguments) as file:
            assert_same(dict(file.items()), expected)
        store.boto.delete_object(Bucket="bucket", Key=key)

    def test_an_empty_object_is_read(self, store):
        store.boto.put_object(Bucket="bucket", Key="empty", Body=b"")
        with open_stream("s3://bucket/empty", **store.arguments) as stream:
            assert stream.read() == b""
            assert stream.seek(0, 2) == 0

    def test_a_missing_object_names_bucket_key_endpoint_and_source(self, store):
        with pytest.raises(StreamNotFoundError) as caught:
            open_stream("s3://bucket/not/there", **store.arguments)
        text = str(caught.value)
        for part in ("s3://bucket/not/there", f"127.0.0.1:{store.port}", "404", "NoSuchKey", "from the arguments"):
            assert part in text
        assert "X-Amz" not in text

    def test_wrong_keys_are_a_403_with_code_and_hint(self, store):
        store.boto.put_object(Bucket="bucket", Key="k", Body=b"x")
        with pytest.raises(OSError, match=r"403.*SignatureDoesNotMatch|403.*AccessDenied"):
            open_stream("s3://bucket/k", **{**store.arguments, "s3_secret_access_key": "wrong"})

    @pytest.mark.parametrize("release", ["1.0.0", "2.0.0"])
    def test_old_public_files_are_read_anonymously(self, store, release):
        chosen = [g for g in golden_files.select(refused=False, encrypted=False) if g["written_by"] == release]
        if not chosen:
            pytest.skip(f"no golden file of {release}")
        for golden in chosen[:3]:
            store.boto.put_object(Bucket="public", Key=golden["name"], Body=golden_files.read(golden))
            loaded = TensorDeserializer(
                open_stream(
                    f"s3://public/{golden['name']}",
                    s3_access_key_id="",
                    s3_secret_access_key="",
                    s3_endpoint=f"{store.endpoint}/v1/AUTH_test",
                    force_http=True,
                ),
                device="cpu",
            )
            assert len(loaded) == len({tuple(t["path"]) for t in golden["tensors"]})
            for stored in golden["tensors"]:
                name = stored["path"][0] if len(stored["path"]) == 1 else None
                if name is not None and name in loaded and not stored["meta"]:
                    value = loaded[name].detach().contiguous()
                    raw = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
                    assert raw == golden_files.content(stored)

    def test_urls_are_renewed_before_they_expire_and_when_refused(self):
        data = random_bytes(6 * MIB)
        with FaultyServer(data) as server:
            made = []

            class Client:
                class meta:
                    endpoint_url = f"http://127.0.0.1:{server.port}"

                def generate_presigned_url(self, method, Params, ExpiresIn):
                    made.append(method)
                    return f"{self.meta.endpoint_url}/{Params['Bucket']}/{Params['Key']}?X-Amz-Signature=n{len(made)}"

            def answer(request):
                expired = len(made) < 2 and request.range is not None and request.range[0] > 0
                return Reply(status=403, body=b"<Error><Code>ExpiredToken</Code></Error>") if expired else Reply()

            server.default = answer
            options = tuned(retries=2, first_retry_delay=0.01)
            with open_stream("s3://b/k", s3_client_factory=Client, http_options=options) as stream:
                assert stream.read() == data
            assert len(made) == 2
            assert any("n2" in request.target for request in server.requests)

    def test_a_deserializer_opens_the_uri_itself(self, store, tmp_path, monkeypatch):
        expected = state(3)
        path = tmp_path / "m.tensors"
        with TensorSerializer(path) as serializer:
            serializer.write_state_dict(expected)
        store.boto.put_object(Bucket="bucket", Key="model", Body=path.read_bytes())
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.endpoint)
        with TensorDeserializer("s3://bucket/model", device="cpu", verify_hash=True) as loaded:
            assert_same(dict(loaded.items()), expected)


class TestWritingFiles:
    @pytest.mark.parametrize("mode", ["wb", "wb+", "bw"])
    def test_the_content_appears_when_the_file_is_closed(self, store, mode):
        key = f"file-{mode}"
        stream = open_stream(f"s3://bucket/{key}", mode, **store.arguments)
        name = stream.name
        assert os.fstat(stream.fileno()).st_size == 0
        assert stream.readable()
        assert stream.writable()
        assert stream.seekable()
        stream.write(b"hello world")
        stream.seek(0)
        assert stream.read(5) == b"hello"
        stream.seek(0)
        stream.write(b"H")
        assert not exists(store, key)
        stream.close()
        stream.close()
        assert stream.closed
        assert store.boto.get_object(Bucket="bucket", Key=key)["Body"].read() == b"Hello world"
        assert not os.path.exists(name)

    def test_an_exception_inside_the_block_uploads_nothing(self, store):
        stream = open_stream("s3://bucket/aborted", "wb", **store.arguments)
        with pytest.raises(RuntimeError, match="on purpose"):
            fail_inside(stream, lambda stream: stream.write(b"half"))
        assert not exists(store, "aborted")
        assert not os.path.exists(stream.name)

    def test_a_forgotten_file_is_uploaded_when_it_is_collected(self, store):
        stream = open_stream("s3://bucket/forgotten", "wb", **store.arguments)
        stream.write(b"content")
        owned = [stream]
        del stream
        with pytest.warns(ResourceWarning, match="s3://bucket/forgotten"):
            owned.clear()
        assert exists(store, "forgotten")

    def test_a_write_that_fails_uploads_nothing_whatever_the_caller_does_then(self, store, caplog):
        def breaks(stream):
            with pytest.raises(TypeError):
                stream.write("text")

        def is_full(stream):
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, limit[1]))
            try:
                with pytest.raises(OSError, match="too large"):
                    stream.write(b"x" * 30_000_000)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)

        def close(stream):
            stream.close()

        def leave(stream):
            stream.__exit__(None, None, None)

        for fail in (breaks, is_full):
            for end in (close, leave, lambda stream: None):
                stream = open_stream("s3://bucket/failed", "wb", **store.arguments)
                stream.write(b"half")
                fail(stream)
                end(stream)
                del stream
                gc.collect()
                assert not exists(store, "failed")
        assert "nothing will be stored" in caplog.text

    def test_an_open_file_is_uploaded_when_the_interpreter_ends(self, store, fresh_process):
        program = """
            import sys, tensorizer.stream_io as s
            f = s.open_stream('s3://bucket/atexit', 'wb', *sys.argv[1:4], force_http=True)
            f.write(b'x' * 9_000_000)
        """
        run = fresh_process(program, store.access_key, store.secret_key, store.endpoint)
        assert run.returncode == 0
        assert run.stderr.startswith("s3://bucket/atexit: the stream was not closed")
        assert store.boto.head_object(Bucket="bucket", Key="atexit")["ContentLength"] == 9_000_000

    def test_a_failed_upload_raises_on_close_and_deletes_the_file(self, store):
        stream = open_stream("s3://no-such-bucket/k", "wb", **store.arguments)
        stream.write(b"x")
        with pytest.raises(Exception, match="NoSuchBucket"):
            stream.close()
        stream.close()
        assert not os.path.exists(stream.name)

    def test_missing_credentials_show_at_the_upload(self, store):
        stream = open_stream("s3://bucket/k", "wb", s3_endpoint=store.endpoint, force_http=True)
        stream.write(b"x")
        with pytest.raises(botocore.exceptions.NoCredentialsError, match=r"s3://bucket/k.*set AWS_") as caught:
            stream.close()
        assert isinstance(caught.value, StreamError)

    def test_a_serializer_writes_into_the_file_and_both_may_close(self, store):
        expected = state(2)
        with open_stream("s3://bucket/through", "wb+", **store.arguments) as stream:
            serializer = TensorSerializer(stream)
            serializer.write_state_dict(expected)
            serializer.close()
        with open_stream("s3://bucket/through", **store.arguments) as stream:
            assert_same(dict(TensorDeserializer(stream, device="cpu").items()), expected)

    def test_a_failing_serializer_block_uploads_nothing(self, store):
        stream = open_stream("s3://bucket/failing", "wb+", **store.arguments)
        with pytest.raises(RuntimeError, match="on purpose"):
            fail_inside(TensorSerializer(stream), lambda serializer: serializer.write_state_dict(state(1)))
        assert not exists(store, "failing")

    def test_the_upload_helper_signs_with_what_it_is_given(self, store, tmp_path):
        (tmp_path / "f").write_bytes(b"data")
        stream_io.s3_upload(
            str(tmp_path / "f"), "s3://bucket/helper", store.access_key, store.secret_key, store.endpoint
        )
        with stream_io.s3_download(
            "s3://bucket/helper", store.access_key, store.secret_key, store.endpoint, begin=1
        ) as stream:
            assert stream.read() == b"ata"


class TestStreamingWrites:
    @pytest.mark.parametrize("mib", [0, 1, 12, 37])
    def test_a_model_goes_up_in_parts_and_comes_back(self, store, small_parts, mib, tmp_path, monkeypatch):
        expected = state(mib)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with TensorSerializer(f"s3://bucket/model-{mib}", stream_options=store.arguments) as serializer:
            serializer.write_state_dict(expected)
            assert not exists(store, f"model-{mib}")
            assert os.listdir(tmp_path) == []
        etag = store.boto.head_object(Bucket="bucket", Key=f"model-{mib}")["ETag"]
        assert ("-" in etag) == (mib > 5)
        with open_stream(f"s3://bucket/model-{mib}", **store.arguments) as stream:
            loaded = TensorDeserializer(stream, device="cpu", verify_hash=True)
            assert_same(dict(loaded.items()), expected)
        assert uploads(store) == []

    def test_many_calls_and_an_index_that_outgrows_its_room(self, store, small_parts):
        expected = {f"t{i}": tensor((50_000,), torch.float32, seed=i) for i in range(100)}
        more = {("x" * 150) + str(i): tensor((10,), torch.float32, seed=i) for i in range(3000)}
        serializer = TensorSerializer("s3://bucket/calls", stream_options=store.arguments)
        serializer.write_state_dict(expected)
        serializer.write_state_dict(more)
        serializer.close()
        with open_stream("s3://bucket/calls", **store.arguments) as stream:
            assert_same(dict(TensorDeserializer(stream, device="cpu").items()), {**expected, **more})

    def test_memory_stays_within_the_budget(self, store, small_parts):
        arguments = {"memory_budget": 20 * MIB, **store.arguments}
        sink = stream_io.open_stream("s3://bucket/budget", "wb", **arguments).detach_sink()
        data = random_bytes(60 * MIB)
        sink.reserve(len(data))
        for at in range(0, len(data), MIB):
            sink.write_at(at, data[at : at + MIB])
        sink.publish(len(data))
        sink.finish()
        assert sink.peak_nbytes <= 20 * MIB
        with open_stream("s3://bucket/budget", **store.arguments) as stream:
            assert stream.read() == data

    def test_a_failure_in_the_block_leaves_neither_object_nor_upload(self, store, small_parts):
        serializer = TensorSerializer("s3://bucket/failed", stream_options=store.arguments)
        with pytest.raises(RuntimeError, match="on purpose"):
            fail_inside(serializer, lambda serializer: serializer.write_state_dict(state(20)))
        assert not exists(store, "failed")
        assert uploads(store) == []

    def test_a_serializer_that_is_forgotten_leaves_neither_object_nor_upload(self, store, small_parts):
        threads = thread_count()
        serializer = TensorSerializer("s3://bucket/lost", stream_options=store.arguments)
        serializer.write_state_dict(state(20))
        owned = [serializer]
        del serializer
        with pytest.warns(ResourceWarning, match="s3://bucket/lost"):
            owned.clear()
        assert not exists(store, "lost")
        assert uploads(store) == []
        assert threads_end(threads)

    def test_an_existing_object_stays_until_the_new_one_is_whole(self, store, small_parts):
        store.boto.put_object(Bucket="bucket", Key="old", Body=b"old")
        serializer = TensorSerializer("s3://bucket/old", stream_options=store.arguments)
        serializer.write_state_dict(state(12))
        assert store.boto.get_object(Bucket="bucket", Key="old")["Body"].read() == b"old"
        serializer.close()
        assert store.boto.head_object(Bucket="bucket", Key="old")["ContentLength"] > 12 * MIB

    @pytest.mark.parametrize("ending", ["exit", "exception", "signal"])
    def test_a_process_that_ends_early_leaves_neither_object_nor_upload(self, store, fresh_process, ending):
        program = """
import sys, os, signal, threading, torch
import tensorizer, tensorizer._io.s3.upload as u
u.MIN_PART_NBYTES = 5 << 20
options = dict(s3_access_key_id=sys.argv[1], s3_secret_access_key=sys.argv[2], s3_endpoint=sys.argv[3], force_http=True)
s = tensorizer.TensorSerializer("s3://bucket/early", stream_options=options)
s.write_state_dict({str(i): torch.ones(1 << 20) for i in range(8)})
if sys.argv[4] == "exception": raise RuntimeError
if sys.argv[4] == "signal":
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    while True: s.write_state_dict({os.urandom(8).hex(): torch.ones(1 << 20)})
"""
        run = fresh_process(program, store.access_key, store.secret_key, store.endpoint, ending)
        assert run.returncode == (0 if ending == "exit" else 1), run.stderr
        assert ("KeyboardInterrupt" in run.stderr) == (ending == "signal")
        assert store.secret_key not in run.stderr
        assert not exists(store, "early")
        assert uploads(store) == []

    def test_close_raises_when_the_store_refuses(self, store):
        serializer = TensorSerializer("s3://no-such-bucket/k", stream_options=store.arguments)
        serializer.write_state_dict(state(1))
        with pytest.raises(StreamError, match=r"s3://no-such-bucket/k.*127.0.0.1.*404.*NoSuchBucket"):
            serializer.close()
        assert serializer._closed

    def test_a_store_that_is_not_there_is_a_stream_error(self, small_parts):
        options = {"s3_access_key_id": "a", "s3_secret_access_key": "topsecret", "force_http": True}
        serializer = TensorSerializer("s3://b/k", stream_options={**options, "s3_endpoint": f"127.0.0.1:{free_port()}"})
        with pytest.raises(StreamError, match="s3://b/k") as caught:
            write_and_close(serializer, state(12))
        assert "topsecret" not in str(caught.value)

    def test_missing_credentials_are_botocores_error(self, store, small_parts):
        options = {"s3_endpoint": store.endpoint, "force_http": True}
        serializer = TensorSerializer("s3://bucket/k", stream_options=options)
        with pytest.raises(botocore.exceptions.NoCredentialsError):
            write_and_close(serializer, state(12))

    def test_the_parts_follow_retries_and_leave_no_descriptor(self, store):
        descriptors = open_descriptors()
        expected = state(2)
        with TensorSerializer("s3://bucket/again", stream_options=store.arguments) as serializer:
            serializer.write_state_dict(expected)
        del serializer
        gc.collect()
        left = 3
        deadline = time.monotonic() + 5  # idle connections end a fraction of a second after the upload
        while left > 2 and time.monotonic() < deadline:  # boto3's pool may keep its own
            time.sleep(0.01)
            left = len({d for d in open_descriptors() - descriptors if d[1] in tcp_sockets()})
        assert left <= 2

    def test_a_forked_child_leaves_the_upload_alone(self, store, small_parts):
        serializer = TensorSerializer("s3://bucket/forked", stream_options=store.arguments)
        serializer.write_state_dict(state(12))
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(60, exit=True)  # tells where it hangs
            with contextlib.suppress(BaseException):
                del serializer
                gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        serializer.close()
        assert exists(store, "forked")

    def test_several_threads_may_save_at_the_same_time(self, store, small_parts):
        expected = [state(8, seed=10 * i) for i in range(3)]
        threads = [threading.Thread(target=save, args=(store, i, expected[i])) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(3):
            with open_stream(f"s3://bucket/thread-{i}", **store.arguments) as stream:
                assert_same(dict(TensorDeserializer(stream, device="cpu").items()), expected[i])


def save(store, i, tensors):
    with TensorSerializer(f"s3://bucket/thread-{i}", stream_options=store.arguments) as serializer:
        serializer.write_state_dict(tensors)


def write_and_close(serializer, tensors):
    serializer.write_state_dict(tensors)
    serializer.close()


def test_a_read_of_an_object_that_is_overwritten_never_mixes_versions(store):
    old, new = random_bytes(9 * MIB, 1), random_bytes(9 * MIB, 2)
    store.boto.put_object(Bucket="bucket", Key="changing", Body=old)
    with open_stream("s3://bucket/changing", **store.arguments) as stream:
        assert stream.read(100) == old[:100]
        time.sleep(1.1)  # dates have a resolution of a second
        store.boto.put_object(Bucket="bucket", Key="changing", Body=new)
        stream.seek(4 * MIB)
        with pytest.raises(OSError, match=r"changed|412"):
            stream.read()

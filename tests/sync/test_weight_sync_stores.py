"""Publishing to stores that speak S3 and following from them and over HTTP: conditions, conflicts, faults, caches."""

from __future__ import annotations

import functools
import json
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from http_tools import quick
from servers import serving
from servers.s3_recorder import S3Recorder
from servers.s3_server import S3Server, s3_is_installed
from sync_tools import anchor, change, copy_of, delta, same

from tensorizer import TensorDeserializer
from tensorizer.errors import ConflictError, StreamError, TensorizerError
from tensorizer.weight_sync import WeightFollower, WeightPublisher

pytestmark = pytest.mark.usefixtures("leaves_no_descriptors")

PREFIX = "/bucket/run/weights"
URI = f"s3:/{PREFIX}"


@pytest.fixture
def store():
    pytest.importorskip("boto3")
    with S3Recorder() as server:
        yield server


@pytest.fixture
def publisher(store):
    with WeightPublisher(URI, anchor_every=4, stream_options=store.arguments) as made:
        yield made


def tensors() -> dict:
    torch.manual_seed(1)
    return {"a.weight": torch.randn(300, 50).bfloat16(), "b.bias": torch.randn(77)}


def names(store) -> list:
    return sorted(path.rpartition("/")[2] for path in store.objects)


def pointer_of(store) -> dict:
    return json.loads(store.objects[f"{PREFIX}/latest.json"])


@pytest.fixture
def follow(store):
    """Makes followers, which are closed at the end."""
    made = []

    def make() -> WeightFollower:
        made.append(WeightFollower(URI, None, stream_options=store.arguments))
        return made[-1]

    yield make
    for follower in made:
        follower.close()


# --- one publisher ----------------------------------------------------------------------------------------------------


def test_versions_in_s3_are_followed(store, publisher, follow):
    model = tensors()
    publisher.publish(model)
    follower = follow()
    for _ in range(9):
        change(model["a.weight"])
        publisher.publish(model)
        follower.update()
        assert same(follower.tensors, model)
    pointer = pointer_of(store)
    assert (pointer["anchors"], pointer["deltas"]) == ([4, 8], [5, 6, 7, 8, 9])
    assert names(store) == sorted(["latest.json", *pointer["nbytes"]])
    assert {name: len(store.objects[f"{PREFIX}/{name}"]) for name in pointer["nbytes"]} == pointer["nbytes"]


def test_files_are_put_once_and_the_pointer_on_condition(store, publisher):
    publisher.publish(tensors())
    publisher.publish(tensors())
    puts = [(r.path.rpartition("/")[2], r.headers) for r in store.of("PutObject")]
    assert [name for name, _ in puts] == [anchor(0), "latest.json", delta(1), "latest.json"]
    assert [headers.get("if-none-match") for _, headers in puts] == ["*", "*", "*", None]
    assert puts[3][1]["if-match"] == store._etag(store.requests[3].body) or puts[3][1]["if-match"]
    for name, headers in puts:
        assert (headers.get("cache-control") == "no-cache") is (name == "latest.json")


def test_requests_for_the_pointer_pass_caches_and_send_it_only_if_it_changed(store, publisher, tmp_path, follow):
    publisher.publish(tensors())
    follower = follow()
    store.requests.clear()
    assert follower.latest() == 0
    (request,) = store.requests
    assert request.headers["cache-control"] == "no-cache"
    assert request.headers["if-none-match"] == store._etag(store.objects[f"{PREFIX}/latest.json"])
    assert "range" not in request.headers


def test_old_files_are_deleted_after_the_pointer_the_oldest_first(store):
    with WeightPublisher(URI, anchor_every=2, keep=1, stream_options=store.arguments) as publisher:
        for _ in range(5):
            publisher.publish(tensors())
    deleted = [request.path.rpartition("/")[2] for request in store.of("DeleteObject")]
    assert deleted == [anchor(0), delta(1), anchor(2), delta(3)]
    for request in store.of("DeleteObject"):
        before = store.requests[: store.requests.index(request)]
        last_pointer = [r for r in before if r.operation == "PutObject" and r.path.endswith("latest.json")][-1]
        assert request.path.rpartition("/")[2] not in json.loads(last_pointer.body)["nbytes"]


def test_a_write_whose_answer_was_lost_is_no_conflict(store, publisher, follow):
    model = tensors()
    for _ in range(3):
        store.lose_answer_once.add("PutObject")  # of the file
        publisher.publish(model)
        change(model["a.weight"])
    follower = follow()
    put = store._PutObject

    def lose_pointer(request):
        if request.path.endswith("latest.json") and not store.lose_answer_once:
            store._PutObject = put
            store.lose_answer_once.add("PutObject")
        return put(request)

    store._PutObject = lose_pointer
    assert publisher.publish(model)[:2] == (3, "delta")
    follower.update()
    assert same(follower.tensors, model)


@pytest.mark.parametrize("status", [404, 409])
def test_other_answers_that_mean_a_condition_was_not_met_are_conflicts(store, publisher, status):
    publisher.publish(tensors())
    put = store._PutObject

    def refuse(request):
        return store._error(status, "Conflict") if request.path.endswith("latest.json") else put(request)

    store._PutObject = refuse
    for _ in range(2):
        with pytest.raises(ConflictError):
            publisher.publish(tensors())


def test_a_store_without_conditions_is_written_and_read_back(store, publisher, follow):
    store.knows_conditions = False
    model = tensors()
    publisher.publish(model)
    change(model["a.weight"])
    publisher.publish(model)
    assert same(follow().tensors, model)
    puts = store.of("PutObject")
    assert [r.headers.get("if-match") for r in puts[-2:]] == [None, None]
    last = store.requests.index(puts[-1])
    assert store.requests[last + 1].operation == "GetObject"


# --- two publishers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_conditions", [True, False], ids=["conditions", "none"])
def test_a_newer_publisher_takes_over_and_the_older_one_has_a_conflict(store, publisher, knows_conditions, follow):
    store.knows_conditions = knows_conditions
    model = tensors()
    publisher.publish(model)
    publisher.publish(model)
    follower = follow()
    with WeightPublisher(URI, stream_options=store.arguments) as newer:
        change(model["a.weight"])
        assert newer.publish(model)[:2] == (2, "anchor")
        for _ in range(2):
            with pytest.raises(ConflictError, match="taken over"):
                publisher.publish(tensors())
        assert newer.publish(model)[:2] == (3, "delta")
        follower.update()
        assert follower.version == 3
        assert same(follower.tensors, model)
        assert names(store) == sorted(["latest.json", *pointer_of(store)["nbytes"]])


def test_a_newcomer_whose_first_pointer_is_refused_reads_again_and_repeats(store, publisher, follow):
    model = tensors()
    publisher.publish(model)
    put, raced = store._PutObject, []

    def race(request):  # the older publisher comes in between
        if request.path.endswith(anchor(1)) and not raced:
            raced.append(True)
            publisher.publish(model)
        return put(request)

    store._PutObject = race
    with WeightPublisher(URI, stream_options=store.arguments) as newer:
        change(model["a.weight"])
        assert newer.publish(model)[:2] == (2, "anchor")
    assert raced
    with pytest.raises(ConflictError):
        publisher.publish(model)
    follower = follow()
    assert (follower.version, same(follower.tensors, model)) == (2, True)
    assert names(store) == sorted(["latest.json", *pointer_of(store)["nbytes"]])


def test_a_fenced_publisher_does_not_replace_a_newer_ones_files(store, publisher, follow):
    model = tensors()
    for _ in range(4):
        publisher.publish(model)
    newer = WeightPublisher(URI, stream_options=store.arguments)
    other = copy_of(model)
    change(other["a.weight"])
    check, seen = publisher._check_lead, []

    def take_over_after_the_check():
        check()
        if not seen:
            seen.append(True)
            newer.publish(other)  # an anchor of the same number

    publisher._check_lead = take_over_after_the_check
    with pytest.raises(ConflictError):
        publisher.publish(model)
    follower = follow()
    assert (follower.version, same(follower.tensors, other)) == (4, True)
    newer.close()


def test_files_that_a_killed_publisher_left_are_no_obstacle(store, follow):
    store.objects[f"{PREFIX}/{anchor(0)}"] = b"cut off"
    store.objects[f"{PREFIX}/{delta(9)}"] = b"cut off"
    store.objects[f"{PREFIX}/sub/{delta(9)}"] = b"not directly in the location"
    model = tensors()
    with WeightPublisher(URI, stream_options=store.arguments) as publisher:
        assert publisher.publish(model).version == 0
    assert same(follow().tensors, model)
    assert names(store) == [anchor(0), delta(9), "latest.json"]
    assert f"{PREFIX}/sub/{delta(9)}" in store.objects


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_store_that_fails_leaves_the_version_before_and_nothing_behind(store, publisher, follow):
    model = tensors()
    publisher.publish(model)
    follower = follow()
    store.refuse_all["PutObject"] = (403, "AccessDenied")
    with pytest.raises(StreamError):
        publisher.publish(model)
    store.refuse_all.clear()
    assert follower.fetch() is False
    assert publisher.publish(model)[:2] == (1, "anchor")
    assert names(store) == [anchor(0), anchor(1), "latest.json"]


def test_a_pointer_that_failed_is_published_by_the_next_call(store, publisher):
    model = tensors()
    publisher.publish(model)
    put = store._PutObject
    store._PutObject = lambda r: store._error(403, "AccessDenied") if r.path.endswith("latest.json") else put(r)
    with pytest.raises(StreamError):
        publisher.publish(model)
    store._PutObject = put
    assert names(store) == [anchor(0), "latest.json"]
    assert publisher.publish(model)[:2] == (1, "anchor")


def test_a_file_that_is_deleted_meanwhile_sends_the_follower_back_to_the_pointer(store, follow):
    model = tensors()
    with WeightPublisher(URI, anchor_every=2, keep=1, stream_options=store.arguments) as publisher:
        publisher.publish(model)
        follower = follow()
        publisher.publish(model)
        get, behind = store._GetObject, []

        def publish_behind(request):
            if request.path.endswith(delta(1)) and not behind:
                behind.append(True)
                for _ in range(2):
                    change(model["a.weight"])
                    publisher.publish(model)
            return get(request)

        store._GetObject = publish_behind
        assert follower.update().version == 3
        assert same(follower.tensors, model)


class _Faulty(SimpleHTTPRequestHandler):
    """A folder with ranges, of which the first requests for files of tensors fail in turn."""

    protocol_version = "HTTP/1.1"
    faults: list = []  # noqa: RUF012 - of all requests

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        with open(self.translate_path(self.path), "rb") as file:
            data = file.read()
        first, _, last = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")
        part = data[int(first) : int(last) + 1 if last else len(data)]
        fault = self.faults.pop() if self.faults and self.path.endswith(".tensors") else None
        if fault == "busy":
            self.send_error(503)
            return
        if fault == "drop":
            self.close_connection = True
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hash(data)}"')
        self.end_headers()
        self.wfile.write(part[: len(part) // 2] if fault == "cut" else part)
        self.close_connection = fault is not None


def test_faults_of_the_network_are_survived_and_the_target_is_as_it_was(tmp_path):
    handler = functools.partial(_Faulty, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with WeightPublisher(tmp_path) as publisher, serving(server):
        model = tensors()
        publisher.publish(model)
        options = {"http_options": quick(retries=10)}
        target = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        follower = WeightFollower(f"http://127.0.0.1:{server.server_port}/", target, stream_options=options)
        assert same(target, model)
        before = copy_of(target)
        change(model["a.weight"], 0.3)
        publisher.publish(model)
        _Faulty.faults[:] = ["cut", "busy", "drop", "cut", "busy", "cut"]
        assert follower.fetch()
        assert not _Faulty.faults
        assert same(target, before)
        follower.apply()
        assert same(target, model)
        follower.close()


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_a_folder_of_an_http_server_is_followed(tmp_path, store):
    with WeightPublisher(URI, stream_options=store.arguments) as publisher:
        model = tensors()
        publisher.publish(model)
        follower = WeightFollower(store.endpoint + PREFIX, None, stream_options={"http_options": quick()})
        store.requests.clear()
        assert follower.wait(0) is False
        (request,) = store.requests
        assert request.headers["cache-control"] == "no-cache"
        assert request.headers["if-none-match"] == store._etag(store.objects[f"{PREFIX}/latest.json"])
        change(model["a.weight"])
        publisher.publish(model)
        follower.update()
        assert same(follower.tensors, model)


def test_the_cache_of_the_node_keeps_files_and_never_the_pointer(tmp_path, store, monkeypatch, follow):
    with WeightPublisher(URI, stream_options=store.arguments) as publisher:
        model = tensors()
        publisher.publish(model)
        monkeypatch.setenv("TENSORIZER_CACHE", str(tmp_path / "cache"))
        for _ in range(2):
            follower = follow()
            change(model["a.weight"])
            publisher.publish(model)
            follower.update()
            assert same(follower.tensors, model)
        kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert kept
        assert not [path for path in kept if b'"weight_sync": 1' in path.read_bytes()]


def test_files_of_a_run_in_s3_are_ordinary_files(store, publisher):
    model = tensors()
    publisher.publish(model)
    with TensorDeserializer(f"{URI}/{anchor(0)}", device="cpu", stream_options=store.arguments) as file:
        assert same({name: file[name] for name in file}, model)


# --- a real store -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swift():
    if not s3_is_installed():
        pytest.skip("needs OpenStack Swift, which is not installed")
    with S3Server() as server:
        server.client().create_bucket(Bucket="sync")
        yield server


def test_a_real_store_is_published_to_and_followed(swift):
    model = tensors()
    with WeightPublisher("s3://sync/run", anchor_every=3, stream_options=swift.arguments) as publisher:
        publisher.publish(model)
        with WeightFollower("s3://sync/run", None, stream_options=swift.arguments) as follower:
            for _ in range(8):
                change(model["a.weight"])
                publisher.publish(model)
                follower.update()
                assert same(follower.tensors, model)
        with WeightPublisher("s3://sync/run", stream_options=swift.arguments) as newer:
            newer.publish(model)
            with pytest.raises(TensorizerError):
                publisher.publish(model)

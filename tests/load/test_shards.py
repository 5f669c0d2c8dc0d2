"""Sharded folders load as one mapping; what their map gets wrong is found before any payload is read."""

from __future__ import annotations

import http.server
import json
import os
import re
import threading
from typing import ClassVar

import pytest
import reference_format
import samples
import torch
from samples import same, tensor
from servers import needs
from servers.nginx import PROGRAM, nginx

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, save_file
from tensorizer._io import model_files
from tensorizer.errors import FormatError, HashMismatchError

st = pytest.importorskip("safetensors.torch")

CONTENT = {
    "model-00001-of-00003.safetensors": {"a.weight": tensor((3, 4), seed=1), "b.weight": tensor((700,), seed=2)},
    "model-00002-of-00003.safetensors": {"c.weight": tensor((5,), torch.bfloat16, seed=3)},
    "model-00003-of-00003.safetensors": {"d.weight": tensor((), torch.int64), "e.weight": torch.zeros(0, 2)},
}
ALL = {name: value for shard in CONTENT.values() for name, value in shard.items()}
MAP = {name: file for file, shard in CONTENT.items() for name in shard}


def write_index(folder, weight_map=None, metadata=None, name="model.safetensors.index.json"):
    index = {"metadata": {"total_size": 1, **(metadata or {})}, "weight_map": MAP if weight_map is None else weight_map}
    (folder / name).write_text(json.dumps(index, indent=2))
    return folder / name


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    for file, content in CONTENT.items():
        st.save_file(content, place / file, metadata={"format": "pt"})
    write_index(place, metadata={"tied.weight": "a.weight"})
    return place


def assert_is_all(found):
    assert set(found) == {*ALL, "tied.weight"}
    for name, value in ALL.items():
        assert same(found[name], value), name
    assert found["tied.weight"] is found["a.weight"]


WAYS = {
    "eager": {},
    "lazy": {"lazy_load": True},
    "mapped": {"mmap": True},
    "one reader": {"num_readers": 1},
    "unverified": {"verify_hash": True, "allow_missing_hashes": True},
    "device per tensor": {"device": lambda name: "cpu"},
}


def test_a_folder_and_its_index_load_as_one_mapping(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    index = "model.safetensors.index.json"
    for source in (folder, f"{folder}/", folder / index, f"file://{folder}", "~/model", f"~/model/{index}"):
        for options in WAYS.values():
            with TensorDeserializer(source, **{"device": "cpu", **options}) as found:
                assert_is_all(found)
                assert found.ties == {"tied.weight": "a.weight"}
                assert found.metadata == {"format": "pt", "tied.weight": "a.weight"}
                assert found.format == "safetensors"
                assert len(found.entries()) == len(ALL) + 1


def test_everything_that_a_mapping_does_works_over_shards(folder):
    done = []
    with TensorDeserializer(folder, device="cpu", dtype=torch.float16, progress=lambda p: done.append(p)) as found:
        assert found["a.weight"].dtype == torch.float16
        assert found["d.weight"].dtype == torch.int64
    assert done
    with TensorDeserializer(folder, device="cpu", filter_func="c.weight".__eq__) as found:
        assert list(found) == ["c.weight"]
        assert found.total_tensor_bytes == 10
    with TensorDeserializer(folder, device="cpu", lazy_load=True) as found:
        rows = {name: value for _, _, name, value in found.read_tensors(cache=False)}
        assert {name for name, value in ALL.items() if same(rows[name], value)} == set(ALL)
        assert "3 tensors" not in repr(found)
        with pytest.raises(ValueError, match="one file"):
            found.to_redis(None, "p")
    with TensorDeserializer(folder, device="cpu", lazy_load=True) as found:
        arrays = {row[2]: row[3] for row in found.read_numpy_arrays(allow_raw_data=True)}
        assert arrays["c.weight"].tobytes() == samples.raw(ALL["c.weight"])


def test_a_folder_with_one_model_file_is_that_file(tmp_path):
    for name in ("model.safetensors", "weights.safetensors"):
        place = tmp_path / name.split(".")[0]
        place.mkdir()
        st.save_file({"w": torch.ones(2)}, place / name)
        (place / "config.json").write_text("{}")
        with TensorDeserializer(place, device="cpu") as found:
            assert list(found) == ["w"]


@pytest.mark.parametrize(
    ("names", "stem", "variant", "wanted"),
    [
        (["model.tensors", "model.safetensors"], "model", None, ["model.safetensors", "model.tensors"]),
        (["model.safetensors", "model.fp16.safetensors"], "model", "fp16", ["model.fp16.safetensors"]),
        (["model.safetensors.index.fp16.json"], "model", "fp16", ["model.safetensors.index.fp16.json"]),
        (["adapter_model.tensors", "model.tensors"], "adapter_model", None, ["adapter_model.tensors"]),
        (["weights.tensors", "config.json"], "model", None, []),
    ],
)
def test_a_model_is_found_under_the_usual_names_and_in_a_listing_under_any(names, stem, variant, wanted):
    def there(tried):
        return [name for name in tried if name in names]

    assert model_files.find_model(there, stem, variant) == wanted
    assert model_files.find_model(there, stem, variant, names) == (wanted or ["weights.tensors"])


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Phi-3.5", "v1.0", "model"])
def test_names_with_dots_may_be_folders(name):
    assert model_files.may_be_folder(name)
    assert not model_files.may_be_folder(f"{name}.safetensors")


def test_variants_and_their_older_spelling_are_found(folder):
    text = (folder / "model.safetensors.index.json").read_text()
    (folder / "model.safetensors.index.json").unlink()
    for name in ("model.safetensors.index.fp16.json", "model.safetensors.fp16.index.json"):
        (folder / name).write_text(text)
        with TensorDeserializer(folder, device="cpu") as found:
            assert_is_all(found)
        (folder / name).unlink()


def test_an_ambiguous_folder_is_refused_and_an_empty_one_has_nothing(folder, tmp_path):
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match="expected one"):
        TensorDeserializer(folder, device="cpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(IsADirectoryError, match="got an empty folder"):
        TensorDeserializer(tmp_path / "empty", device="cpu")


def refused(folder, error, words):
    """Refused before any payload was read."""
    with pytest.raises(error) as caught:
        TensorDeserializer(folder, device="cpu", lazy_load=True)
    assert words in str(caught.value)


FIRST, SECOND, THIRD = CONTENT
OUTSIDE = [f"{place}x.safetensors" for place in ("../", "/etc/", "C:", "..\\", "//host/", "http://host/", "a/../")]


@pytest.mark.parametrize(
    ("weight_map", "error", "words"),
    [
        pytest.param({**MAP, "a.weight": SECOND}, FormatError, f"'{SECOND}', got it in '{FIRST}'", id="another shard"),
        pytest.param({**MAP, "z": SECOND}, FormatError, "'z': expected it in", id="no tensor of that name"),
        *(pytest.param({**MAP, "z": place}, FormatError, repr(place), id=place) for place in OUTSIDE),
        pytest.param({**MAP, "z": "x.bin"}, FormatError, "expected .safetensors files", id="x.bin"),
        pytest.param({}, FormatError, "no tensor", id="empty"),
        pytest.param([], FormatError, "weight_map", id="a list"),
        pytest.param({"a.weight": 1}, FormatError, "weight_map", id="a number"),
        pytest.param({**MAP, "z": "missing.safetensors"}, FileNotFoundError, "missing.safetensors", id="no shard"),
    ],
)
def test_every_lie_of_a_map_is_refused_before_the_first_payload(
    folder, leaves_no_descriptors, weight_map, error, words
):
    write_index(folder, weight_map)
    refused(folder, error, words)


def test_a_tensor_in_two_shards_is_refused_before_the_first_payload(folder, leaves_no_descriptors):
    st.save_file({**CONTENT[THIRD], "a.weight": torch.ones(1)}, folder / THIRD)
    refused(folder, FormatError, "in two shards")


def test_an_index_that_is_no_json_or_too_deep_or_too_large_is_refused(folder):
    path = folder / "model.safetensors.index.json"
    for text in ("", "{", "[]", "{}", '{"weight_map":{}', '{"x":' + "[" * 5000, '{"weight_map":{},"weight_map":{}}'):
        path.write_text(text)
        with pytest.raises(FormatError, match=r"index\.json"):
            TensorDeserializer(folder, device="cpu")
    with path.open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(FormatError, match="100000000"):
        TensorDeserializer(folder, device="cpu")


def test_links_out_of_the_folder_are_refused_but_those_of_a_hub_cache(folder, tmp_path):
    first = next(iter(CONTENT))
    outside = tmp_path / "outside.safetensors"
    os.rename(folder / first, outside)
    (folder / first).symlink_to(outside)
    refused(folder, FormatError, "outside")
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0123abcd", cache / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    os.rename(outside, blobs / "digest")
    (folder / first).unlink()
    for file in folder.iterdir():
        os.rename(file, snapshot / file.name)
    (snapshot / first).symlink_to("../../blobs/digest")
    with TensorDeserializer(snapshot, device="cpu") as found:
        assert_is_all(found)


def test_tensors_that_the_map_does_not_name_are_loaded_with_a_warning(folder, caplog):
    write_index(folder, {name: file for name, file in MAP.items() if name != "b.weight"})
    with TensorDeserializer(folder, device="cpu") as found:
        assert same(found["b.weight"], ALL["b.weight"])
    assert "1 tensors of its shards are not in its map" in caplog.text


def test_tensors_files_are_shards_too_encrypted_or_not(tmp_path):
    shared = tensor((6,), seed=4)
    for name, encryption in (("plain", None), ("sealed", EncryptionParams.random())):
        place = tmp_path / name
        place.mkdir()
        shards = {"m-1.tensors": {"a": shared, "b": shared}, "m-2.tensors": {"c": tensor((9,), seed=5)}}
        for file, content in shards.items():
            samples.write_state_dict(place / file, content, encryption=encryption, ties="once", metadata={"of": file})
        weight_map = {"a": "m-1.tensors", "b": "m-1.tensors", "c": "m-2.tensors"}
        write_index(place, weight_map, name="m.tensors.index.json")
        key = None if encryption is None else DecryptionParams.from_key(encryption.key)
        with TensorDeserializer(place, device="cpu", verify_hash=True, encryption=key) as found:
            assert list(found) == ["a", "b", "c"]
            assert found["a"] is found["b"]
            assert found.ties == {"b": "a"}
            assert same(found["c"], shards["m-2.tensors"]["c"])
            assert found.metadata == {"of": "m-1.tensors"}
    data = bytearray((tmp_path / "plain" / "m-2.tensors").read_bytes())
    data[-10] ^= 1
    (tmp_path / "plain" / "m-2.tensors").write_bytes(data)
    with pytest.raises(HashMismatchError, match="'c'"):
        TensorDeserializer(tmp_path / "plain", device="cpu", verify_hash=True)


@pytest.mark.parametrize("extension", ["tensors", "safetensors"])
def test_shards_load_whatever_form_a_name_is_stored_in(tmp_path, extension):
    shared = tensor((6,), seed=4)
    state = {"": shared, "\x1e": tensor((7,)), "\x1etied": shared, "tied": shared}
    save_file(state, tmp_path / f"m.{extension}", max_shard_size=30)
    assert len(list(tmp_path.glob(f"m-*.{extension}"))) > 1
    with TensorDeserializer(tmp_path, device="cpu", verify_hash=extension == "tensors") as found:
        assert all(same(found[name], value) for name, value in state.items())


@pytest.mark.usefixtures("eager_and_lazy")
def test_a_module_is_loaded_from_shards_of_tensors_files(tmp_path):
    model, target = samples.net(seed=1), samples.net(seed=2)
    samples.write_module(tmp_path / "m.tensors", model)
    names = samples.module_names(model)
    write_index(tmp_path, dict.fromkeys(names, "m.tensors"), name="m.tensors.index.json")
    assert TensorDeserializer(tmp_path / "m.tensors.index.json", device="cpu").load_into_module(target) == len(names)
    assert target.head.weight is target.embed.weight


@pytest.fixture
def served(folder, tmp_path):
    """The URL of the folder's parent."""
    if PROGRAM is None:
        pytest.skip(needs("nginx"))
    (tmp_path / "nginx").mkdir()
    with nginx(tmp_path / "nginx", folder.parent) as url:
        yield url


def test_a_prefix_of_a_server_is_tried_under_the_usual_names(folder, served):
    for source in ("model/", "model/model.safetensors.index.json"):
        with TensorDeserializer(f"{served}/{source}", device="cpu") as found:
            assert_is_all(found)
    for nothing in ("nothing/", "nothing"):
        with pytest.raises(FileNotFoundError):
            TensorDeserializer(f"{served}/{nothing}", device="cpu")
    (folder / "model.safetensors.index.json").unlink()
    st.save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    with TensorDeserializer(f"{served}/model/", device="cpu") as found:
        assert list(found) == ["w"]


def test_a_missing_shard_on_a_server_is_not_found(folder, served):
    write_index(folder, {**MAP, "z": "missing.safetensors"})
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors"):
        TensorDeserializer(f"{served}/model/", device="cpu")
    st.save_file({"w": torch.ones(2)}, folder / "model.safetensors")  # another form of the model is no answer
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors"):
        TensorDeserializer(f"{served}/model/", device="cpu")


def test_a_prefix_of_a_bucket_loads_like_a_folder(folder, s3_server):
    client = s3_server.client()
    client.create_bucket(Bucket="shards")
    for file in folder.iterdir():
        client.upload_file(str(file), "shards", f"org/model/{file.name}")
    for source in (
        "s3://shards/org/model/",
        "s3://shards/org/model",
        "s3://shards/org/model/model.safetensors.index.json",
    ):
        with TensorDeserializer(source, device="cpu", stream_options=s3_server.arguments) as found:
            assert_is_all(found)
    client.delete_object(Bucket="shards", Key=f"org/model/{sorted(folder.iterdir())[0].name}")
    index = "s3://shards/org/model/model.safetensors.index.json"
    with pytest.raises(FileNotFoundError, match=re.escape(f"{index}: its shard")):
        TensorDeserializer("s3://shards/org/model", device="cpu", stream_options=s3_server.arguments)


def test_a_tensor_below_one_of_another_shard_is_refused_in_either_order(tmp_path):
    for names in ((("a", 0), ("a", 0, "b")), (("a", 0, "b"), ("a", 0)), (("a",), ("a", "b"))):
        weight_map = {}
        for number, path in enumerate(names):
            one = reference_format.Tensor(path, "<f4", (1,), bytes(4))
            (tmp_path / f"{number}.tensors").write_bytes(reference_format.write_file([one]))
            weight_map[reference_format.encode_name(path).decode()] = f"{number}.tensors"
        index = write_index(tmp_path, weight_map, name="m.tensors.index.json")
        below = max(names, key=len)
        with pytest.raises(FormatError, match=re.escape(f"m.tensors.index.json: tensor {below!r} lies below another")):
            TensorDeserializer(index, device="cpu", lazy_load=True)


MANY_PROGRAM = """
import os, resource, sys
from pathlib import Path
import torch
import tensorizer
from tensorizer import TensorDeserializer, load_file, save_file

def limit(descriptors):
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def opened():
    return len(os.listdir("/proc/self/fd"))

def is_all(found, count):
    return len(found) == count and all(found[f"w{i}"].equal(torch.full((8,), float(i))) for i in range(count))

os.chdir(sys.argv[1])
extension, options = sys.argv[2], {"direct_io": sys.argv[3]}
save_file({f"w{i}": torch.full((8,), float(i)) for i in range(130)}, f"m/model.{extension}", max_shard_size=32)
assert len(os.listdir("m")) == 131
limit(100)
assert is_all(load_file("m", **options), 130)
assert is_all(load_file("m", backend="mmap"), 130)
before = opened()
with TensorDeserializer("m", device="cpu", lazy_load=True, **options) as file:
    assert opened() - before <= 50
    os.chdir("/")  # the files are found again all the same
    assert is_all(file, 130)
    assert file.get_slice("w129")[2:4].tolist() == [129, 129]
    os.chdir(sys.argv[1])
assert len(tensorizer.inspect("m").tensors) == 130
assert extension == "safetensors" or tensorizer.verify("m")
assert tensorizer.diff("m", "m")
tensorizer.convert("m", f"one.{extension}")
assert is_all(load_file(f"one.{extension}"), 130)
tensorizer.convert("m", f"again/model.{extension}", max_shard_size=32)
assert is_all(load_file("again"), 130)
limit(64)
save_file({f"w{i}": torch.full((8,), float(i)) for i in range(150)}, f"out/model.{extension}", max_shard_size=32)
assert is_all(load_file("out"), 150)
with TensorDeserializer("out", device="cpu", lazy_load=True) as file:
    last = sorted(Path("out").glob(f"*.{extension}"))[-1]
    other = sorted(Path("m").glob(f"*.{extension}"))[-1]
    os.replace(other, last)
    try:
        file["w149"]
    except OSError as error:
        assert last.name in str(error) and "replaced" in str(error), error
    else:
        raise AssertionError("a file that was replaced was read")
print("right")
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs the list of descriptors")
@pytest.mark.parametrize("direct_io", ["auto", "always"])
@pytest.mark.parametrize("extension", ["tensors", "safetensors"])
def test_any_number_of_shards_is_read_and_written_with_a_bounded_number_of_descriptors(
    tmp_path, fresh_process, extension, direct_io
):
    for name in ("m", "again", "out"):
        (tmp_path / name).mkdir()
    result = fresh_process(MANY_PROGRAM, tmp_path, extension, direct_io, timeout=200)
    assert result.stdout == "right\n", result.stderr


SHARDS = 40


class _Objects(http.server.BaseHTTPRequestHandler):
    """Answers ranges of objects; shards wait until all are asked for, so that those that come alone are seen."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}
    now = most = 0
    lock, together = threading.Lock(), threading.Event()

    def log_message(self, *_arguments):
        pass

    def do_GET(self):
        kind = type(self)
        name = self.path.partition("?")[0].rpartition("/")[2]
        data = kind.objects.get(name)
        if data is None:
            self.send_error(404)
            return
        if name.startswith("model-"):
            with kind.lock:
                kind.now += 1
                kind.most = max(kind.most, kind.now)
                if kind.most == SHARDS:
                    kind.together.set()
            kind.together.wait(10)
            with kind.lock:
                kind.now -= 1
        first, last = (int(text) for text in re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def objects():
    kind = type("Objects", (_Objects,), {"together": threading.Event(), "objects": {}})
    names = [f"model-{i + 1:05}-of-{SHARDS:05}.safetensors" for i in range(SHARDS)]
    for i, name in enumerate(names):
        kind.objects[name] = st.save({f"w{i}": torch.full((100,), float(i))})
    weight_map = {f"w{i}": name for i, name in enumerate(names)}
    kind.objects["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield kind, f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_shards_of_a_server_are_opened_together(objects):
    kind, host = objects
    with TensorDeserializer(f"http://{host}/m/", device="cpu") as found:
        assert [int(found[f"w{i}"][0]) for i in range(SHARDS)] == list(range(SHARDS))
    assert kind.most == SHARDS  # one round


def test_shards_of_a_bucket_are_opened_together_by_one_client(objects, monkeypatch):
    client = pytest.importorskip("botocore.client")
    kind, host = objects
    made, create = [], client.ClientCreator.create_client

    def counted(*arguments, **options):
        made.append(1)
        return create(*arguments, **options)

    monkeypatch.setattr(client.ClientCreator, "create_client", counted)
    keys = {"s3_access_key_id": "a", "s3_secret_access_key": "b"}
    options = {**keys, "s3_endpoint": f"http://{host}", "force_http": True, "s3_region_name": "us-east-1"}
    for _ in range(2):
        with TensorDeserializer("s3://bucket/m/", device="cpu", stream_options=options) as found:
            assert [int(found[f"w{i}"][0]) for i in range(SHARDS)] == list(range(SHARDS))
    assert kind.most == SHARDS  # one round
    assert len(made) == 2  # one for each call


def test_no_shard_stays_open_where_one_of_a_server_is_missing(objects, leaves_no_descriptors):
    kind, host = objects
    del kind.objects["model-00005-of-00040.safetensors"]
    kind.together.set()
    with pytest.raises(FileNotFoundError, match=r"its shard 'model-00005-of-00040\.safetensors' is missing"):
        TensorDeserializer(f"http://{host}/m/", device="cpu")

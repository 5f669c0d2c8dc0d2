"""Common mistakes at the first call: each message says what was found and what to do instead."""

from __future__ import annotations

import configparser
import contextlib
import copy
import gc
import io
import logging
import pickle
import traceback

import pytest
import torch

import tensorizer
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer._system.redaction import shown_uri
from tensorizer.stream_io import CacheOptions, CURLStreamFile, HTTPOptions, RedisStreamFile, open_stream


@pytest.fixture
def path(tmp_path):
    with TensorSerializer(tmp_path / "model.tensors") as serializer:
        serializer.write_module(torch.nn.Linear(2, 2))
    return tmp_path / "model.tensors"


def message(kind, call, *arguments, **keywords) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


def assert_words(text: str, *words: str) -> None:
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        pytest.param({"device": "auto"}, RuntimeError, ["device", "'auto'", "None", "cuda", "mapping"], id="auto"),
        pytest.param({"device": "gpu"}, RuntimeError, ["device", "'gpu'", "None", "cuda"], id="gpu"),
        pytest.param({"device": "CUDA"}, RuntimeError, ["device", "'CUDA'", "None", "cuda"], id="CUDA"),
        pytest.param({"device": "cpuu:0"}, RuntimeError, ["device", "'cpuu:0'", "None", "cuda"], id="misspelt device"),
        pytest.param({"device": {"": "auto"}}, RuntimeError, ["'auto'"], id="auto in a mapping"),
        pytest.param({"device": 1.5}, TypeError, ["device", "float"], id="float as device"),
        pytest.param({"device": torch.float16}, TypeError, ["device", "float16", "dtype="], id="dtype as device"),
        pytest.param({"filter_func": torch.float16}, TypeError, ["filter_func", "dtype="], id="dtype as filter"),
        pytest.param({"filter_func": ["w"]}, TypeError, ["filter_func", "list", "function"], id="list as filter"),
        pytest.param({"filter_func": {"w"}}, TypeError, ["filter_func", "set", "function"], id="set as filter"),
        pytest.param({"filter_func": "w"}, TypeError, ["filter_func", "str", "function"], id="name as filter"),
        pytest.param({"dtype": "flaot16"}, TypeError, ["did you mean 'float16'?"], id="misspelt name as dtype"),
        pytest.param({"dtype": "bf16"}, TypeError, ["'bf16'", "did you mean 'bfloat16'?"], id="short name as dtype"),
        pytest.param({"torch_dtype": torch.float16}, TypeError, ["did you mean dtype=?"], id="torch_dtype"),
        pytest.param({"dtype": float}, TypeError, ["torch.dtype", "type"], id="type as dtype"),
    ],
)
def test_deserializer_refuses_an_argument_and_says_what_to_pass(path, arguments, kind, words):
    assert_words(message(kind, TensorDeserializer, path, **{"device": "cpu", **arguments}), *words)


@pytest.mark.parametrize(
    ("method", "value", "words"),
    [
        pytest.param(
            "write_module", torch.nn.Linear(2, 2).state_dict(), ["OrderedDict", "write_state_dict"], id="dict"
        ),
        pytest.param("write_module", torch.ones(1), ["Tensor", "write_tensor"], id="tensor as module"),
        pytest.param("write_module", torch.nn.Linear, ["class", "Linear"], id="class as module"),
        pytest.param("write_state_dict", torch.nn.Linear(2, 2), ["Linear", "write_module"], id="module as state dict"),
        pytest.param("write_state_dict", torch.ones(1), ["Tensor", "write_tensor"], id="tensor as state dict"),
        *(
            pytest.param("write_state_dict", {"model": {}, **extra}, words, id=name)
            for name, extra, words in [
                ("int", {"epoch": 3}, ["epoch", "int", "torch.tensor(3)", "tensorizer_saving"]),
                ("float", {"lr": 0.1}, ["lr", "float", "torch.tensor(0.1)", "tensorizer_saving"]),
                ("bool", {"done": True}, ["done", "bool", "torch.tensor(True)", "tensorizer_saving"]),
                ("None", {"scheduler": {"last": None}}, ["scheduler/last", "NoneType", "tensorizer_saving"]),
                ("str", {"name": "bert"}, ["name", "str", "tensorizer_saving"]),
                ("array", {"table": torch.ones(2).numpy()}, ["table", "ndarray", "torch.from_numpy"]),
                ("module", {"model2": torch.nn.Linear(1, 1)}, ["model2", "Linear", "state_dict()"]),
                ("int key", {"state": {0: {"step": torch.ones(1)}}}, ["state", "int", "(0)", "tensorizer_saving"]),
            ]
        ),
    ],
)
def test_serializer_refuses_a_value_and_says_what_to_call(tmp_path, method, value, words):
    with TensorSerializer(tmp_path / "f") as serializer:
        assert_words(message(TypeError, getattr(serializer, method), value), *words)
        serializer.write_state_dict({"weight": torch.ones(2)})  # nothing was written before
    with TensorDeserializer(tmp_path / "f", "cpu") as deserializer:
        assert list(deserializer) == ["weight"]


def test_load_into_module_refuses_a_state_dict_and_names_load_state_dict(path):
    with TensorDeserializer(path, "cpu", lazy_load=True) as deserializer:
        text = message(TypeError, deserializer.load_into_module, torch.nn.Linear(2, 2).state_dict())
        assert_words(text, "OrderedDict", "load_state_dict")


@pytest.mark.parametrize(
    "arguments",
    [
        ({"weight": torch.ones(2, 2)},),
        (torch.nn.Linear,),
        (torch.nn.Linear(2, 2), "bias"),
        (torch.nn.Linear(2, 2), isinstance),
    ],
    ids=["a state dict", "a class", "a name as filter", "a filter that takes no name"],
)
def test_load_into_module_leaves_the_file_open_after_a_wrong_argument(path, arguments):
    model = torch.nn.Linear(2, 2)
    with TensorDeserializer(path, "cpu", lazy_load=True) as deserializer:
        message(TypeError, deserializer.load_into_module, *arguments)
        assert deserializer.load_into_module(model, strict=True) == 2
        assert deserializer.verify_module(model)[0]


@pytest.mark.parametrize("kind", [TensorDeserializer, TensorSerializer])
@pytest.mark.parametrize("value", [None, torch.nn.Linear(2, 2), {}, 1.5, True], ids=lambda value: type(value).__name__)
def test_what_is_no_file_at_all_is_refused_by_its_type(kind, value):
    assert_words(message(TypeError, kind, value), "path", "file", type(value).__name__)


# --- arguments that stand beside secrets -----------------------------------------------------------------------------

SECRET = "hunter2"
LONE = "\udc80"
NO_TIMES = (float("nan"), -1, "x", None)
BRIEF = HTTPOptions(retries=0, retry_seconds=0.1, proxy="")


def assert_no_secret(call, *words: str) -> None:
    """The call fails with a ``TypeError`` or ``ValueError`` that has the words, and nothing of it shows the secret."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert_words(str(caught.value), *words)
    assert SECRET not in "".join(traceback.format_exception_only(type(caught.value), caught.value))
    error = caught.value
    while error is not None:
        assert SECRET not in f"{error} {error!r} {getattr(error, 'object', '')}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


URL = f"http://user:{SECRET}@127.0.0.1:1/x?sig={SECRET}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("begin", value) for value in (1.5, "x", 2**64, -1)),
        *(("end", value) for value in (1.5, "x", 0)),
        *(("buffer_size", value) for value in (1.5, "x")),
        *(("url_lifetime", value) for value in NO_TIMES[:-1]),
        *(("display_name", value) for value in (3, LONE)),
        *(("headers", value) for value in ([SECRET], {"A": SECRET + LONE}, lambda: [SECRET], lambda: {"A": LONE})),
        ("url_provider", SECRET),
        ("http_options", {"proxy": SECRET}),
        ("certificate_handling", SECRET),
        *(("uri", value) for value in (URL + LONE, f"http://user:{SECRET}@ho{LONE}st/", URL.encode(), None)),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else type(value).__name__,
)
def test_a_wrong_argument_beside_a_url_is_named_and_the_url_is_not_shown(name, value):
    assert_no_secret(lambda: CURLStreamFile(**{"uri": URL, "http_options": BRIEF, name: value}), name)


@pytest.mark.parametrize("password", [f"pa/{SECRET}", f"{SECRET}/@", f"p:/{SECRET}@x", f"{SECRET}#x", f"{SECRET}?x"])
def test_a_password_that_is_not_escaped_is_not_shown(tmp_path, password):
    for begin in ("redis://", "redis://:7/", "rediss://:/", "https://us[er"):
        assert SECRET not in shown_uri(f"{begin}:{password}@host:1/m"), begin
    for begin in ("http://user", "simplecache::http://user"):
        uri = f"{begin}:{password}@host:1/m"
        for cache in (None, CacheOptions(tmp_path, offline=True)):
            with pytest.raises((OSError, ValueError)) as caught:
                TensorDeserializer(uri, stream_options={"cache": cache, "http_options": BRIEF})
            assert SECRET not in f"{caught.value}", (uri, cache)


def test_what_only_looks_like_a_login_is_shown():
    for uri in (
        "https://host:80/a@b/c", "https://host/a:b/c@d", "http://[::1]:80/a@b", "http://[::1]/a:b@c", "s3://bucket/a:b@c",
        "s3://profile:name/key@2", "github://org:repo/folder/f@x", "abfs://container@account/x", "zip://a@b/c::file:///d",
        "https://host/https://other/x@y", "file:///a:b/c@d",
    ):  # fmt: skip
        assert shown_uri(uri) == uri.replace("a@b/c::", "b/c::")


def test_a_wrong_http_option_is_named_and_neither_proxy_nor_header_is_shown():
    for name in ("connect_timeout", "stall_timeout", "retry_seconds"):
        for value in NO_TIMES:
            assert_no_secret(lambda name=name, value=value: HTTPOptions(**{name: value}), name)
        for value in (1_000_000, 1e30, 10**400, float("inf")):
            assert getattr(HTTPOptions(**{name: value}), name) == 1_000_000
    for name in ("retries", "connections"):
        for value in (1.5, "x", -1, 10**400, float("inf")):
            assert_no_secret(lambda name=name, value=value: HTTPOptions(**{name: value}), name)
    for proxy in (3, f"http://{SECRET}@host".encode(), f"http://{SECRET}{LONE}@host"):
        assert_no_secret(lambda proxy=proxy: HTTPOptions(proxy=proxy), "proxy")
    assert_no_secret(lambda: HTTPOptions(headers=[SECRET]), "headers")
    assert_no_secret(lambda: HTTPOptions(http_version=1.1), "http_version")


def test_times_of_the_environment_that_are_none_are_named_and_endless_ones_have_an_end(monkeypatch):
    for name in ("CONNECT_TIMEOUT", "STALL_TIMEOUT", "RETRY_SECONDS"):
        for value in ("nan", "-1", "x"):
            monkeypatch.setenv(f"TENSORIZER_HTTP_{name}", value)
            assert_words(message(ValueError, HTTPOptions), f"TENSORIZER_HTTP_{name}", value)
        for value in ("inf", "1e30"):
            monkeypatch.setenv(f"TENSORIZER_HTTP_{name}", value)
            assert getattr(HTTPOptions(), name.lower()) == 1_000_000
        monkeypatch.delenv(f"TENSORIZER_HTTP_{name}")


def test_a_wrong_argument_beside_a_redis_uri_is_named_and_the_password_is_not_shown():
    uri = f"redis://user:{SECRET}@127.0.0.1:1/x"
    wrong = [
        *(("begin", value) for value in (1.5, "x", 2**64, -1)),
        *(("connections", value) for value in (1.5, "x", 2**64, 0)),
        *(("retries", value) for value in (1.5, "x", 2**64, -1)),
        *(("buffer_size", value) for value in (1.5, "x")),
        *((name, value) for name in ("connect_timeout", "stall_timeout", "retry_seconds") for value in NO_TIMES),
        ("certificate_handling", SECRET),
    ]
    for name, value in wrong:
        assert_no_secret(lambda name=name, value=value: RedisStreamFile(uri, **{name: value}), name)
    hosts = ("h:port", "h:0", "h:65536", "[h", "a b")
    places = ("/x@h/x", "#@h/x", "?@h/x", *(f"@{host}/x" for host in hosts))
    for text in (uri + LONE, uri.encode(), None, *(f"redis://user:{SECRET}{place}" for place in places)):
        assert_no_secret(lambda text=text: RedisStreamFile(text), "Redis URI")


def test_keys_in_the_wrong_place_of_an_s3_call_are_not_shown(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("tensorizer.stream_io._s3_default_config_paths", ())
    keys = {"s3_access_key_id": "a", "s3_secret_access_key": SECRET}
    places = [(uri, {}) for uri in (f"s3://AKIA:{SECRET}@bucket/key", f"s3://{SECRET}@bucket/key", f"s3:///{SECRET}")]
    hosts = ("host", "host:port", "host with blank", "[host", "ho\u2100st", "127.0.0.1:1")
    places += [
        ("s3://b/k", {"s3_endpoint": f"{scheme}u:{SECRET}@{host}"}) for scheme in ("", "https://") for host in hosts
    ]
    places += [("s3://b/k", {"s3_endpoint": f"{SECRET}://"}), ("s3://b/k", {"s3_endpoint": f"u:{SECRET}"})]
    places += [
        ("s3://b/k", {f"s3_{name}": 5}) for name in ("access_key_id", "session_token", "endpoint", "region_name")
    ]
    for uri, more in places:
        for mode in ("rb", "wb"):
            assert_no_secret(lambda uri=uri, more=more, mode=mode: open_stream(uri, mode, **{**keys, **more}))
    for number, text in enumerate((f"key = {SECRET}", f"[default]\nkey {SECRET}", f"[default]\na=\na={SECRET}")):
        path = tmp_path / f"{number}.s3cfg"
        path.write_text(text)
        with pytest.raises(configparser.Error, match=f"{path}, line ") as caught:
            open_stream("s3://b/k", s3_config_path=path)
        assert SECRET not in "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    for kind in (TensorDeserializer, TensorSerializer, open_stream):
        assert_no_secret(lambda kind=kind: kind(f"file://user:{SECRET}@host/x"), "host")
    assert SECRET not in caplog.text


def test_what_has_an_open_file_is_neither_copied_nor_pickled_and_stays_open(path, tmp_path):
    with TensorSerializer(tmp_path / "other") as serializer, TensorDeserializer(path, "cpu", lazy_load=True) as file:
        for opened in (serializer, file):
            for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
                assert_words(message(TypeError, attempt, opened), type(opened).__name__, "copied", "pickled")
        gc.collect()
        serializer.write_state_dict(dict(file))


class Reopened(TensorDeserializer):
    """One that says itself how it is pickled."""

    def __init__(self, path):
        self.path = path
        super().__init__(path, device="cpu", lazy_load=True)

    def __reduce__(self):
        return Reopened, (self.path,)


def test_a_subclass_may_say_how_it_is_pickled(path):
    with Reopened(path) as file, pickle.loads(pickle.dumps(file)) as other, copy.copy(file) as third:
        assert list(other) == list(third) == list(file)


class Absolute:
    """A file object that only seeks from the beginning, and says so in its own way."""

    def __init__(self, data):
        self._file = io.BytesIO(data)
        self.read, self.tell = self._file.read, self._file.tell

    def seek(self, position, whence=0):
        if whence != 0:
            raise LookupError(f"whence {whence}")
        return self._file.seek(position)

    def close(self):
        pass


def test_a_file_object_need_not_know_its_end(path):
    with (
        TensorDeserializer(Absolute(path.read_bytes()), device="cpu") as file,
        TensorDeserializer(path, "cpu") as wanted,
    ):
        assert {name: value.tolist() for name, value in file.items()} == {n: v.tolist() for n, v in wanted.items()}


def test_the_first_error_of_a_file_object_is_told_where_it_cannot_be_closed_either():
    class NoFile:
        def read(self, _=-1):
            return b""

    assert_words(message(AttributeError, TensorDeserializer, NoFile()), "tell")


def test_a_device_that_is_full_is_named():
    def write(target):
        with TensorSerializer(target) as serializer:
            serializer.write_state_dict({"a": torch.ones(3_000_000)})

    assert_words(message(OSError, write, "/dev/full"), "No space left", "/dev/full")
    for buffering in (0, 4096):
        with contextlib.suppress(OSError), open("/dev/full", "rb+", buffering=buffering) as file:
            assert_words(message(OSError, write, file), "No space left", "/dev/full")


def test_names_of_dtypes_are_taken_wherever_a_dtype_is(path, tmp_path):
    for dtype in (torch.float16, "float16", "torch.float16"):
        with TensorDeserializer(path, device="cpu", dtype=dtype) as file:
            assert file[".weight"].dtype == torch.float16
        tensorizer.convert(path, tmp_path / "half.tensors", dtype=dtype)
        assert {one.dtype for one in tensorizer.inspect(tmp_path / "half.tensors").tensors} == {"float16"}
    assert "did you mean dtype=?" in message(TypeError, tensorizer.convert, path, path, torch_dtype="float16")
    assert "did you mean dtype=?" in message(TypeError, tensorizer.load_file, path, torch_dtype=torch.float16)


def test_a_name_that_a_file_lacks_is_told_with_the_file_and_the_nearest_name(path):
    with TensorDeserializer(path, device="cpu") as file, tensorizer.safe_open(path, "pt") as opened:
        for call in (opened.get_tensor, opened.get_slice):
            assert_words(message(KeyError, call, "weigth"), str(path), "weigth", "did you mean 'weight'?")
        assert_words(message(KeyError, file.__getitem__, ".weigth"), str(path), "did you mean '.weight'?")


def test_configurations_and_uris_with_one_slash_are_told_from_weights(tmp_path):
    (tmp_path / "config.json").write_text('{\n  "architectures": ["LlamaForCausalLM"]\n}\n')
    text = message(ValueError, tensorizer.inspect, tmp_path / "config.json")
    assert_words(text, "config.json", "it is JSON; did you mean the folder?")
    assert_words(message(ValueError, tensorizer.inspect, "s3:/bucket/m.tensors"), "did you mean s3://bucket/m.tensors?")
    assert_words(message(ValueError, tensorizer.inspect, "nosuch://m.tensors"), "unsupported URL scheme 'nosuch'")

"""Every call that vLLM makes, in its order: a failed one there makes users think the file is broken."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path

import pytest
import torch

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.stream_io import open_stream
from tensorizer.utils import convert_bytes, get_mem_usage, no_init_or_tensor

MARKER = "vllm_tensorized_marker"
S3_ARGUMENTS = {"s3_access_key_id": None, "s3_secret_access_key": None, "s3_endpoint": None}


class RotaryEmbedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.randn(16, 4), persistent=False)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(10, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.rotary = RotaryEmbedding()
        self.packed = torch.nn.Parameter(torch.randint(0, 99, (4, 4), dtype=torch.int32), requires_grad=False)
        self.register_buffer("freqs", torch.randn(4, dtype=torch.complex64))
        self.norm_scale = torch.nn.Parameter(torch.randn(8))


@contextlib.contextmanager
def ambient(device="cpu", dtype=torch.float16):
    """The contexts around everything in vLLM."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def serialize(model, uri, encryption_keyfile=None, close=True, **serialization_kwargs):
    model.register_parameter(
        MARKER, torch.nn.Parameter(torch.tensor((1,), device="meta", dtype=torch.int64), requires_grad=False)
    )
    encryption = None
    if encryption_keyfile is not None:
        encryption = EncryptionParams.random()
        with open_stream(encryption_keyfile, mode="wb+", **S3_ARGUMENTS) as stream:
            stream.write(encryption.key)
    with open_stream(uri, mode="wb+", **S3_ARGUMENTS) as stream:
        serializer = TensorSerializer(stream, encryption=encryption, **serialization_kwargs)
        serializer.write_module(model)
        if close:
            serializer.close()
    del model.vllm_tensorized_marker


def open_for_reading(uri, **stream_kwargs):
    return open_stream(uri, mode="rb", **S3_ARGUMENTS, **stream_kwargs)


def deserialize_arguments(keyfile=None, **arguments):
    arguments = {"verify_hash": None, "encryption": None, "num_readers": None, **arguments}
    if keyfile is not None:
        with open_for_reading(keyfile) as stream:
            key = stream.read()
        assert type(key) is bytes
        arguments["encryption"] = DecryptionParams.from_key(key)
    return arguments


def is_marked(uri, **arguments) -> bool:
    with open_for_reading(uri) as stream:
        deserializer = TensorDeserializer(stream, **arguments, lazy_load=True)
        return f".{MARKER}" in deserializer


def deserialize(model, uri, device="cpu", dtype=torch.float16, **arguments):
    before = get_mem_usage()
    stream_context = open_for_reading(uri)
    with stream_context as stream, TensorDeserializer(stream, dtype=dtype, device=device, **arguments) as deserializer:
        deserializer.load_into_module(model)
    total = convert_bytes(deserializer.total_tensor_bytes)
    deserializer.close()
    del model.vllm_tensorized_marker
    return f"{total} {before} {get_mem_usage()}"


def empty_model():
    with ambient("meta"):
        model = Model()
    model.register_parameter(MARKER, torch.nn.Parameter(torch.empty(1, device="meta", dtype=torch.int64), False))
    return model


def assert_loaded(model, original):
    state, expected = model.state_dict(), original.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert not tensor.is_meta, name
        assert torch.equal(tensor, expected[name]), name
    assert torch.equal(model.rotary.cos_sin_cache, original.rotary.cos_sin_cache)
    assert not hasattr(model, MARKER)


@pytest.fixture
def original():
    with ambient():
        return Model()


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_model_goes_out_and_comes_back(original, tmp_path, kind, encrypted):
    uri, keyfile = kind(tmp_path / "model" / "model.tensors"), kind(tmp_path / "key") if encrypted else None
    with ambient():
        serialize(original, uri, keyfile)
        arguments = deserialize_arguments(keyfile)
        assert is_marked(uri, **arguments)
        model = empty_model()
        report = deserialize(model, uri, **arguments)
    assert_loaded(model, original)
    assert model.packed.dtype == torch.int32
    assert model.freqs.dtype == torch.complex64
    assert report.startswith(convert_bytes(sum(t.nbytes for t in original.state_dict().values()) + 16 * 4 * 2 + 8))


@pytest.mark.usefixtures("eager_and_lazy")
def test_the_marker_loads_as_a_zero_parameter_on_the_root(original, tmp_path):
    uri = tmp_path / "model.tensors"
    serialize(original, uri)
    model = empty_model()
    with open_for_reading(uri) as stream, TensorDeserializer(stream, device="cpu") as deserializer:
        assert f".{MARKER}" in deserializer
        deserializer.load_into_module(model)
    marker = model.get_parameter(MARKER)
    assert isinstance(marker, torch.nn.Parameter)
    assert (marker.dtype, marker.shape, marker.item()) == (torch.int64, (1,), 0)
    del model.vllm_tensorized_marker


def test_looking_for_the_marker_reads_no_tensor_data(original, tmp_path):
    uri = tmp_path / "model.tensors"
    serialize(original, uri)
    data = uri.read_bytes()
    weight = original.layers[0].weight.detach().numpy().tobytes()
    start = data.index(weight)
    with open(uri, "r+b") as file:
        file.seek(start)
        file.write(bytes(len(weight)))
    assert is_marked(uri, verify_hash=True)
    with pytest.raises(Exception, match=r"layers\.0\.weight"):
        deserialize(empty_model(), uri, verify_hash=True)


def test_the_file_is_complete_without_close(original, tmp_path):
    uri = tmp_path / "model.tensors"
    serialize(original, uri, close=False)
    model = empty_model()
    deserialize(model, uri)
    assert_loaded(model, original)


def test_the_first_open_is_a_reachability_check(tmp_path):
    (tmp_path / "there").write_bytes(b"x")
    with open_for_reading(str(tmp_path / "there")):
        pass
    with pytest.raises(FileNotFoundError), open_for_reading(str(tmp_path / "not there")):
        pass


def test_user_options_pass_through(original, tmp_path):
    uri = str(tmp_path / "model.tensors")
    serialize(original, uri, limit_cpu_concurrency=2)
    with open_for_reading(uri, force_http=False, s3_region_name="x", buffer_size=4096) as stream:
        deserializer = TensorDeserializer(
            stream, dtype=None, device="cpu", verify_hash=True, encryption=None, num_readers=2, plaid_mode=True
        )
        assert deserializer.total_tensor_bytes > 0


def test_weights_are_streamed_through_a_generator_in_file_order(original, tmp_path):
    uri = tmp_path / "model.tensors"
    serialize(original, uri)

    def weights():
        with open_for_reading(uri) as stream, TensorDeserializer(stream, device="cpu") as deserializer:
            yield from deserializer.items()

    names = [name for name, _ in weights()]
    assert names[:2] == [".packed", ".norm_scale"]
    assert names.index("layers.0.weight") < names.index("layers.1.bias") < names.index("rotary.cos_sin_cache")
    loaded = dict(weights())
    assert torch.equal(loaded["layers.1.weight"], original.layers[1].weight)


def test_one_file_per_rank(tmp_path):
    template = str(tmp_path / "shards" / "model-rank-%03d.tensors")
    shards = [Model() for _ in range(2)]
    for rank, shard in enumerate(shards):
        serialize(shard, template % rank)
    for rank, shard in enumerate(shards):
        model = empty_model()
        deserialize(model, template % rank, dtype=None)
        assert_loaded(model, shard)


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_lora_adapters(tmp_path):
    adapter = {f"base_model.model.layers.{i}.lora_{side}.weight": torch.randn(2, 4) for i in range(2) for side in "AB"}
    with open_stream(str(tmp_path / "adapter_config.json"), mode="wb+", **S3_ARGUMENTS) as stream:
        stream.write(json.dumps({"r": 2}).encode())
    with open_stream(f"{tmp_path}/adapter_model.tensors", mode="wb+", **S3_ARGUMENTS) as stream:
        serializer = TensorSerializer(stream)
        serializer.write_state_dict(adapter)
        serializer.close()

    assert json.load(open_stream(f"{tmp_path}/adapter_config.json", mode="rb", **S3_ARGUMENTS)) == {"r": 2}
    arguments = deserialize_arguments()
    tensors = TensorDeserializer(f"{tmp_path}/adapter_model.tensors", dtype=torch.bfloat16, device="cpu", **arguments)
    assert list(tensors) == list(adapter)
    for name, tensor in tensors.items():
        assert name in tensors
        assert torch.equal(tensor, adapter[name].bfloat16())
        assert torch.equal(tensors[name], tensor)


def test_artifacts_of_any_kind_go_through_streams(tmp_path):
    write = functools.partial(open_stream, mode="wb+", **S3_ARGUMENTS)
    with write(tmp_path / "deep" / "config.json") as stream:
        stream.write(b"{}")
    with open_stream(str(tmp_path / "deep" / "config.json"), "rb") as stream:
        assert stream.read() == b"{}"


def test_older_releases_build_the_model_without_initialisation(original, tmp_path):
    uri = tmp_path / "model.tensors"
    serialize(original, uri)
    with ambient(), no_init_or_tensor():
        model = Model()
    assert model.layers[0].weight.is_meta
    model.register_parameter(MARKER, torch.nn.Parameter(torch.empty(1, device="meta", dtype=torch.int64), False))
    deserialize(model, uri)
    assert_loaded(model, original)


def test_keys_are_32_bytes_and_can_be_given_again():
    key = EncryptionParams.random().key
    assert len(key) == 32
    assert EncryptionParams(key=key).key == key
    assert DecryptionParams.from_key(key).key == key

"""The ways of use that the READMEs of all releases printed, with a small model in place of theirs."""

from __future__ import annotations

import importlib
import os
import time
from collections import OrderedDict

import numpy as np
import pytest
import samples
import tiny_models
import torch
import transformers

import tensorizer

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]


@pytest.fixture
def original():
    return tiny_models.llama()


@pytest.fixture
def uri(original, tmp_path):
    return str(samples.write_module(tmp_path / "models" / "model.tensors", original))


@pytest.fixture
def model_ref(original, tmp_path):
    return str(tiny_models.save_language_model(tmp_path / "ref", original))


def assert_same_model(model, original):
    samples.assert_same(model.state_dict(), original.state_dict())


def test_serializing_by_the_first_readme(original, tmp_path):
    from tensorizer.serialization import TensorSerializer

    serializer = TensorSerializer(str(tmp_path / "gpt.tensors"))
    serializer.write_module(original)  # published without close()
    assert len(tensorizer.TensorDeserializer(str(tmp_path / "gpt.tensors"), device="cpu")) == 21 + 2
    serializer.close()


@pytest.mark.usefixtures("eager_and_lazy")
def test_deserializing_by_the_first_readme(uri, model_ref, original):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from tensorizer.serialization import TensorDeserializer
    from tensorizer.utils import convert_bytes, get_mem_usage, no_init_or_tensor

    before_mem = get_mem_usage()
    config = AutoConfig.from_pretrained(model_ref)
    model = no_init_or_tensor(lambda: AutoModelForCausalLM.from_config(config))

    start = time.time()
    deserializer = TensorDeserializer(uri, device="cpu", plaid_mode=True, plaid_mode_buffers=4)
    deserializer.load_into_module(model)
    duration = max(time.time() - start, 1e-9)

    total_bytes_str = convert_bytes(deserializer.total_tensor_bytes)
    per_second = convert_bytes(deserializer.total_tensor_bytes / duration)
    after_mem = get_mem_usage()
    deserializer.close()
    assert f"Deserialized {total_bytes_str} in {duration:0.2f}s, {per_second}/s".count("KB") >= 1
    assert before_mem.startswith("CPU: ")
    assert after_mem.startswith("CPU: ")

    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(model_ref)
    eos = tokenizer.eos_token_id
    input_ids = tokenizer.encode("abc", return_tensors="pt")
    with torch.no_grad():
        output = model.generate(input_ids, max_new_tokens=5, do_sample=True, pad_token_id=eos)
    assert tokenizer.decode(output[0], skip_special_tokens=True).startswith("a b c")
    assert_same_model(model, original)


@pytest.mark.usefixtures("eager_and_lazy")
def test_the_empty_state_dict_of_the_first_readme(uri, original):
    from tensorizer.utils import no_init_or_tensor

    model_class, config = transformers.LlamaForCausalLM, original.config
    model = no_init_or_tensor(lambda: model_class.from_pretrained(None, config=config, state_dict=OrderedDict()))
    tensorizer.TensorDeserializer(uri, device="cpu").load_into_module(model)
    assert_same_model(model, original)


def test_streams_with_credentials_of_the_middle_releases(original, tmp_path):
    from tensorizer import TensorDeserializer, TensorSerializer, stream_io

    credentials = {"s3_access_key_id": "", "s3_secret_access_key": "", "s3_endpoint": "object.example.com"}
    with stream_io.open_stream(str(tmp_path / "m.tensors"), "wb+", **credentials) as stream:
        serializer = TensorSerializer(stream)
        serializer.write_module(original)
        serializer.close()
    with stream_io.open_stream(str(tmp_path / "m.tensors"), mode="rb", **credentials) as stream:
        deserializer = TensorDeserializer(stream, device="cpu", lazy_load=True, plaid_mode=False)
        assert_same_model_after_loading(deserializer, original)


def assert_same_model_after_loading(deserializer, original):
    from tensorizer.utils import no_init_or_tensor

    with torch.device("cpu"), no_init_or_tensor():
        model = transformers.AutoModelForCausalLM.from_config(original.config)
    deserializer.load_into_module(model)
    deserializer.close()
    assert_same_model(model, original)


def test_the_context_manager_form_of_the_current_readme(uri, original):
    from tensorizer import TensorDeserializer

    with TensorDeserializer(uri, device="cpu", num_readers=2) as deserializer:
        assert_same_model_after_loading(deserializer, original)


def test_encryption_of_the_current_readme(original, tmp_path, monkeypatch):
    from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer

    monkeypatch.setenv("MODEL_PASSPHRASE", "it is a secret")
    source = os.getenv("MODEL_PASSPHRASE")
    quick = {"opslimit": EncryptionParams.OpsLimit.MIN, "memlimit": EncryptionParams.MemLimit.MIN}
    random = EncryptionParams.random()
    (tmp_path / "tensor.key").write_bytes(random.key)
    for encryption_params, decryption_params in (
        (EncryptionParams.from_string(source, **quick), DecryptionParams.from_string(source)),
        (random, DecryptionParams.from_key((tmp_path / "tensor.key").read_bytes())),
    ):
        serializer = TensorSerializer(str(tmp_path / "model.tensors"), encryption=encryption_params)
        serializer.write_module(original)
        serializer.close()
        deserializer = TensorDeserializer(str(tmp_path / "model.tensors"), device="cpu", encryption=decryption_params)
        assert_same_model_after_loading(deserializer, original)


def test_state_dicts_of_the_current_readme(original, tmp_path):
    from tensorizer import TensorDeserializer, TensorSerializer

    path = str(tmp_path / "model.tensors")
    serializer = TensorSerializer(path)
    serializer.write_state_dict(original.state_dict())
    serializer.close()
    model = tiny_models.llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state_dict = TensorDeserializer(path, device="cpu")
    model.load_state_dict(state_dict)
    assert_same_model(model, original)


def test_numpy_of_the_current_readme(tmp_path):
    from tensorizer import TensorDeserializer, TensorSerializer

    path = str(tmp_path / "bf16.tensors")
    tensor = torch.normal(0, 0.5, (16, 16), dtype=torch.bfloat16)
    serializer = TensorSerializer(path)
    serializer.write_tensor(0, "mine", tensor_type=tensorizer.TensorType.PARAM, tensor=tensor)
    serializer.close()
    with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
        for _, _, name, arr, is_opaque, torch_dtype in deserializer.read_numpy_arrays(allow_raw_data=True):
            assert (name, is_opaque, torch_dtype) == ("mine", True, "torch.bfloat16")
            again = torch.from_numpy(arr).view(getattr(torch, torch_dtype.split(".")[1]))
            assert np.shares_memory(arr, again.view(torch.int16).numpy())
            assert torch.equal(again, tensor)


def test_torch_compat_of_the_current_readme(original, tmp_path):
    path = tmp_path / "model.pt"
    with tensorizer.torch_compat.tensorizer_saving():
        torch.save(original, path)
    with tensorizer.torch_compat.tensorizer_loading(device="cpu", num_readers=2):
        assert_same_model(torch.load(path, weights_only=False), original)

    location = str(tmp_path / "elsewhere.tensors")
    with tensorizer.torch_compat.tensorizer_saving(file_obj=lambda f: location, limit_cpu_concurrency=1):
        original.save_pretrained(tmp_path / "hf")  # a library that may or may not call torch.save
        torch.save(original.state_dict(), path)
    with tensorizer.torch_compat.tensorizer_loading(location, device="cpu", suppress_weights_only=True):
        state_dict = torch.load(path, weights_only=True)
    assert all(torch.equal(state_dict[name], value) for name, value in original.state_dict().items())


def test_every_published_name_can_be_imported():
    published = {
        "tensorizer": ["DecryptionParams", "EncryptionParams", "TensorDeserializer", "TensorSerializer"],
        "tensorizer.stream_io": ["CAInfo", "CURLStreamFile", "RedisStreamFile", "open_stream"],
        "tensorizer.torch_compat": ["tensorizer_loading", "tensorizer_saving"],
        "tensorizer.utils": ["convert_bytes", "get_device", "get_gpu_name", "get_mem_usage", "no_init_or_tensor"],
    }
    for module, names in published.items():
        assert all(callable(getattr(importlib.import_module(module), name)) for name in names)

"""``--load-format tensorizer_stream``: over the interface of vLLM's loaders, and in vLLM where it is installed."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT
from servers.certificates import make_certificates
from servers.file_server import serve_folder

from tensorizer import DecryptionParams, EncryptionParams, HashMismatchError, LoadError, SigningKey, save_file, sign
from tensorizer._version import __version__
from tensorizer.integrations import sglang
from tensorizer.integrations import vllm as integration

TENSORS = {"embed.weight": torch.randn(10, 8), "layers.0.weight": torch.randn(8, 8), "norm.weight": torch.randn(8)}


def refuse_other_formats(self):
    """As vLLM 0.32 checks the format for a model of an object store."""
    if self.model_config.model_weights and self.load_config.load_format not in ("modelexpress", "runai_streamer"):
        raise ValueError("To load a model from object storage, 'load_format' must be 'runai_streamer'")


def stub_of_vllm(base) -> dict:
    """The modules of a vLLM that has this class for loaders, and one load format of its own."""
    formats = {"auto": object}

    def register_model_loader(name):
        def register(loader):
            assert issubclass(loader, base)
            formats[name] = loader
            return loader

        return register

    vllm, executor, loaders = (types.ModuleType(name) for name in ("vllm", "vllm.model_executor", "loader"))
    vllm.__version__ = "0.99.0"
    loaders._LOAD_FORMAT_TO_MODEL_LOADER, loaders.register_model_loader = formats, register_model_loader
    executor.model_loader, vllm.model_executor = loaders, executor
    vllm.config = types.ModuleType("vllm.config")
    vllm.config.VllmConfig = type("VllmConfig", (), {"try_verify_and_update_config": refuse_other_formats})
    base_loader = types.ModuleType("base_loader")
    base_loader.BaseModelLoader = base
    place = "vllm.model_executor"
    modules = {"vllm": vllm, "vllm.config": vllm.config, place: executor, f"{place}.model_loader": loaders}
    return {**modules, f"{place}.model_loader.base_loader": base_loader}


class BaseModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config

    def download_model(self, model_config):
        raise NotImplementedError

    def load_weights(self, model, model_config):
        raise NotImplementedError


@pytest.fixture
def formats(monkeypatch):
    """The load formats of a stub in which ours is registered."""
    for name, module in stub_of_vllm(BaseModelLoader).items():
        monkeypatch.setitem(sys.modules, name, module)
    integration.register()
    return sys.modules["vllm.model_executor.model_loader"]._LOAD_FORMAT_TO_MODEL_LOADER


class Model(torch.nn.Module):
    """A model as vLLM has them: it takes the parts that it wants from an iterator."""

    secondary_weights = ()

    def __init__(self, stops_early=False):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False)])
        self.norm = torch.nn.LayerNorm(8, bias=False)
        self.stops_early = stops_early

    def load_weights(self, weights):
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)
            loaded.add(name)
            if self.stops_early:
                break
        return loaded


def load(formats, source, model=None, **config):
    loader = formats["tensorizer_stream"](SimpleNamespace(model_loader_extra_config=config, use_tqdm_on_load=False))
    model_config = SimpleNamespace(model=str(source), model_weights="", revision=None, quantization=None)
    model = Model() if model is None else model
    loader.download_model(model_config)
    loader.load_weights(model, model_config)
    return model


def assert_loaded(model, tensors=TENSORS):
    assert model.state_dict().keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", max_shard_size=400)
    assert len(list(tmp_path.glob("model-*"))) == 2
    return tmp_path


def write_sums(folder):
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in folder.glob("model-*")]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return str(folder / "SHA256SUMS")


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


# --- the interface ----------------------------------------------------------------------------------------------------


def test_the_entry_point_of_vllm_is_register():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = 'tensorizer = "tensorizer.integrations.vllm:register"'
    assert f'[project.entry-points."vllm.general_plugins"]\n{line}\n' in text


def test_the_module_of_the_entry_point_imports_nothing_of_vllm():
    program = (
        "import sys; sys.modules['vllm'] = None; import tensorizer.integrations.vllm; "
        "assert not [name for name in sys.modules if name.startswith('vllm.')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_register_does_nothing_twice(formats):
    registered = formats["tensorizer_stream"]
    integration.register()
    assert formats["tensorizer_stream"] is registered
    assert issubclass(registered, BaseModelLoader)


def test_a_vllm_without_what_it_keeps_to_itself_is_told_once(monkeypatch, recwarn):
    modules = stub_of_vllm(BaseModelLoader)
    loaders, told = modules["vllm.model_executor.model_loader"], []
    del modules["vllm.config"], modules["vllm"].config, loaders._LOAD_FORMAT_TO_MODEL_LOADER
    loaders.register_model_loader = lambda name: lambda loader: told.append(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    integration.register()
    integration.register()
    assert told == ["tensorizer_stream"]
    assert not recwarn.list


def test_a_model_of_an_object_store_may_have_our_format(formats):
    settings = sys.modules["vllm.config"].VllmConfig()
    settings.model_config = SimpleNamespace(model_weights="s3://bucket/model")
    for name in ("tensorizer_stream", "runai_streamer"):
        settings.load_config = SimpleNamespace(load_format=name)
        settings.try_verify_and_update_config()
        assert settings.load_config.load_format == name
    settings.load_config = SimpleNamespace(load_format="auto")
    with pytest.raises(ValueError, match="object storage"):
        settings.try_verify_and_update_config()


class RenamedArguments(BaseModelLoader):
    def load_weights(self, model, vllm_config):
        raise NotImplementedError


class WithoutDownload:
    def __init__(self, load_config):
        pass

    def load_weights(self, model, model_config):
        raise NotImplementedError


@pytest.mark.parametrize("base", [RenamedArguments, WithoutDownload])
def test_a_vllm_with_another_interface_gets_a_warning_and_keeps_its_formats(monkeypatch, caplog, base):
    for name, module in stub_of_vllm(base).items():
        monkeypatch.setitem(sys.modules, name, module)
    with caplog.at_level("WARNING"), pytest.warns(UserWarning, match=r"0\.99\.0"):
        integration.register()
    assert f"tensorizer {__version__}" in caplog.text
    assert "vLLM 0.99.0" in caplog.text
    formats = sys.modules["vllm.model_executor.model_loader"]._LOAD_FORMAT_TO_MODEL_LOADER
    assert formats == {"auto": object}


@pytest.mark.filterwarnings("error")
def test_register_does_not_raise_where_warnings_are_errors(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    integration.register()
    assert "tensorizer_stream" in caplog.text


# --- loads over the interface -----------------------------------------------------------------------------------------


def test_weights_of_a_folder_are_loaded(formats, folder, caplog):
    with caplog.at_level("INFO", "vllm.tensorizer"):
        assert_loaded(load(formats, folder))
    begin, end = (record.getMessage() for record in caplog.records)
    assert "not verified" in begin
    assert str(folder) in end
    assert "not verified" in end
    assert "GB/s" in end or "MB/s" in end or "KB/s" in end


def test_weights_may_lie_elsewhere_encrypted_and_signed(formats, tmp_path, caplog):
    key, signer = EncryptionParams.random(), SigningKey.from_bytes(bytes(range(32)))
    (tmp_path / "key").write_bytes(key.key)
    save_file(TENSORS, tmp_path / "model.tensors", encryption=key)
    (tmp_path / "public").write_text(bytes(signer.public_key).hex())
    sign(tmp_path / "model.tensors", signer, encryption=DecryptionParams.from_key(key.key))
    config = {"weights": str(tmp_path), "encryption_keyfile": str(tmp_path / "key")}
    with caplog.at_level("INFO", "vllm.tensorizer"):
        assert_loaded(load(formats, "org/name-that-nobody-has", **config, public_key=str(tmp_path / "public")))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "verified by the digests in it" in line


def test_a_server_is_a_place_for_weights_with_a_cache(formats, folder, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TENSORIZER_HTTP_RETRIES", "0")  # it is gone in the end
    sums = write_sums(folder)
    with serve_folder(folder) as address:
        config = {"cache": str(tmp_path_factory.mktemp("cache")), "connections": 2, "progress": False}
        assert_loaded(load(formats, address, verify=f"{address}/{os.path.basename(sums)}", **config))
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        load(formats, address)


def test_a_server_whose_authority_a_variable_names_is_a_place_for_weights(formats, folder, tmp_path_factory):
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    with serve_folder(folder, context=certificates.context()) as address, pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", str(certificates.authority))
        assert_loaded(load(formats, address))
        environment.setenv("SSL_CERT_FILE", str(certificates.self_signed))
        with pytest.raises(OSError, match="certificate"):
            load(formats, address)


@pytest.mark.parametrize("stops_early", [False, True])
def test_a_flipped_bit_ends_the_load_with_a_mismatch(formats, folder, stops_early):
    config = {"verify": write_sums(folder)}
    assert_loaded(load(formats, folder, **config))
    flip(sorted(folder.glob("model-*"))[-1])
    with pytest.raises(HashMismatchError, match="model-00002-of-00002"):
        load(formats, folder, Model(stops_early), **config)
    load(formats, folder)  # nothing was to be compared


def test_a_reload_reads_the_files_as_they_are_then(formats, folder):
    model = load(formats, folder)
    changed = {name: value + 1 for name, value in TENSORS.items()}
    save_file(changed, folder / "model.safetensors", max_shard_size=400)
    loader = formats["tensorizer_stream"](SimpleNamespace(model_loader_extra_config={}, use_tqdm_on_load=False))
    model_config = SimpleNamespace(model=str(folder), model_weights="", revision=None, quantization=None)
    model.load_weights(loader.get_all_weights(model_config, model))
    assert_loaded(model, changed)


def test_a_reload_may_name_another_place_than_the_configuration(formats, folder, tmp_path_factory):
    model = load(formats, "org/name", weights=str(folder))
    changed, other = {name: value + 1 for name, value in TENSORS.items()}, tmp_path_factory.mktemp("other")
    save_file(changed, other / "model.safetensors")
    assert_loaded(load(formats, "org/name", model, weights=str(folder)))
    assert_loaded(load(formats, other, model, weights=str(folder)), changed)


@pytest.mark.parametrize(("key", "meant"), [("weight", "weights"), ("verify_", "verify"), ("public-key", "public_key")])
def test_unknown_keys_of_the_extra_config_get_a_suggestion(formats, folder, key, meant):
    with pytest.raises(ValueError, match=rf"model_loader_extra_config: unknown key '{key}'; did you mean '{meant}'\?"):
        load(formats, folder, **{key: 1})


def test_a_model_that_lacks_tensors_is_an_error(formats, tmp_path):
    save_file({"embed.weight": TENSORS["embed.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"2 parameters of Model got no tensor: layers\.0\.weight, norm\.weight"):
        load(formats, tmp_path)


def test_secondary_weights_come_with_their_prefix(formats, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    save_file({"embed.weight": TENSORS["embed.weight"]}, tmp_path / "first" / "model.safetensors")
    save_file({"0.weight": TENSORS["layers.0.weight"]}, tmp_path / "second" / "model.safetensors")
    model = Model()
    del model.norm
    model.secondary_weights = [SimpleNamespace(model_or_path=str(tmp_path / "second"), revision=None, prefix="layers.")]
    load(formats, tmp_path / "first", model)
    assert torch.equal(model.layers[0].weight, TENSORS["layers.0.weight"])


# --- SGLang -----------------------------------------------------------------------------------------------------------


def test_the_iterator_for_sglang_is_that_of_load_stream(folder):
    assert_loaded(SimpleNamespace(state_dict=lambda: dict(sglang.weights_iterator(folder, "cpu", memory=1))))


def test_the_custom_weight_loader_of_sglang_reads_what_its_names_say(folder):
    # As WeightUpdater.update_weights_from_tensor of SGLang 0.5.23 calls it.
    path = "tensorizer.integrations.sglang.load_weights"
    module, _, function = path.rpartition(".")
    model = Model()
    getattr(importlib.import_module(module), function)(model, [(str(folder), torch.empty(0))])
    assert_loaded(model)


# --- vLLM itself ------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys

def main():
    case = json.loads(sys.argv[1])
    from tensorizer.integrations.vllm import register
    register()
    from vllm import LLM, SamplingParams
    llm = LLM(
        model=case["model"], load_format=case["format"], model_loader_extra_config=case["config"],
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=2, dtype="float32",
    )
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=2, detokenize=False)
    def answers():
        (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 9]}], sampling)[0].outputs
        return [list(answer.token_ids), [{k: v.logprob for k, v in one.items()} for one in answer.logprobs]]
    print("ANSWERS", json.dumps(answers()), flush=True)
    if case["replaced_by"]:
        os.replace(case["replaced_by"], os.path.join(case["model"], "model.safetensors"))
        llm.collective_rpc("reload_weights")
        print("ANSWERS", json.dumps(answers()), flush=True)

if __name__ == "__main__":
    main()
"""


def has_vllm() -> bool:
    try:
        importlib.metadata.entry_points(group="vllm.general_plugins")
        return importlib.util.find_spec("vllm") is not None
    except (ImportError, TypeError, ValueError):  # TypeError: before Python 3.10, which vLLM needs
        return False


def save_llama(folder, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def answers_of_vllm(model, format, replaced_by=None):
    """Tokens and their logprobs; twice if a file then replaces that of the weights, and vLLM loads them again."""
    case = {"model": str(model), "format": format, "config": {}, "replaced_by": replaced_by and str(replaced_by)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(case)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )
    return [line for line in run.stdout.splitlines() if line.startswith("ANSWERS")]


@pytest.mark.slow
@pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_vllm_answers_as_with_its_own_loader(tmp_path, tied):
    model = save_llama(tmp_path, tied)
    (streamed,) = answers_of_vllm(model, "tensorizer_stream")
    assert [streamed] == answers_of_vllm(model, "auto")


@pytest.mark.slow
@pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed")
def test_vllm_answers_with_the_new_weights_after_a_reload(tmp_path):
    # Tied embeddings stay the old ones in part: vLLM 0.32 on the CPU reloads them so with each of its formats.
    first, second = (save_llama(tmp_path / name, tied=False) for name in ("first", "second"))
    (expected,) = answers_of_vllm(second, "auto")
    before, after = answers_of_vllm(first, "tensorizer_stream", second / "model.safetensors")
    assert before != expected
    assert after == expected

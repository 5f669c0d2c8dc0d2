"""save_pretrained and from_pretrained against the libraries' own, offline, on models made here."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from servers.file_server import serve_folder
from servers.s3_recorder import S3Recorder

import tensorizer
from tensorizer import _C, DecryptionParams, EncryptionParams, _progress
from tensorizer._load.compare import ModuleView
from tensorizer._load.modules import Fill, FillOptions, module_names
from tensorizer.errors import FormatError, LoadError, MissingHashError, UnsupportedContentError
from tensorizer.integrations.huggingface import from_pretrained, save_pretrained

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]

FAMILIES = {
    "llama, tied": tiny_models.llama,
    "llama, untied": lambda: tiny_models.llama(tie_word_embeddings=False),
    "gpt2": tiny_models.gpt2,
    "mixtral": tiny_models.mixtral,
    "t5": tiny_models.t5,
    "bert": tiny_models.bert,
    "bert with a head": tiny_models.bert_with_head,
    "vit": tiny_models.vit,
}


@pytest.fixture
def library_calls(monkeypatch):
    """The classes whose own from_pretrained was called."""
    calls = []
    original = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, *arguments, **keywords):
        calls.append(cls.__name__)
        return original(cls, *arguments, **keywords)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    return calls


def ties_of(model):
    groups = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(tensor), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


def assert_as_the_library(ours, theirs, what=""):
    assert type(ours) is type(theirs), what
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected), what
    for name, tensor in state.items():
        assert tensor.dtype == expected[name].dtype, (what, name)
        assert torch.equal(tensor, expected[name]), (what, name)
    buffers, wanted = dict(ours.named_buffers()), dict(theirs.named_buffers())
    assert buffers.keys() == wanted.keys(), what
    assert all(torch.equal(buffers[name], wanted[name]) for name in wanted), what
    assert ties_of(ours) == ties_of(theirs), what
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()], what
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers())), what
    assert not ours.training, what
    assert all(not module.training for module in ours.modules()), what
    assert tiny_models.agree(tiny_models.output_of(ours), tiny_models.output_of(theirs)), what
    if theirs.can_generate():
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict(), what
    assert ours.dtype == theirs.dtype, what
    left_out = {"_name_or_path": "", "transformers_version": "", "architectures": ""}
    if theirs.config.dtype is None:  # made, not loaded
        left_out["dtype"] = ""
    assert {**ours.config.to_dict(), **left_out} == {**theirs.config.to_dict(), **left_out}, what


def test_every_family_loads_as_the_library_loads_it(tmp_path):
    for what, make in FAMILIES.items():
        model = make()
        if model.can_generate():
            model.generation_config.max_new_tokens = 7
        library = tmp_path / what / "library"
        model.save_pretrained(library)
        theirs, info = type(model).from_pretrained(library, output_loading_info=True)
        save_pretrained(model, tmp_path / what / "ours")
        save_pretrained(model, tmp_path / what / "shards", max_shard_size=20_000)
        assert (tmp_path / what / "shards" / "model.tensors.index.json").exists()
        for folder in ("library", "ours", "shards"):
            ours, our_info = from_pretrained(tmp_path / what / folder, output_loading_info=True)
            assert_as_the_library(ours, theirs, f"{what}, {folder}")
            assert our_info == info, (what, folder)
            assert ours.config.name_or_path == ours.name_or_path == str(tmp_path / what / folder)


def test_files_of_the_models_own_names_go_straight_to_the_device(tmp_path, library_calls):
    for what, make in FAMILIES.items():
        save_pretrained(make(), tmp_path / what)
        from_pretrained(tmp_path / what)
    assert library_calls == []


def test_the_library_converts_what_it_stores_in_another_form(tmp_path, library_calls):
    tiny_models.mixtral().save_pretrained(tmp_path)
    if not any("experts.0." in name for name in tensorizer.TensorDeserializer(tmp_path, device="cpu", lazy_load=True)):
        pytest.skip("this transformers stores experts as it keeps them")
    from_pretrained(tmp_path)
    assert library_calls == ["MixtralForCausalLM"]


@pytest.mark.parametrize("name", ["model.tensors", "config.json"])
def test_a_file_of_a_folder_that_is_something_else_is_told_what_it_is(tmp_path, name):
    save_pretrained(tiny_models.gpt2(), tmp_path)
    others = {
        "a GGUF file": b"GGUF\x03\0\0\0" + bytes(100),
        "an HTML page": b"<!DOCTYPE html>\n<html></html>",
        "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "a Xet pointer": b"# xet version 0\nfilesize = 1\nhash = '0'\n",
    }
    if name == "model.tensors":
        others["an error message in JSON"] = b'{"error": "Repository not found"}'
    with serve_folder(tmp_path) as address:
        for words, data in others.items():
            (tmp_path / name).write_bytes(data)
            for source in (tmp_path, address):
                with pytest.raises(ValueError, match=words):
                    from_pretrained(source, transformers.GPT2LMHeadModel)


def test_the_class_may_be_named_in_every_way(tmp_path):
    model = tiny_models.llama()
    save_pretrained(model, tmp_path)
    for cls in (None, transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
        assert type(from_pretrained(tmp_path, cls)) is transformers.LlamaForCausalLM
    assert type(from_pretrained(tmp_path, model_class=transformers.LlamaForCausalLM)) is type(model)
    base = from_pretrained(tmp_path, transformers.AutoModel, strict=False)  # another class than the one that was saved
    assert torch.equal(base.embed_tokens.weight, model.model.embed_tokens.weight)
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    config.architectures = None
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"names no class.*model_class"):
        from_pretrained(tmp_path)


def test_a_class_before_the_source_is_told_the_order(tmp_path):
    wrong = [(None, tmp_path), (transformers.LlamaForCausalLM, tmp_path), ("org/name", "other"), (None,)]
    for arguments in wrong:
        with pytest.raises(TypeError, match=r"from_pretrained\(source, model_class\)"):
            from_pretrained(*arguments)


def test_a_configuration_given_or_overridden_is_used(tmp_path):
    save_pretrained(tiny_models.llama(), tmp_path)
    config = transformers.LlamaConfig.from_pretrained(tmp_path, rope_theta=5.0)
    assert from_pretrained(tmp_path, rms_norm_eps=0.5).config.rms_norm_eps == 0.5
    eager = from_pretrained(tmp_path, config=config, attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    theirs = transformers.LlamaForCausalLM.from_pretrained
    tiny_models.llama().save_pretrained(tmp_path / "library")
    assert tiny_models.agree(
        tiny_models.output_of(eager),
        tiny_models.output_of(theirs(tmp_path / "library", config=config, attn_implementation="eager")),
    )


def test_the_folder_opens_with_the_librarys_own_functions(tmp_path):
    model, tokenizer = tiny_models.llama(), tiny_models.tokenizer()
    model.generation_config.max_new_tokens = 7
    save_pretrained(model, tmp_path, tokenizer=tokenizer, metadata={"note": "mine"})
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is transformers.LlamaConfig
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert transformers.GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 7
    model.save_pretrained(tmp_path / "library")
    wanted, found = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "library", tmp_path))
    assert found == wanted
    metadata = tensorizer.TensorDeserializer(tmp_path / "model.tensors", device="cpu", lazy_load=True).metadata
    assert metadata == {
        "format": "pt",
        "architecture": "LlamaForCausalLM",
        "names": "model",
        "transformers_version": transformers.__version__,
        "note": "mine",
    }


def test_tied_weights_are_stored_once_and_the_file_is_that_of_a_module(tmp_path):
    model = tiny_models.llama()
    save_pretrained(model, tmp_path)
    other = transformers.LlamaForCausalLM(model.config)
    with tensorizer.TensorDeserializer(tmp_path / "model.tensors", device="cpu") as file:
        file.load_into_module(other)
        assert file.report.missing == ()
    assert tiny_models.agree(tiny_models.output_of(other.eval()), tiny_models.output_of(model))
    with tensorizer.TensorDeserializer(tmp_path / "model.tensors", device="cpu", lazy_load=True) as file:
        assert dict(file.ties) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_different_head_under_a_configuration_that_ties_is_kept(tmp_path, caplog):
    model = tiny_models.llama(tie_word_embeddings=False)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "library")
    save_pretrained(model, tmp_path / "ours")
    for folder in ("library", "ours"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tensorizer"):
            loaded = from_pretrained(tmp_path / folder)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
        assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
        assert tiny_models.agree(tiny_models.output_of(loaded), tiny_models.output_of(model))
        assert "lm_head.weight" in caplog.text


def test_both_halves_of_a_tie_stored_apart_are_tied_again(tmp_path):
    model = tiny_models.llama()
    save_pretrained(model, tmp_path, ties="twice")
    loaded = from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_head_is_added_and_taken_away_where_strict_is_off(tmp_path):
    base, whole = tiny_models.bert(), tiny_models.bert_with_head()
    for what, (model, cls) in {
        "to head": (base, transformers.BertForSequenceClassification),
        "back": (whole, transformers.BertModel),
    }.items():
        model.save_pretrained(tmp_path / what / "library")
        save_pretrained(model, tmp_path / what / "ours")
        torch.manual_seed(1)
        theirs, info = cls.from_pretrained(tmp_path / what / "library", output_loading_info=True)
        torch.manual_seed(1)
        ours, our_info = from_pretrained(tmp_path / what / "ours", cls, strict=False, output_loading_info=True)
        assert our_info == info
        assert info["missing_keys"] or info["unexpected_keys"]
        state, expected = ours.state_dict(), theirs.state_dict()
        assert list(state) == list(expected)
        for name in state:
            if name not in info["missing_keys"]:
                assert torch.equal(state[name], expected[name]), name
        with pytest.raises(LoadError, match=r"classifier\.weight.*strict=False") as caught:
            from_pretrained(tmp_path / what / "ours", cls)
        assert not caught.value.report.ok


# --- dtypes ----------------------------------------------------------------------------------------------------------


def test_dtypes_are_those_of_the_library(tmp_path):
    for what, make in {"llama": tiny_models.llama, "t5": tiny_models.t5}.items():
        for stored in (torch.float32, torch.bfloat16):
            model = make().to(stored)
            folder = tmp_path / what / str(stored)
            model.save_pretrained(folder / "library")
            save_pretrained(model, folder / "ours")
            for dtype in ("auto", torch.float16, torch.bfloat16, "float32"):
                theirs = type(model).from_pretrained(folder / "library", dtype=dtype)
                for kind in ("library", "ours"):
                    ours = from_pretrained(folder / kind, dtype=dtype)
                    assert_as_the_library(ours, theirs, f"{what} {stored} {dtype} {kind}")
    for wrong, meant in {"flaot16": "float16", "bf16": "bfloat16", "torch.float33": "float32", torch.int8: ""}.items():
        with pytest.raises(ValueError, match=f"dtype: expected .*{meant}"):
            from_pretrained(folder / "ours", dtype=wrong)


def test_torch_dtype_is_the_old_name_of_dtype_and_deprecated_as_the_library_says(tmp_path, caplog):
    save_pretrained(tiny_models.llama().to(torch.bfloat16), tmp_path)
    logger = logging.getLogger("transformers")
    for asked, right in {"auto": torch.bfloat16, torch.float16: torch.float16, "float32": torch.float32}.items():
        type(logger).warning_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="transformers"):
            logger.addHandler(caplog.handler)
            try:
                assert from_pretrained(tmp_path, torch_dtype=asked).dtype == right
                assert "`torch_dtype` is deprecated! Use `dtype` instead!" in caplog.text
                caplog.clear()
                assert from_pretrained(tmp_path, dtype=asked).dtype == right
                assert "torch_dtype" not in caplog.text
            finally:
                logger.removeHandler(caplog.handler)
    assert from_pretrained(tmp_path, dtype=torch.float16, torch_dtype=torch.float32).dtype == torch.float16
    with pytest.raises(ValueError, match="did you mean 'float16'"):
        from_pretrained(tmp_path, torch_dtype="flaot16")


def test_parts_that_halves_are_too_coarse_for_stay_in_single_precision(tmp_path, library_calls):
    save_pretrained(tiny_models.t5(), tmp_path)
    model = from_pretrained(tmp_path, dtype=torch.float16)
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert model.encoder.block[0].layer[1].DenseReluDense.wi.weight.dtype == torch.float16
    assert library_calls == []


def test_auto_is_the_dtype_of_the_weights_where_the_configuration_names_none(tmp_path):
    save_pretrained(tiny_models.llama().to(torch.bfloat16), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert from_pretrained(tmp_path).dtype == torch.bfloat16


# --- devices ---------------------------------------------------------------------------------------------------------


def test_device_maps_give_what_the_library_gives(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = tiny_models.llama()
    model.save_pretrained(tmp_path / "library")
    save_pretrained(model, tmp_path / "ours")
    parts = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    for device_map in ("auto", "cpu", {"": "cpu"}, {**parts, "lm_head": "cpu"}):
        theirs = type(model).from_pretrained(tmp_path / "library", device_map=device_map)
        ours = from_pretrained(tmp_path / "ours", device_map=device_map)
        assert_as_the_library(ours, theirs, str(device_map))


def test_limits_that_leave_parts_to_the_disk_are_the_librarys_to_arrange(tmp_path, library_calls):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = tiny_models.llama(tie_word_embeddings=False)
    save_pretrained(model, tmp_path / "ours")
    offloaded = from_pretrained(
        tmp_path / "ours", device_map="auto", max_memory={"cpu": 60_000}, offload_folder=str(tmp_path / "disk")
    )
    assert set(offloaded.hf_device_map.values()) == {"cpu", "disk"}
    assert tiny_models.agree(tiny_models.output_of(offloaded), tiny_models.output_of(model))
    assert library_calls == ["LlamaForCausalLM"]


def test_limits_of_two_devices_divide_a_model_as_accelerate_does():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from tensorizer.integrations._hf.models import resolve_device_map

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny_models.llama_config(tie_word_embeddings=False))
    limits = {0: 50_000, 1: 40_000, "cpu": 1_000_000}
    found = resolve_device_map(model, "sequential", limits, torch.float32)
    whole = model._no_split_modules
    assert found == dict(accelerate.infer_auto_device_map(model, limits, list(whole), dtype=torch.float32))
    assert set(found.values()) == {0, 1, "cpu"}
    with pytest.raises(ValueError, match="device_map: expected"):
        resolve_device_map(model, "nowhere", None, torch.float32)


# --- what is taken, and what is refused ------------------------------------------------------------------------------


def test_pickles_are_read_only_when_allowed_and_when_there_is_nothing_else(tmp_path):
    model = tiny_models.llama()
    save_pretrained(model, tmp_path)
    (tmp_path / "model.tensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.tensors.*model\.safetensors"):
        from_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="allow_pickle"):
        from_pretrained(tmp_path)
    assert_as_the_library(from_pretrained(tmp_path, allow_pickle=True), model)
    for value, format in ((1.0, "safetensors"), (2.0, "tensors")):
        model.model.norm.weight.data.fill_(value)
        tensorizer.save_file(model.state_dict(), tmp_path / f"model.{format}")
        assert from_pretrained(tmp_path, allow_pickle=True).model.norm.weight[0] == value
        (tmp_path / f"model.{format}").unlink()


def test_two_sets_of_weights_in_a_folder_or_prefix_are_refused_naming_both(tmp_path, caplog):
    model = tiny_models.llama()
    save_pretrained(model, tmp_path / "stale", max_shard_size="20KB")
    assert "model.safetensors" not in caplog.text
    model.model.norm.weight.data.fill_(7.0)
    model.save_pretrained(tmp_path / "stale")  # after more training, by the library
    model.save_pretrained(tmp_path / "library", max_shard_size="20KB")
    shutil.copy(tmp_path / "stale" / "model.safetensors", tmp_path / "library")
    wanted = {
        "stale": r"found both model\.tensors\.index\.json and model\.safetensors,",
        "library": r"found both model\.safetensors and model\.safetensors\.index\.json,",
    }
    with serve_folder(tmp_path) as web:
        for name, message in wanted.items():
            for place in (tmp_path / name, f"{web}/{name}"):
                with pytest.raises(FormatError, match=f"{name}: {message}"):
                    from_pretrained(place)
                file = "model.safetensors"  # the file that is named
                named = from_pretrained(f"{place}/{file}")
                assert named.model.norm.weight[0] == 7.0


def test_save_pretrained_beside_another_set_of_weights_says_that_the_folder_will_not_load(tmp_path, caplog):
    model = tiny_models.llama()
    model.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    save_pretrained(model, tmp_path)
    assert f"{tmp_path}: model.tensors is written beside model.safetensors, which is not changed" in caplog.text
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(FormatError, match=r"both model\.tensors and model\.safetensors"):
        from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert_as_the_library(from_pretrained(tmp_path), model)


def test_a_folder_that_was_converted_in_place_loads_what_was_made_until_its_source_changes(tmp_path, caplog):
    model = tiny_models.llama()
    key = EncryptionParams.random()
    for shards, encryption in ((None, None), ("20KB", None), (None, key)):
        caplog.clear()
        folder = tmp_path / f"{shards}{encryption is None}"
        model.save_pretrained(folder, max_shard_size=shards or "1GB")
        tensorizer.convert(folder, folder, encryption=encryption)
        decryption = None if encryption is None else DecryptionParams.from_key(encryption.key)
        assert_as_the_library(from_pretrained(folder, encryption=decryption), model)
        assert "SHA-256" not in caplog.text
        with serve_folder(tmp_path) as web:
            assert_as_the_library(from_pretrained(f"{web}/{folder.name}", encryption=decryption), model)
        assert "SHA-256" in caplog.text
        model.model.norm.weight.data += 1
        model.save_pretrained(folder, max_shard_size=shards or "1GB")
        with pytest.raises(FormatError, match=r"model\.tensors was made from .*, which has changed since"):
            from_pretrained(folder, encryption=decryption)


def test_sharded_pickles_are_read(tmp_path):
    model = tiny_models.gpt2()
    save_pretrained(model, tmp_path)
    (tmp_path / "model.tensors").unlink()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    half = len(state) // 2
    weight_map = {}
    for i, names in enumerate((list(state)[:half], list(state)[half:]), 1):
        file = f"pytorch_model-0000{i}-of-00002.bin"
        torch.save({name: state[name] for name in names}, tmp_path / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_as_the_library(from_pretrained(tmp_path, allow_pickle=True), model)


def test_variants_have_files_of_their_own(tmp_path):
    model = tiny_models.llama()
    save_pretrained(model.to(torch.float16), tmp_path, variant="fp16")
    assert (tmp_path / "model.fp16.tensors").exists()
    assert from_pretrained(tmp_path, variant="fp16").dtype == torch.float16
    with pytest.raises(FileNotFoundError, match=r"model\.tensors"):
        from_pretrained(tmp_path)
    (tmp_path / "model.fp16.tensors").unlink()
    model.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    theirs = type(model).from_pretrained(tmp_path, variant="fp16")
    assert_as_the_library(from_pretrained(tmp_path, variant="fp16"), theirs)


def test_code_of_a_repository_is_never_run(tmp_path):
    save_pretrained(tiny_models.llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    native = {**config, "auto_map": {"AutoModelForCausalLM": "modeling.Mine", "AutoConfig": "modeling.MyConfig"}}
    (tmp_path / "modeling.py").write_text("raise SystemExit('code of the repository ran')")
    (tmp_path / "config.json").write_text(json.dumps(native))
    assert type(from_pretrained(tmp_path)) is transformers.LlamaForCausalLM  # the library has these classes
    with pytest.raises(ValueError, match="model_class"):
        from_pretrained(tmp_path, trust_remote_code=True)
    (tmp_path / "config.json").write_text(json.dumps({**native, "model_type": "mine", "architectures": ["Mine"]}))
    with pytest.raises(ValueError, match=r"code in the repository.*model_class"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**native, "architectures": ["Mine"]}))
    with pytest.raises(ValueError, match="model_class"):
        from_pretrained(tmp_path)
    found = from_pretrained(tmp_path, model_class=transformers.LlamaForCausalLM)
    assert type(found) is transformers.LlamaForCausalLM


def test_encrypted_and_verified_weights(tmp_path):
    encryption = EncryptionParams.random()
    key = DecryptionParams.from_key(encryption.key)
    model = tiny_models.llama()
    save_pretrained(model, tmp_path, encryption=encryption)
    assert_as_the_library(from_pretrained(tmp_path, encryption=key, verify=True), model)
    base = from_pretrained(tmp_path, transformers.LlamaModel, encryption=key, strict=False)  # by the library
    assert torch.equal(base.norm.weight, model.model.norm.weight)
    with pytest.raises(tensorizer.CryptographyError):
        from_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "library")
    with pytest.raises(MissingHashError):
        from_pretrained(tmp_path / "library", verify=True)


def test_weights_that_were_not_signed_by_the_key_are_refused_whatever_their_format(tmp_path):
    key = tensorizer.SigningKey.generate()
    model = tiny_models.llama()
    save_pretrained(model, tmp_path)
    with pytest.raises(tensorizer.AuthenticationError, match="not signed"):
        from_pretrained(tmp_path, public_key=key.public_key)
    tensorizer.sign(tmp_path / "model.tensors", key)
    assert_as_the_library(from_pretrained(tmp_path, public_key=key.public_key), model)
    base = from_pretrained(tmp_path, transformers.LlamaModel, public_key=key.public_key, strict=False)  # by the library
    assert torch.equal(base.norm.weight, model.model.norm.weight)
    with pytest.raises(tensorizer.AuthenticationError, match="other keys"):
        from_pretrained(tmp_path, public_key=tensorizer.SigningKey.generate().public_key)
    library = tmp_path / "library"
    model.save_pretrained(library)
    with pytest.raises(ValueError, match="safetensors"):
        from_pretrained(library, public_key=key.public_key)
    with pytest.raises(tensorizer.AuthenticationError, match="not authenticated"):
        from_pretrained(library, require_authenticated=True)
    (library / "model.safetensors").unlink()
    torch.save(model.state_dict(), library / "pytorch_model.bin")
    for wanted in ({"public_key": key.public_key}, {"require_authenticated": True}):
        with pytest.raises(tensorizer.AuthenticationError, match="pickle"):
            from_pretrained(library, allow_pickle=True, **wanted)


def mapped_bytes(path):
    """The addresses at which a file is mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines if line[-1] == str(path)]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs the list of mappings")
def test_mapped_models_are_views_of_the_file_and_leave_it_alone(tmp_path):
    model = tiny_models.llama(tie_word_embeddings=False)
    save_pretrained(model, tmp_path / "tensors")
    model.save_pretrained(tmp_path / "safetensors")
    for folder in (tmp_path / "tensors", tmp_path / "safetensors"):
        [file] = folder.glob("model.*")
        before = file.read_bytes()
        mapped = from_pretrained(folder, mmap=True)
        assert_as_the_library(mapped, from_pretrained(folder, mmap=False), file.name)
        assert is_mapped(mapped, file), file.name
        with torch.no_grad():
            mapped.lm_head.weight.zero_()
        assert file.read_bytes() == before, file.name
        half = from_pretrained(folder, mmap=True, dtype=torch.float16)  # what is converted is a copy
        assert_as_the_library(half, from_pretrained(folder, dtype=torch.float16), file.name)


def is_mapped(model, file):
    """Whether all parameters of a model are views of a file; some of them would be a mistake."""
    places = mapped_bytes(file)
    found = {any(p.data_ptr() in place for place in places) for p in model.parameters()}
    assert len(found) == 1, f"{file}: some of its tensors are views and some are not"
    return found.pop()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs the list of mappings")
def test_by_default_a_model_on_the_cpu_is_mapped_where_nothing_speaks_against_it(tmp_path, monkeypatch):
    model = tiny_models.llama(tie_word_embeddings=False)
    encryption = EncryptionParams.random()
    save_pretrained(model, tmp_path / "encrypted", encryption=encryption)
    save_pretrained(model, tmp_path / "tensors")
    save_pretrained(model, tmp_path / "sharded", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "safetensors")
    key = DecryptionParams.from_key(encryption.key)
    for folder, options, expected in (
        ("tensors", {}, False),  # its digests are compared
        ("tensors", {"verify": False}, True),
        ("safetensors", {}, True),
        ("safetensors", {"device": "cpu"}, True),
        ("safetensors", {"device_map": {"": "cpu"}}, True),
        ("safetensors", {"dtype": "auto"}, True),
        ("safetensors", {"mmap": False}, False),
        ("tensors", {"verify": True}, False),
        ("safetensors", {"dtype": torch.bfloat16}, False),
        ("encrypted", {"encryption": key}, False),
    ):
        [file] = (tmp_path / folder).glob("model.*")
        loaded = from_pretrained(tmp_path / folder, **options)
        assert is_mapped(loaded, file) == expected, (folder, options)
    sharded = from_pretrained(tmp_path / "sharded", verify=False)
    shards = list((tmp_path / "sharded").glob("*.tensors"))
    places = [place for file in shards for place in mapped_bytes(file)]
    assert len(shards) > 1
    assert all(any(p.data_ptr() in place for place in places) for p in sharded.parameters())

    def fail(_source):
        raise OSError(errno.ENODEV, "a file system that cannot map")

    with monkeypatch.context() as patched:
        patched.setattr(_C.FileSource, "map", fail)
        for folder in ("tensors", "safetensors", "sharded"):
            read = from_pretrained(tmp_path / folder)
            assert all(map(torch.equal, read.parameters(), model.parameters()))
            assert not any(is_mapped(read, file) for file in (tmp_path / folder).glob("*.*tensors"))
        with pytest.raises(OSError, match="cannot map"):
            from_pretrained(tmp_path / "tensors", mmap=True)
    monkeypatch.setattr(_C.FileSource, "on_network_file_system", lambda self: True)
    [file] = (tmp_path / "tensors").glob("model.*")
    assert not is_mapped(from_pretrained(tmp_path / "tensors"), file)
    assert is_mapped(from_pretrained(tmp_path / "tensors", mmap=True), file)


def test_what_cannot_be_mapped_says_so(tmp_path):
    model = tiny_models.llama()
    encryption = EncryptionParams.random()
    save_pretrained(model, tmp_path / "encrypted", encryption=encryption)
    save_pretrained(model, tmp_path / "plain")
    model.save_pretrained(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    key = DecryptionParams.from_key(encryption.key)
    for folder, words, options in (
        ("encrypted", "cannot be mapped", {"encryption": key}),
        ("pickled", "cannot be mapped", {"allow_pickle": True}),
        ("plain", "on the CPU", {"device": "cuda"}),
        ("plain", "on the CPU", {"device_map": "auto"}),
    ):
        with pytest.raises(ValueError, match=words):
            from_pretrained(tmp_path / folder, mmap=True, **options)
    with serve_folder(tmp_path / "plain") as server, pytest.raises(ValueError, match="cannot be mapped"):
        from_pretrained(server, mmap=True)


def test_damaged_weights_are_an_error(tmp_path):
    save_pretrained(tiny_models.llama(), tmp_path)
    path = tmp_path / "model.tensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(tensorizer.HashMismatchError):
        from_pretrained(tmp_path, verify=True)


WRONG_MEMBERS = [
    *({"model_type": ["llama"]}, {"architectures": "LlamaForCausalLM"}, {"architectures": 5}, {"architectures": [5]}),
    *({"architectures": ["logging"]}, {"architectures": ["AutoTokenizer"]}, {"auto_map": 5}, {"dtype": 5}),
    *({"_class_name": "utils"}, {"_class_name": ["UNet2DModel"]}),
]


@pytest.mark.parametrize("members", WRONG_MEMBERS, ids=str)
def test_a_configuration_of_the_wrong_form_is_named(tmp_path, members):
    if "_class_name" in members:
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    save_pretrained(tiny_models.llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **members}))
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        from_pretrained(tmp_path)


def test_a_generation_configuration_of_the_wrong_form_is_named(tmp_path):
    save_pretrained(tiny_models.llama(), tmp_path)
    for content in ("[]", "3", "{", "[" * 100_000):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ValueError, match=r"generation_config\.json"):
            from_pretrained(tmp_path)


def test_a_model_quantised_by_torchao_is_refused_before_its_weights_are_read(tmp_path):
    tiny_models.llama().save_pretrained(tmp_path / "library")
    config = tmp_path / "library" / "config.json"
    quantised = {"quantization_config": {"quant_method": "torchao", "quant_type": "int8_weight_only"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **quantised}))
    with pytest.raises(UnsupportedContentError, match=r"config\.json: torchao"):
        tensorizer.convert(tmp_path / "library", f"{tmp_path / 'converted'}/", all_files=True)
    assert not (tmp_path / "converted").exists()
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(config.read_text())
    (tmp_path / "ours" / "model.tensors").write_bytes(b"")  # nobody reads it
    key = DecryptionParams.from_key(EncryptionParams.random().key)
    for form, options in (("ours", {}), ("library", {"verify": True}), ("library", {"encryption": key})):
        with pytest.raises(UnsupportedContentError, match="quantised by torchao"):
            from_pretrained(tmp_path / form, **options)
    with serve_folder(tmp_path / "library") as url, pytest.raises(UnsupportedContentError, match="local folder"):
        from_pretrained(url)


def test_a_local_folder_that_torchao_has_quantised_is_loaded_by_the_library(tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    tiny_models.llama(hidden_size=64, intermediate_size=64).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    kind = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantised = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=kind)
    quantised.save_pretrained(tmp_path / "one")
    quantised.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    right = tiny_models.output_of(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "one"))
    for form in ("one", "shards"):
        model = from_pretrained(tmp_path / form)
        assert torch.equal(tiny_models.output_of(model), right), form
        assert type(model.model.layers[0].mlp.up_proj.weight.data) is not torch.Tensor
        with pytest.raises(UnsupportedContentError, match="torchao"):
            save_pretrained(model, tmp_path / "ours")


def test_save_pretrained_of_a_compiled_model_writes_the_model_that_was_compiled(tmp_path):
    model = tiny_models.llama()
    whole, parts = torch.compile(model), tiny_models.llama()
    parts.model = torch.compile(parts.model)
    parts.model.layers[1] = torch.compile(parts.model.layers[1])
    in_place = tiny_models.llama()
    in_place.compile()
    for what, saved in {"whole": whole, "parts": parts, "in place": in_place}.items():
        for form, options in {
            "model": {},
            "library": {"names": "library"},
            "shards": {"max_shard_size": 9_000},
        }.items():
            folder = tmp_path / what / form
            save_pretrained(saved, folder, **options)
            assert_as_the_library(from_pretrained(folder), model, f"{what} {form}")
    assert type(parts.model) is type(whole)  # what was saved is as it was
    assert "model._orig_mod.layers.1._orig_mod.mlp.up_proj.weight" in parts.state_dict()


def test_the_names_that_engines_look_for_are_those_of_the_library_and_convert_keeps_them(tmp_path):
    """docs/vllm.md"""
    model = tiny_models.mixtral()
    model.save_pretrained(tmp_path / "hub")
    tensorizer.convert(tmp_path / "hub", tmp_path / "converted/")
    save_pretrained(model, tmp_path / "ours", names="library")
    save_pretrained(model, tmp_path / "default")
    found = {place: set(tensorizer.load_file(tmp_path / place)) for place in ("hub", "converted", "ours", "default")}
    assert found["hub"] == found["converted"] == found["ours"]
    if int(transformers.__version__.split(".")[0]) >= 5:
        fused = {name for name in found["default"] if name.endswith("mlp.experts.gate_up_proj")}
        assert fused
        assert not fused & found["hub"]


def test_save_pretrained_replaces_an_earlier_folder(tmp_path):
    model = tiny_models.llama()
    save_pretrained(model, tmp_path)
    (tmp_path / "mine-00001-of-00001.tensors").write_bytes(b"")
    model.model.norm.weight.data.fill_(3.0)
    save_pretrained(model, tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.tensors").exists()
    assert from_pretrained(tmp_path).model.norm.weight[0] == 3.0
    many = len(list(tmp_path.glob("model-*.tensors")))
    save_pretrained(model, tmp_path, max_shard_size="40KB")
    assert 1 < len(list(tmp_path.glob("model-*.tensors"))) < many
    model.model.norm.weight.data.fill_(4.0)
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path).model.norm.weight[0] == 4.0
    names = ["config.json", "generation_config.json", "mine-00001-of-00001.tensors", "model.tensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_folder_may_be_a_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_models.llama()
    for folder in ((tmp_path / "a folder").as_uri(), f"memory://{tmp_path.name}"):
        for scale, size in ((3.0, None), (4.0, "20KB"), (5.0, None)):
            model.model.norm.weight.data.fill_(scale)
            save_pretrained(model, folder, max_shard_size=size)
            assert from_pretrained(folder).model.norm.weight[0] == scale
    assert [path.name for path in tmp_path.iterdir()] == ["a folder"]


def test_save_pretrained_refuses_what_it_cannot_save_before_a_file_appears(tmp_path):
    with pytest.raises(TypeError, match="got Linear"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "out")
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(tiny_models.llama_config())
    with pytest.raises(ValueError, match="without data"):
        save_pretrained(empty, tmp_path / "out")
    model = tiny_models.llama()
    model.config.quantization_config = type("Config", (), {"quant_method": "torchao"})()
    with pytest.raises(UnsupportedContentError, match="torchao"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_that_are_no_folders_are_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for source, error in (
        (tmp_path / "file", "got a file"),
        (tmp_path / "nothing", "got nothing"),
        (tmp_path, "config.json"),
    ):
        with pytest.raises(FileNotFoundError, match=error):
            from_pretrained(source)
    save_pretrained(tiny_models.bert(), tmp_path / "model")
    with pytest.raises(ValueError, match="revision"):
        from_pretrained(tmp_path / "model", revision="main")
    outer = from_pretrained(tmp_path, subfolder="model")
    assert type(outer) is transformers.BertModel
    assert type(from_pretrained(f"file://{tmp_path}/model")) is transformers.BertModel


def test_a_prefix_of_a_web_server_is_a_folder(tmp_path, monkeypatch):
    model = tiny_models.llama()
    model.generation_config.max_new_tokens = 7
    save_pretrained(model, tmp_path / "ours", max_shard_size="20KB")
    tiny_models.mixtral().save_pretrained(tmp_path / "library")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with serve_folder(tmp_path) as web:
        loaded = from_pretrained(f"{web}/ours")
        assert_as_the_library(loaded, model)
        assert loaded.name_or_path == f"{web}/ours"
        assert_as_the_library(from_pretrained(f"{web}/library"), tiny_models.mixtral())
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            from_pretrained(f"{web}/nothing")
    assert os.listdir(tmp_path / "temporary") == []


def test_a_file_of_a_folder_is_taken_for_its_folder(tmp_path):
    model = tiny_models.llama()
    for format in ("tensors", "safetensors"):
        folder = tmp_path / format
        save_pretrained(model, folder) if format == "tensors" else model.save_pretrained(folder)
        file = folder / f"model.{format}"
        renamed = folder / f"of-yesterday.{format}"
        file.rename(renamed)
        assert_as_the_library(from_pretrained(str(renamed), type(model)), model, format)
        assert_as_the_library(from_pretrained(str(renamed)), model, format)
        alone = tmp_path / f"alone-{format}" / renamed.name
        alone.parent.mkdir()
        renamed.rename(alone)
        assert_as_the_library(from_pretrained(str(alone), type(model), config=model.config), model, format)
        with serve_folder(tmp_path) as url:
            found = from_pretrained(f"{url}/{alone.relative_to(tmp_path)}", type(model), config=model.config)
            assert_as_the_library(found, model, format)
        with pytest.raises(FileNotFoundError, match="got nothing"):
            from_pretrained(str(alone.parent / f"missing.{format}"), type(model))
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(FileNotFoundError, match="got a file"):
        from_pretrained(str(tmp_path / "notes.txt"), type(model))


def test_tied_weights_that_are_not_numbers_are_tied_again_and_those_on_two_devices_are_not_compared(tmp_path, caplog):
    model = tiny_models.llama(tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = float("nan")
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.config.tie_word_embeddings = True
    save_pretrained(model, tmp_path, ties="twice")
    tied = from_pretrained(tmp_path, type(model))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert "stay apart" not in caplog.text

    parted = tiny_models.llama(tie_word_embeddings=True)
    with tensorizer.TensorDeserializer(tmp_path / "model.tensors", device="cpu", lazy_load=True) as file:
        names = module_names(file._open_file, range(len(file)))
        fill = Fill(ModuleView(parted), file._open_file, names, FillOptions(ties="equal"), strict=True)
        tensors = {name: file[name] for name in file}
    fill.put({**tensors, "lm_head.weight": tensors["lm_head.weight"].to("meta")})
    assert parted.lm_head.weight.is_meta
    assert not parted.model.embed_tokens.weight.is_meta


def test_save_pretrained_and_from_pretrained_tell_their_progress(tmp_path):
    told = []
    model = tiny_models.llama()
    save_pretrained(model, tmp_path, progress=told.append)
    nbytes = (tmp_path / "model.tensors").stat().st_size
    assert told[-1].bytes_done == told[-1].bytes_total
    assert 0 < told[-1].bytes_total <= nbytes
    for options in ({}, {"dtype": torch.bfloat16}, {"strict": False, "output_loading_info": True}):
        told.clear()
        from_pretrained(tmp_path, mmap=False, progress=told.append, **options)
        assert told[-1].bytes_done == told[-1].bytes_total > 0
    with pytest.raises(TypeError, match="progress: expected a bool or a callable"):
        from_pretrained(tmp_path, mmap=False, progress="yes")


def test_a_bar_appears_by_default_on_a_terminal_alone(tmp_path, monkeypatch, capsys):
    save_pretrained(tiny_models.llama(), tmp_path)
    for on_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda on_terminal=on_terminal: on_terminal, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(_progress, "bars", lambda delay: print(f"a bar after {delay} s"))
        save_pretrained(tiny_models.llama(), tmp_path)
        from_pretrained(tmp_path, mmap=False)
        assert capsys.readouterr().out == ("a bar after 1.0 s\n" * 2 if on_terminal else "")


def test_a_device_that_is_not_there_is_told_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nowhere = "https://127.0.0.1:1/model"
    message = "device 'cuda(:0)?' was asked for, but CUDA is not available"
    for options in ({"device": "cuda"}, {"device": 0}, {"device_map": "cuda"}, {"device_map": {"": 0}}):
        with pytest.raises(RuntimeError, match=message):
            from_pretrained(nowhere, **options)
    for load in (tensorizer.load_file, tensorizer.TensorDeserializer):
        with pytest.raises(RuntimeError, match=message):
            load(f"{nowhere}/model.tensors", device="cuda")
    with pytest.warns(DeprecationWarning, match="load_model"), pytest.raises(RuntimeError, match=message):
        tensorizer.load_model(nowhere, torch.nn.Linear, device="cuda")


def test_a_bucket_that_does_not_exist_is_told_in_the_words_of_the_store(monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with S3Recorder() as store:
        store.refuse_all = {"GetObject": (404, "NoSuchBucket")}
        options = {"stream_options": store.arguments}
        for load in (from_pretrained, tensorizer.load_file, tensorizer.inspect):
            with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
                load("s3://bukcet/model", **options)

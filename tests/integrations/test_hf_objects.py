"""Pipelines, adapters, sentence transformers and quantised models, against their own libraries."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import warnings

import pytest
import tiny_models
import torch
import transformers
from servers.file_server import serve_folder

import tensorizer
from tensorizer import TensorSerializer
from tensorizer.errors import FormatError, LoadError, UnsupportedContentError
from tensorizer.integrations.huggingface import from_pretrained, load_adapter, save_pretrained

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]

PROMPT = torch.tensor([[3, 4, 5]])


def assert_same_state(ours, theirs):
    state, expected = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(expected)
    for name, tensor in state.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))
    assert not any(module.training for module in ours.modules())


@pytest.fixture
def private_folders(monkeypatch):
    """The temporary folders that are made; none may be left."""
    made, original = [], tempfile.mkdtemp

    def mkdtemp(*arguments, **keywords):
        made.append(original(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    yield made
    assert not [folder for folder in made if os.path.exists(folder) and "tensorizer-" in os.path.basename(folder)]


# --- diffusers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    folder = tiny_models.save_stable_diffusion(tmp_path_factory.mktemp("diffusion"))
    return folder, diffusers.StableDiffusionPipeline.from_pretrained(folder)


def image_of(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipeline("ab", num_inference_steps=2, height=8, width=8, generator=generator, output_type="pt").images


def test_a_pipeline_goes_each_way_in_one_call(stable_diffusion, tmp_path, private_folders):
    folder, theirs = stable_diffusion
    save_pretrained(theirs, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
    names = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.tensors")]
    assert sorted(names) == [
        "text_encoder/model.tensors",
        "unet/diffusion_pytorch_model.tensors",
        "vae/diffusion_pytorch_model.tensors",
    ]
    wanted = image_of(theirs)
    with serve_folder(tmp_path) as web:
        for source in (tmp_path, folder, web):
            ours = from_pretrained(source)
            assert type(ours) is type(theirs)
            assert ours.components.keys() == theirs.components.keys()
            for name, component in theirs.components.items():
                assert type(ours.components[name]) is type(component), name
                if isinstance(component, torch.nn.Module):
                    assert_same_state(ours.components[name], component)
            assert torch.equal(image_of(ours), wanted)


def test_a_component_whose_class_is_in_the_folder_of_a_pipeline_goes_each_way(stable_diffusion, tmp_path):
    """The safety checker, a model of transformers that diffusers defines."""
    checking = pytest.importorskip("diffusers.pipelines.stable_diffusion", reason="diffusers is not installed")
    _, theirs = stable_diffusion
    half = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        vision_config={**half, "image_size": 8, "patch_size": 4},
        text_config={**half, "vocab_size": 9},
        projection_dim=8,
    )
    checker = checking.StableDiffusionSafetyChecker(config).eval()
    extractor = transformers.CLIPImageProcessor(size=8, crop_size=8)
    pipeline = type(theirs)(**{**theirs.components, "safety_checker": checker, "feature_extractor": extractor})
    pipeline.save_pretrained(tmp_path / "library")
    save_pretrained(pipeline, tmp_path / "ours")
    for form in ("library", "ours"):
        assert_same_state(from_pretrained(tmp_path / form).safety_checker, checker)
        assert from_pretrained(tmp_path / form, dtype=torch.float16).safety_checker.dtype == torch.float16


def test_code_in_the_folder_of_a_pipeline_is_never_run(stable_diffusion, tmp_path):
    """Some releases of the library run it where the folder is a local one, as it is to them by then."""
    cases = (
        ({"_class_name": ["mine", "Mine"]}, "mine.py"),
        ({}, "None.py"),  # the file of a custom_pipeline, where none is named
        ({"scheduler": ["mine", "Mine"]}, "scheduler/mine.py"),
        ({"scheduler": ["diffusers", "Mine"]}, "scheduler/diffusers.py"),
        ({"more": ["diffusers", "DiffusionPipeline"]}, "more/None.py"),
        ({"scheduler": ["this", "Mine"]}, "a module that is installed, and that nobody has imported"),
    )
    for number, (changes, name) in enumerate(cases):
        folder = tmp_path / f"{{{number}}}"
        shutil.copytree(stable_diffusion[0], folder)
        index = json.loads((folder / "model_index.json").read_text())
        if name.endswith(".py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("raise SystemExit('code of the repository ran')")
            ((folder / name).parent / "model_index.json").write_text(json.dumps(index))
        (folder / "model_index.json").write_text(json.dumps({**index, **changes}))
        with pytest.raises(ValueError, match=rf"{re.escape(str(folder))}.*model_index\.json: .*never run"):
            from_pretrained(folder)
    assert "this" not in sys.modules


def test_one_model_of_diffusers_loads_by_itself(stable_diffusion, tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    folder, theirs = stable_diffusion
    save_pretrained(theirs.unet, tmp_path)
    assert_same_state(from_pretrained(tmp_path), theirs.unet)
    half = from_pretrained(folder, diffusers.UNet2DConditionModel, subfolder="unet", dtype=torch.bfloat16)
    assert_same_state(half, type(half).from_pretrained(folder, subfolder="unet", torch_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="device_map"):
        from_pretrained(tmp_path, device_map="auto")
    with pytest.raises(ValueError, match="output_loading_info"):
        from_pretrained(tmp_path, output_loading_info=True)


def test_tables_and_kept_parts_of_models_of_diffusers_have_the_dtype_and_bits_of_the_library(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1}
    makes = {
        "table in float32": lambda: diffusers.PixArtTransformer2DModel(
            **heads, out_channels=8, cross_attention_dim=16, sample_size=8, patch_size=2, caption_channels=8,
            norm_num_groups=4, use_additional_conditions=False,
        ),
        "table in float64": lambda: diffusers.CogVideoXTransformer3DModel(
            **heads, out_channels=4, time_embed_dim=8, text_embed_dim=8, sample_width=8, sample_height=8,
            sample_frames=9, max_text_seq_length=8,
        ),
        "parts in float32": lambda: diffusers.WanTransformer3DModel(
            **{**heads, "attention_head_dim": 12}, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32
        ),
    }  # fmt: skip
    for what, make in makes.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            folder = tmp_path / what / str(dtype)
            model = torch.nn.Module.to(make(), dtype)
            model.save_pretrained(folder / "library")
            save_pretrained(model, folder / "ours")
            theirs = type(model).from_pretrained(folder / "library", torch_dtype=dtype)
            wanted = dict(theirs.named_buffers())
            for form in ("library", "ours"):
                for options in ({}, {"dtype": dtype}):
                    ours = from_pretrained(folder / form, **options)
                    assert_same_state(ours, theirs)
                    found = dict(ours.named_buffers())
                    assert found.keys() == wanted.keys(), what
                    for name, buffer in found.items():
                        assert buffer.dtype == wanted[name].dtype, (what, dtype, name)
                        assert torch.equal(buffer, wanted[name]), (what, dtype, name)
    assert torch.get_default_dtype() == torch.float32


def test_names_of_dtypes_mean_their_dtype_for_diffusers_and_misspelt_ones_are_an_error(stable_diffusion, tmp_path):
    folder, theirs = stable_diffusion
    save_pretrained(theirs, tmp_path / "pipeline")
    (tmp_path / "pickled").mkdir()
    theirs.vae.save_config(tmp_path / "pickled")
    torch.save(theirs.vae.state_dict(), tmp_path / "pickled" / "diffusion_pytorch_model.bin")
    for source, options in {
        tmp_path / "pipeline" / "vae": {},
        folder / "vae": {},
        tmp_path / "pickled": {"allow_pickle": True},
        tmp_path / "pipeline": {},
        folder: {},
    }.items():
        for dtype in ("float16", "torch.float16", "half"):
            loaded = from_pretrained(source, dtype=dtype, **options)
            assert {p.dtype for p in getattr(loaded, "vae", loaded).parameters()} == {torch.float16}, (source, dtype)
        with pytest.raises(ValueError, match=r"dtype: expected .*'flaot16'; did you mean 'float16'\?"):
            from_pretrained(source, dtype="flaot16", **options)
    mixed = from_pretrained(tmp_path / "pipeline", dtype={"default": "float16", "unet": torch.bfloat16})
    assert (mixed.unet.dtype, mixed.vae.dtype, mixed.text_encoder.dtype) == (torch.bfloat16, *[torch.float16] * 2)


def test_torch_dtype_means_dtype_for_models_and_pipelines_of_diffusers(stable_diffusion, tmp_path):
    folder, theirs = stable_diffusion
    save_pretrained(theirs, tmp_path)
    for source in (folder, tmp_path):
        for dtype in (torch.float16, "float16"):
            assert from_pretrained(source / "unet", torch_dtype=dtype).dtype == torch.float16
            pipeline = from_pretrained(source, torch_dtype=dtype)
            assert (pipeline.unet.dtype, pipeline.text_encoder.dtype) == (torch.float16, torch.float16)
        assert from_pretrained(source, torch_dtype="auto").unet.dtype == torch.float32


def test_compiled_parts_of_pipelines_and_adapters_are_saved_as_what_was_compiled(stable_diffusion, tmp_path):
    _, theirs = stable_diffusion
    pipeline = type(theirs)(**theirs.components, requires_safety_checker=False)
    pipeline.unet, pipeline.text_encoder = torch.compile(theirs.unet), torch.compile(theirs.text_encoder)
    save_pretrained(pipeline, tmp_path / "pipeline")
    ours = from_pretrained(tmp_path / "pipeline")
    assert type(ours.unet) is type(theirs.unet)
    for name in ("unet", "text_encoder", "vae"):
        assert_same_state(getattr(ours, name), getattr(theirs, name))
    save_pretrained(torch.compile(theirs.vae), tmp_path / "vae")
    assert_same_state(from_pretrained(tmp_path / "vae"), theirs.vae)
    base = tiny_models.llama()
    base.save_pretrained(tmp_path / "base")
    adapted = with_adapter(type(base).from_pretrained(tmp_path / "base"))
    right = tiny_models.output_of(adapted)
    layers = adapted.base_model.model.model.layers
    layers[0] = torch.compile(layers[0])
    save_pretrained(torch.compile(adapted), tmp_path / "adapter")
    assert isinstance(layers[0], type(torch.compile(base)))  # what was saved is as it was
    assert tiny_models.agree(tiny_models.output_of(from_pretrained(tmp_path / "adapter")), right)


def test_a_model_of_diffusers_that_does_not_fit_its_file_is_initialised_only_without_strict(stable_diffusion, tmp_path):
    """An attention block of the first releases has other names, which the library changes in files of its own only."""
    _, theirs = stable_diffusion
    save_pretrained(theirs.vae, tmp_path)
    state = theirs.vae.state_dict()
    file = tmp_path / "diffusion_pytorch_model.tensors"
    renamed = {name.replace("attentions.0.to_q", "attentions.0.query"): tensor for name, tensor in state.items()}
    assert renamed.keys() != state.keys()
    tensorizer.save_file(renamed, file)
    with pytest.raises(LoadError, match=r"attentions\.0\.to_q.*attentions\.0\.query.*early releases"):
        from_pretrained(tmp_path)
    ours = from_pretrained(tmp_path, strict=False).state_dict()
    assert all(torch.equal(ours[name], state[name]) for name in renamed.keys() & state.keys())
    assert not any(tensor.is_meta for tensor in ours.values())
    tensorizer.save_file({**state, "decoder.conv_in.weight": torch.zeros(1)}, file)
    with pytest.raises(LoadError, match=r"decoder\.conv_in\.weight"):
        from_pretrained(tmp_path)


def test_pickled_weights_of_a_model_of_diffusers_are_read_by_torch(stable_diffusion, tmp_path):
    _, theirs = stable_diffusion
    theirs.vae.save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises(ValueError, match="allow_pickle"):
        from_pretrained(tmp_path)
    assert_same_state(from_pretrained(tmp_path, allow_pickle=True), theirs.vae)


# --- adapters --------------------------------------------------------------------------------------------------------


def with_adapter(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval()


def test_an_adapter_loads_into_peft_and_transformers(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = tmp_path / "base"
    save_pretrained(tiny_models.llama(), base)
    tiny_models.llama().save_pretrained(tmp_path / "library base")
    theirs = with_adapter(from_pretrained(base))
    theirs.save_pretrained(tmp_path / "library")
    save_pretrained(theirs, tmp_path / "ours")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [
        "adapter_config.json",
        "adapter_model.tensors",
    ]
    wanted = theirs(PROMPT).logits
    again = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "library base"), tmp_path / "library"
    )
    assert tiny_models.agree(again(PROMPT).logits, wanted)
    for folder in ("ours", "library"):
        for cls in (None, peft.PeftModel):
            ours = from_pretrained(tmp_path / folder, cls)
            assert type(ours) is peft.PeftModelForCausalLM
            assert_same_state(ours, again)
            assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in again.parameters()]
            assert tiny_models.agree(ours(PROMPT).logits, wanted)
        into = from_pretrained(tmp_path / folder, transformers.AutoModelForCausalLM)
        assert type(into) is transformers.LlamaForCausalLM
        assert tiny_models.agree(into(PROMPT).logits, wanted)
        told = []
        model = from_pretrained(tmp_path / "ours")
        second = load_adapter(model, tmp_path / folder, adapter_name="second", progress=told.append)
        assert told[-1].bytes_total > 0  # of a file that may be mapped
        second.set_adapter("second")
        assert tiny_models.agree(second(PROMPT).logits, wanted)


def test_two_sets_of_weights_of_an_adapter_are_refused_naming_both(tmp_path):
    save_pretrained(tiny_models.llama(), tmp_path / "base")
    adapted = with_adapter(from_pretrained(tmp_path / "base"))
    save_pretrained(adapted, tmp_path / "adapter")
    adapted.save_pretrained(tmp_path / "adapter")
    both = r"found both adapter_model\.tensors and adapter_model\.safetensors,"
    with pytest.raises(FormatError, match=both):
        load_adapter(from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    with pytest.raises(FormatError, match=both):
        from_pretrained(tmp_path / "adapter")
    adapter = tmp_path / "adapter"
    tensorizer.convert(adapter / "adapter_model.safetensors", adapter / "adapter_model.tensors")
    assert_same_state(from_pretrained(adapter), adapted)


def test_adapters_that_learn_prompts_load_as_peft_loads_them(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = tiny_models.llama()
    base.save_pretrained(tmp_path / "base")
    makes = {
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "projected prefix": lambda: peft.PrefixTuningConfig(
            num_virtual_tokens=3, task_type="CAUSAL_LM", prefix_projection=True, encoder_hidden_size=8
        ),
        "p-tuning": lambda: peft.PromptEncoderConfig(
            num_virtual_tokens=3, task_type="CAUSAL_LM", encoder_hidden_size=8
        ),
    }
    for what, make in makes.items():
        torch.manual_seed(1)
        adapted = peft.get_peft_model(type(base).from_pretrained(tmp_path / "base"), make()).eval()
        adapted.save_pretrained(tmp_path / what / "peft")
        save_pretrained(adapted, tmp_path / what / "ours")
        right = tiny_models.output_of(
            peft.PeftModel.from_pretrained(
                type(base).from_pretrained(tmp_path / "base"), str(tmp_path / what / "peft")
            ).eval()
        )
        for form in ("peft", "ours"):
            folder = tmp_path / what / form
            assert torch.equal(tiny_models.output_of(from_pretrained(folder)), right), (what, form)
            if what in ("prompt", "prefix"):  # while they are trained, the others have an encoder of another shape
                other = peft.get_peft_model(type(base).from_pretrained(tmp_path / "base"), make()).eval()
                assert torch.equal(tiny_models.output_of(load_adapter(other, folder)), right), (what, form)
    state = tensorizer.load_file(tmp_path / "prompt" / "ours" / "adapter_model.tensors")
    tensorizer.save_file({**state, "surplus": torch.ones(2)}, tmp_path / "prompt" / "ours" / "adapter_model.tensors")
    with pytest.raises(LoadError, match=r"unexpected \['surplus'\]"):
        from_pretrained(tmp_path / "prompt" / "ours")
    tensorizer.save_file({"surplus": torch.ones(2)}, tmp_path / "prefix" / "ours" / "adapter_model.tensors")
    with pytest.raises(LoadError, match=r"missing \['prompt_embeddings'\]"):
        from_pretrained(tmp_path / "prefix" / "ours")


def test_no_message_warning_or_configuration_shows_the_secrets_of_a_uri(tmp_path, caplog):
    pytest.importorskip("peft", reason="peft is not installed")
    model = tiny_models.llama()
    model_folder, ours = tmp_path / "base", tmp_path / "ours"
    save_pretrained(model, model_folder)
    with pytest.warns(DeprecationWarning, match="serialize_model"):
        tensorizer.serialize_model(model, model.config, tmp_path / "old")
    save_pretrained(with_adapter(from_pretrained(model_folder)), ours)
    config = ours / "adapter_config.json"
    shown = []
    with serve_folder(tmp_path) as address, warnings.catch_warnings(record=True) as warned, caplog.at_level("DEBUG"):
        warnings.simplefilter("always")
        address = address.replace("://", "://user:secret@")
        config.write_text(config.read_text().replace(str(model_folder), f"{address}/base"))
        loaded = from_pretrained(ours)
        loaded.save_pretrained(tmp_path / "again")
        shown += [repr(loaded.peft_config), repr(loaded.config), (tmp_path / "again/adapter_config.json").read_text()]
        tensorizer.save_file({"wrong": torch.zeros(1)}, ours / "adapter_model.tensors")
        tensorizer.save_file({"wrong": torch.zeros(1)}, model_folder / "model.tensors")
        with TensorSerializer(tmp_path / "old" / "model.tensors") as serializer:
            serializer.write_module(torch.nn.ModuleDict({"lm_head": model.lm_head}))
        for call in (
            lambda: from_pretrained(f"{address}/base"),
            lambda: load_adapter(loaded, f"{address}/ours"),
            lambda: tensorizer.load_model(f"{address}/old", transformers.LlamaForCausalLM, device="cpu"),
            lambda: from_pretrained("hf://user:secret@org/name?token=secret"),
            lambda: from_pretrained("hf://org/name@main/x?token=secret", revision="other"),
        ):
            with pytest.raises((OSError, ValueError, LoadError)) as caught:
                call()
            shown.append(str(caught.value))
    shown += [str(warning.message) for warning in warned] + [record.getMessage() for record in caplog.records]
    assert not [text for text in shown if "secret" in text]


def test_an_adapter_that_does_not_fit_or_names_no_base_is_an_error(tmp_path):
    model = tiny_models.llama()
    save_pretrained(model, tmp_path / "base")
    adapted = with_adapter(from_pretrained(tmp_path / "base"))
    save_pretrained(adapted, tmp_path / "ours")
    state = tensorizer.load_file(tmp_path / "ours" / "adapter_model.tensors")
    first = next(iter(state))
    del state[first]
    tensorizer.save_file({**state, "surplus": torch.zeros(1)}, tmp_path / "ours" / "adapter_model.tensors")
    with pytest.raises(LoadError, match=f"missing.*{first}"):
        from_pretrained(tmp_path / "ours")
    from_pretrained(tmp_path / "ours", strict=False)
    config = tmp_path / "ours" / "adapter_config.json"
    values = json.loads(config.read_text())
    for name in ("", 5, [str(tmp_path / "base")]):
        config.write_text(json.dumps({**values, "base_model_name_or_path": name}))
        with pytest.raises(ValueError, match="base_model_name_or_path"):
            from_pretrained(tmp_path / "ours")
    with pytest.raises(TypeError, match="got Linear"):
        load_adapter(torch.nn.Linear(1, 1), tmp_path / "ours")


def test_an_adapter_loads_into_a_pipeline(stable_diffusion, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    folder, plain = stable_diffusion
    source = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    unet = peft.get_peft_model(source.unet, config)
    layers = peft.get_peft_model_state_dict(unet)
    bare = {name.removeprefix("base_model.model."): tensor for name, tensor in layers.items()}
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path / "library", unet_lora_layers=bare)
    save_pretrained(unet, tmp_path / "ours")
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    theirs.load_lora_weights(tmp_path / "library")
    wanted = image_of(theirs)
    assert not torch.equal(wanted, image_of(plain))
    for kind in ("library", "ours"):
        assert torch.equal(image_of(load_adapter(from_pretrained(folder), tmp_path / kind)), wanted), kind


# --- sentence-transformers -------------------------------------------------------------------------------------------


def test_sentence_transformers_loads_what_was_saved_as_safetensors(tmp_path):
    theirs = tiny_models.sentence_transformer(tmp_path / "source")
    with pytest.raises(UnsupportedContentError, match="safetensors"):
        save_pretrained(theirs, tmp_path / "ours")
    save_pretrained(theirs, tmp_path / "ours", format="safetensors")
    assert not list((tmp_path / "ours").rglob("*.tensors"))
    again = type(theirs)(str(tmp_path / "ours"), device="cpu", local_files_only=True)
    assert (again.encode(["abc", "de"]) == theirs.encode(["abc", "de"])).all()
    for cls in (None, type(theirs)):
        with pytest.raises(UnsupportedContentError, match=r"SentenceTransformer\(folder\)"):
            from_pretrained(tmp_path / "ours", cls)


# --- folders that name others ----------------------------------------------------------------------------------------


def test_a_repository_that_names_folders_outside_writes_nothing_there(tmp_path):
    from tensorizer.integrations._hf.folders import LocalFolder

    repository, outside = tmp_path / "repository", tmp_path / "outside"
    outside.mkdir()
    (outside / "model.safetensors").write_bytes(b"mine")
    repository.mkdir()
    for name in ("..", "../x", "a/../../x", "a//b"):
        with pytest.raises(ValueError, match="below"):
            LocalFolder(repository).below(name)
    with serve_folder(repository) as url:
        (repository / "model_index.json").write_text(
            json.dumps({"_class_name": "DiffusionPipeline", "../../../outside": ["diffusers", "AutoencoderKL"]})
        )
        (repository / "tensorizer_files.json").write_text('["model_index.json"]')
        with pytest.raises(ValueError, match="outside"):
            from_pretrained(url)
    assert (outside / "model.safetensors").read_bytes() == b"mine"


def test_an_index_of_a_pipeline_of_the_wrong_form_is_named(tmp_path):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    for content in ("[]", "3", "{", '{"unet": ["diffusers"]}', '{"unet": ["diffusers", 3]}'):
        (tmp_path / "model_index.json").write_text(content)
        with pytest.raises(ValueError, match=r"model_index\.json"):
            from_pretrained(tmp_path)

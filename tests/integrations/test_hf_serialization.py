"""Hugging Face models through examples/hf_serialization.py and tensorizer.integrations, and no_init_or_tensor there."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections import OrderedDict

import pytest
import tiny_models
import torch
import transformers
from paths import EXAMPLES

import tensorizer
import tensorizer.torch
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.integrations import huggingface
from tensorizer.utils import no_init_or_tensor

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]

PROMPT = torch.tensor([[3, 4, 5]])


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("hf_serialization", EXAMPLES / "hf_serialization.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was():
    logger, root = logging.getLogger("hf_serialization"), logging.getLogger()
    before = logger.level, root.handlers[:]
    yield
    logger.setLevel(before[0])
    root.handlers[:] = before[1]


def assert_same_model(model, original):
    state, expected = model.state_dict(), original.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


# --- no_init_or_tensor with transformers ---------------------------------------------------------------------------

BUILDERS = {
    "llama": (tiny_models.llama, transformers.AutoModelForCausalLM),
    "gpt2": (tiny_models.gpt2, transformers.AutoModelForCausalLM),
    "t5": (tiny_models.t5, transformers.AutoModelForSeq2SeqLM),
}


def build_in_context(auto_class, config):
    with torch.device("cpu"), no_init_or_tensor():
        return auto_class.from_config(config)


def build_by_callable(auto_class, config):
    return no_init_or_tensor(lambda: auto_class.from_config(config))


@pytest.mark.parametrize("build", [build_in_context, build_by_callable])
@pytest.mark.parametrize("architecture", BUILDERS)
def test_a_model_built_without_parameters_and_filled_generates_right_away(tmp_path, architecture, build):
    make, auto_class = BUILDERS[architecture]
    original = make()
    with TensorSerializer(tmp_path / "model.tensors") as serializer:
        serializer.write_module(original)
    model = build(auto_class, original.config)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    with TensorDeserializer(tmp_path / "model.tensors", device="cpu", lazy_load=True) as deserializer:
        deserializer.load_into_module(model)
    model.eval()
    generate = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(PROMPT, **generate), original.generate(PROMPT, **generate))
    assert_same_model(model, original)


def test_the_form_of_the_oldest_readme_works(tmp_path):
    """``from_pretrained(..., state_dict=OrderedDict())``; transformers 5 takes no name beside the state dict."""
    original = tiny_models.llama()
    with TensorSerializer(tmp_path / "model.tensors") as serializer:
        serializer.write_module(original)
    model = no_init_or_tensor(
        lambda: transformers.LlamaForCausalLM.from_pretrained(None, config=original.config, state_dict=OrderedDict())
    )
    TensorDeserializer(str(tmp_path / "model.tensors"), device="cpu").load_into_module(model)
    model.tie_weights()
    assert_same_model(model, original)


def test_later_code_meets_torch_as_it_was():
    """Nothing of ours stays in the way of every later call."""
    before = torch.empty
    no_init_or_tensor(lambda: transformers.AutoModelForCausalLM.from_config(tiny_models.llama_config()))
    assert torch.empty is before
    assert getattr(torch.overrides, "_len_torch_function_stack", int)() == 0


# --- the functions of 1.0 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "classes",
    [
        (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        (transformers.LlamaForCausalLM, None),
        (transformers.AutoModelForCausalLM, transformers.LlamaConfig),
        (transformers.AutoModelForCausalLM, transformers.AutoConfig),
        (transformers.AutoModelForCausalLM, None),
    ],
    ids=lambda classes: "-".join(getattr(c, "__name__", "None") for c in classes),
)
@pytest.mark.filterwarnings("ignore:tensorizer:DeprecationWarning")
def test_the_functions_of_1_0_take_every_way_to_name_the_classes(tmp_path, classes):
    original = tiny_models.llama()
    tensorizer.serialize_model(original, original.config, tmp_path)
    model = tensorizer.load_model(tmp_path, *classes, device="cpu")
    assert type(model) is transformers.LlamaForCausalLM
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    assert_same_model(model, original)
    assert tiny_models.agree(model(PROMPT).logits, original(PROMPT).logits)


@pytest.fixture(scope="module")
def bucket(s3_server):
    """A bucket of a real object store on loopback, as environment variables of the example."""
    with pytest.MonkeyPatch.context() as environment:
        s3_server.client().create_bucket(Bucket="models")
        environment.setenv("S3_ACCESS_KEY_ID", s3_server.access_key)
        environment.setenv("S3_SECRET_ACCESS_KEY", s3_server.secret_key)
        environment.setenv("S3_ENDPOINT_URL", s3_server.endpoint)
        yield "s3://models"


def test_a_model_lives_in_a_bucket(bucket, language_model, example):
    out, options = f"{bucket}/deep/llama", example.stream_options()
    example.main([str(language_model), out, "--model-type", "transformers", "--validate", "-q"])
    model = huggingface.from_pretrained(out, stream_options=options)
    assert_same_model(model, transformers.AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float16))
    assert example.exists(f"{out}/model.tensors")
    assert not example.exists(f"{out}/other.tensors")


def test_a_converted_folder_in_a_bucket_gives_model_tokenizer_and_configurations(bucket, tmp_path, example):
    """The steps of docs/serve-from-s3.md."""
    options, out = example.stream_options(), f"{bucket}/served"
    model = tiny_models.llama()
    model.save_pretrained(tmp_path / "downloaded")
    tiny_models.tokenizer().save_pretrained(tmp_path / "downloaded")
    tensorizer.convert(tmp_path / "downloaded", f"{out}/", all_files=True, stream_options=options)
    assert_same_model(huggingface.from_pretrained(out, stream_options=options), model)
    for tried in (out, f"{bucket}/unlisted"):
        tokenizer = huggingface.from_pretrained(tried, transformers.AutoTokenizer, stream_options=options)
        assert tokenizer("abc")["input_ids"] == tiny_models.tokenizer()("abc")["input_ids"]
        config = huggingface.from_pretrained(tried, transformers.AutoConfig, stream_options=options)
        assert config.hidden_size == model.config.hidden_size
        if tried == out:  # a folder that other tools uploaded: nothing lists its files
            for file in (tmp_path / "downloaded").iterdir():
                with tensorizer.stream_io.open_stream(f"{bucket}/unlisted/{file.name}", "wb", **options) as stream:
                    stream.write(file.read_bytes())
    with pytest.raises(OSError, match="nowhere"):
        huggingface.from_pretrained(f"{bucket}/nowhere", transformers.AutoTokenizer, stream_options=options)


def test_a_later_save_into_a_bucket_is_the_one_that_loads(bucket, example):
    out, options = f"{bucket}/again", example.stream_options()
    model = tiny_models.llama()
    for value, size in ((1.0, None), (2.0, "20KB"), (3.0, None), (4.0, "20KB")):
        model.model.norm.weight.data.fill_(value)
        huggingface.save_pretrained(model, out, max_shard_size=size, stream_options=options)
        loaded = huggingface.from_pretrained(out, stream_options=options)
        assert loaded.model.norm.weight[0] == value
        tensors = tensorizer.torch.load_file(out, stream_options=options)
        assert tensors["model.norm.weight"][0] == value


def test_a_pipeline_lives_in_a_bucket(bucket, tmp_path, example):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    source = tiny_models.save_stable_diffusion(tmp_path / "source")
    example.main([str(source), f"{bucket}/diffusion", "--model-type", "diffusers", "--validate", "-q"])


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return tiny_models.save_language_model(tmp_path_factory.mktemp("llama"))


def test_a_transformers_model_is_written_in_half_precision_and_validated(language_model, tmp_path, example):
    out = tmp_path / "out"
    example.main([str(language_model), str(out), "--model-type", "transformers", "--validate", "-q"])
    names = {"config.json", "generation_config.json", "model.tensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in out.iterdir()} == names
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "float16")
    original = transformers.AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float16)
    assert_same_model(huggingface.from_pretrained(out), original)


def test_a_stable_diffusion_pipeline_is_written_and_validated(tmp_path, example):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    source, out = tiny_models.save_stable_diffusion(tmp_path / "source"), tmp_path / "out"
    example.main([str(source), str(out), "--model-type", "diffusers", "--validate", "-q"])
    loaded, wanted = huggingface.from_pretrained(out), diffusers.DiffusionPipeline.from_pretrained(source)
    for name in ("unet", "vae", "text_encoder"):
        assert_same_model(getattr(loaded, name), getattr(wanted, name))
    assert loaded.scheduler.config.num_train_timesteps == 50


def test_what_exists_stays_unless_forced(language_model, tmp_path, example):
    arguments = [str(language_model), str(tmp_path), "--model-type", "transformers", "-q"]
    (tmp_path / "model.tensors").write_bytes(b"old")
    example.main(arguments)
    assert (tmp_path / "model.tensors").read_bytes() != b"old"  # there was no config.json, which comes last
    (tmp_path / "model.tensors").write_bytes(b"old")
    example.main(arguments)
    assert (tmp_path / "model.tensors").read_bytes() == b"old"
    example.main([*arguments, "--force"])
    assert (tmp_path / "model.tensors").read_bytes() != b"old"


def test_help_names_the_two_functions(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--help"])
    shown = capsys.readouterr().out
    assert "hf_main" in shown
    assert "df_main" in shown


def test_validation_names_what_differs(example):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.load_state_dict(model.state_dict())
    example.validate(model, other)
    other.weight.data[0, 0] += 1
    for wrong, named in ((other, "weight"), (torch.nn.Linear(2, 2).half(), "float16")):
        with pytest.raises(example.ValidationError, match=named):
            example.validate(model, wrong)
    with pytest.raises(example.ValidationError, match="bias"):
        example.validate(model, torch.nn.Linear(2, 2, bias=False))


def test_a_wrong_reload_fails_the_validation(language_model, tmp_path, example, monkeypatch):
    def spoiled(source, **keywords):
        model = huggingface.from_pretrained(source, **keywords)
        if str(source) == str(tmp_path):
            model.model.norm.weight.data += 1
        return model

    monkeypatch.setattr(example, "from_pretrained", spoiled)
    with pytest.raises(example.ValidationError, match="norm"):
        example.main([str(language_model), str(tmp_path), "--model-type", "transformers", "--validate", "-q"])


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ([], logging.INFO),
        (["-q"], logging.WARNING),
        (["-qq"], logging.CRITICAL),
        (["-q", "-q", "-q", "-q"], logging.CRITICAL),
        (["-v"], logging.DEBUG),
        (["-vvv"], logging.DEBUG),
        (["-q", "-v"], logging.INFO),
    ],
    ids=str,
)
def test_verbosity_starts_in_the_middle(options, level, example, monkeypatch):
    monkeypatch.setattr(example, "hf_main", lambda args: None)
    example.main(["in", "out", "--model-type", "transformers", *options])
    assert logging.getLogger("hf_serialization").level == level


def test_credentials_come_from_the_environment_and_caching_endpoints_are_avoided(example, monkeypatch):
    for name in ("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "S3_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    assert set(example.stream_options().values()) == {None}
    monkeypatch.setenv("S3_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("S3_ENDPOINT_URL", "https://accel-object.example.com")
    assert example.stream_options() == {
        "s3_access_key_id": "id",
        "s3_secret_access_key": "secret",
        "s3_endpoint": "https://object.example.com",
        "force_http": None,
    }
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:1")
    assert example.stream_options()["force_http"] is True

"""from_pretrained against the library's own, for every class that can be built small: all tensors to the bit."""

from __future__ import annotations

import copy

import every_model
import pytest
import torch
import transformers

import tensorizer
from tensorizer.errors import LoadError
from tensorizer.integrations.huggingface import from_pretrained, save_pretrained

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]

# Tables of every kind: rotary ones of each layer, of the model and of parts of it, with scaling; sinusoidal ones.
SAMPLES = (
    "GPTJForCausalLM", "CodeGenForCausalLM", "Gemma3nForCausalLM", "Gemma3nAudioEncoder", "Gemma4AudioModel",
    "LlamaForCausalLM", "Qwen2VLForConditionalGeneration", "BertModel", "WhisperForConditionalGeneration", "CLIPModel",
    "RoFormerForCausalLM", "FalconForCausalLM", "Wav2Vec2Model", "DeepseekV3ForCausalLM",
)  # fmt: skip
PARTS = 12


def tensors_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def differences(found, right):
    """Names of tensors that are not equal in dtype, shape and every bit but for the sign of NaN."""
    ours, theirs = tensors_of(found), tensors_of(right)
    unequal = [
        name
        for name in ours.keys() & theirs.keys()
        if ours[name].dtype != theirs[name].dtype or not torch.allclose(ours[name], theirs[name], 0, 0, equal_nan=True)
    ]
    return sorted({*unequal, *(ours.keys() ^ theirs.keys())})


def library_load(cls, model, folder):
    """The library's load of what it saved, and the names of tensors in which it does not agree with itself."""
    model.save_pretrained(folder)
    right, info = cls.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if any(info.values()):  # its own file does not fit
        raise ValueError(str(info))
    return right, differences(cls.from_pretrained(folder, dtype="auto"), right)


def off(name, dtype, folder, forms=("library", "ours")):
    """What differs from the library's load, by the form of the file; ``None`` where the library itself cannot."""
    base = every_model.build(name)
    if base is None:
        return None
    model = base.to(dtype)
    try:
        right, unsteady = library_load(type(model), model, folder / "library")
    except Exception:  # whatever a class says of sizes that do not go together
        return None
    found = {}
    for form in forms:
        if form == "ours":
            save_pretrained(model, folder / "ours")
        names = differences(from_pretrained(folder / form, model_class=type(model)), right)
        found[form] = [each for each in names if each not in unsteady]
    return {form: names for form, names in found.items() if names}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_table_of_a_half_precision_model_is_the_librarys_to_the_bit(name, tmp_path):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    for dtype in (torch.bfloat16, torch.float16):
        assert off(name, dtype, tmp_path / str(dtype)) == {}, (name, dtype)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_that_can_be_built_small_loads_as_the_library_loads_it(part, tmp_path):
    tried, wrong = 0, {}
    for number, name in enumerate(every_model.names()):
        if number % PARTS == part:
            found = off(name, torch.bfloat16, tmp_path / name, ("library",))
            tried += found is not None
            if found:
                wrong[name] = found
    assert wrong == {}
    assert tried > 10


@pytest.mark.filterwarnings("ignore:tensorizer:DeprecationWarning")
def test_load_model_of_a_half_precision_model_has_the_tables_of_the_library(tmp_path):
    model = every_model.build("GPTJForCausalLM").to(torch.bfloat16)
    right, _ = library_load(type(model), model, tmp_path / "library")
    tensorizer.serialize_model(copy.deepcopy(model), right.config, str(tmp_path / "old"))
    assert differences(tensorizer.load_model(str(tmp_path / "old"), type(model), device="cpu"), right) == []


def test_a_table_that_only_the_constructor_computes_is_kept(tmp_path):
    class Own(transformers.LlamaForCausalLM):
        """A class of another repository, whose tables the library knows nothing of."""

        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("table", torch.arange(5.0) / 3, persistent=False)

        def _init_weights(self, module):
            if isinstance(module, torch.nn.Linear):
                module.weight.data.normal_()

    model = Own(every_model.build("LlamaForCausalLM").config)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path, Own)
    assert differences(loaded, model) == []


@pytest.mark.parametrize(
    ("head", "base"),
    [
        ("Qwen2VLForConditionalGeneration", "Qwen2VLModel"),
        ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLModel"),
        ("AXK1ForCausalLM", "AXK1Model"),
        ("MixtralForCausalLM", "MixtralModel"),
    ],
)
def test_a_head_comes_and_goes_where_the_library_renames_what_it_loads(head, base, tmp_path):
    if not hasattr(transformers, head):
        pytest.skip(f"transformers {transformers.__version__} has no {head}")
    whole = every_model.build(head)
    assert whole is not None
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(torch.randn_like(parameter))
    inner = getattr(whole, whole.base_model_prefix)
    assert type(inner).__name__ == base
    for saved, wanted in ((whole, type(inner)), (inner, type(whole))):
        folder = tmp_path / type(saved).__name__
        saved.save_pretrained(folder / "library")
        save_pretrained(saved, folder / "own names")
        save_pretrained(saved, folder / "names of the library", names="library")
        for form in ("library", "own names", "names of the library"):
            loaded = from_pretrained(folder / form, wanted, strict=False)
            found = loaded if isinstance(loaded, type(inner)) else getattr(loaded, loaded.base_model_prefix)
            assert differences(found, inner) == [], (type(saved).__name__, form)
            with pytest.raises(LoadError, match="lm_head") as caught:
                from_pretrained(folder / form, wanted)
            assert "visual" not in str(caught.value)

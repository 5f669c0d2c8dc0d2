"""Makes models of a few kilobytes from configurations of real architectures, without downloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY = 64


def llama_config(**changes):
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return transformers.LlamaConfig(**{**values, **changes})


def llama(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama_config(**changes)).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def tokenizer():
    """One token for each of the first letters and digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def save_language_model(folder: Path, model=None) -> Path:
    """Writes a local model folder with a tokenizer, as from_pretrained reads it."""
    (llama() if model is None else model).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_stable_diffusion(folder: Path) -> Path:
    """Writes the folder of a Stable Diffusion pipeline of the first version."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    vocabulary = folder / "vocabulary"
    vocabulary.mkdir(parents=True)
    tokens = ["<|startoftext|>", "<|endoftext|>", *"abc", "ab", *(f"{letter}</w>" for letter in "abc")]
    (vocabulary / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (vocabulary / "merges.txt").write_text("#version: 0.2\na b\n")
    text_config = transformers.CLIPTextConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9,
        max_position_embeddings=8, projection_dim=8, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8),
        text_encoder=transformers.CLIPTextModel(text_config),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(vocabulary, model_max_length=8),
        unet=diffusers.UNet2DConditionModel(
            sample_size=8, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=16, norm_num_groups=4,
            attention_head_dim=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        scheduler=diffusers.DDIMScheduler(num_train_timesteps=50),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder / "pipeline")
    return folder / "pipeline"


def mixtral():
    """A mixture of experts. transformers 5 fuses the weights of its experts, which are separate in files."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


def bert_config():
    return transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip


def bert():
    torch.manual_seed(0)
    return transformers.BertModel(bert_config()).eval()


def bert_with_head():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(bert_config()).eval()


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config).eval()


def output_of(model):
    """The output of a model for a fixed input."""
    tokens = torch.tensor([[3, 4, 5]], device=model.device)
    with torch.no_grad():
        if model.main_input_name == "pixel_values":
            pixels = torch.arange(192.0, device=model.device).reshape(1, 3, 8, 8) / 192
            return model(pixel_values=pixels.to(model.dtype)).logits
        if model.config.is_encoder_decoder:
            return model(input_ids=tokens, decoder_input_ids=tokens).logits
        output = model(input_ids=tokens)
    return output.logits if "logits" in output else output.last_hidden_state


def agree(found, wanted) -> bool:
    """Whether two outputs of equal weights are equal except for rounding. The order in which kernels sum depends on the
    alignment of memory, which differs in a mapped file."""
    try:
        torch.testing.assert_close(found, wanted)
    except AssertionError:
        return False
    return True


def sentence_transformer(folder: Path):
    """A sentence transformer with pooling and a dense layer."""
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed"
    )
    from sentence_transformers.sentence_transformer import modules

    save_language_model(folder, bert())
    torch.manual_seed(0)
    return sentence_transformers.SentenceTransformer(
        modules=[modules.Transformer(str(folder)), modules.Pooling(32), modules.Dense(32, 8)], device="cpu"
    )

"""A small random language model with a tokenizer, which examples use if you name no other: they download nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make_model() -> LlamaForCausalLM:
    """About a million parameters; it speaks nonsense."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=128,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable character."""
    words = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_small_model(folder: Path) -> str:
    """Writes model and tokenizer for ``from_pretrained`` of transformers, and returns the folder."""
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)

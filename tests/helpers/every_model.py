"""Builds a small model of every class of transformers that its configuration allows, with random weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers.models.auto import configuration_auto, modeling_auto  # noqa: E402

_LAYERS = 2
_LIMIT = 60_000_000  # parameters
# New values for members of configurations, by their names.
_SIZES = {
    64: "hidden_size d_model n_embd embed_dim hidden_dim dim width decoder_hidden_size encoder_hidden_size "
    "embedding_dim intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim "
    "moe_intermediate_size hidden_size_per_layer_input attention_hidden_size projection_dim d_embed "
    "word_embed_proj_dim embedding_size "
    "shared_expert_intermediate_size dim_feedforward max_position_embeddings n_positions n_ctx max_source_positions "
    "max_target_positions",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads attention_heads encoder_num_attention_heads",
    1: "num_experts_per_tok n_group topk_group num_experts_per_token",
    32: "image_size",
    8: "patch_size",
    16: "head_dim",
}
_COUNTS = {
    _LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_decoder_layers "
    "num_encoder_layers num_blocks encoder_num_layers decoder_num_layers conf_num_hidden_layers",
    128: "vocab_size vocab_size_per_layer_input text_vocab_size",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts",
    0: "num_kv_shared_layers",
}
_NOT_DERIVED = ("head_dim", "num_key_value_heads")  # some classes do not expect None
_MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING")


def _by_name(table: dict[int, str]) -> dict[str, int]:
    return {name: size for size, names in table.items() for name in names.split()}


def _shrunk(values: Any, sizes: dict[str, int]) -> Any:
    if isinstance(values, list):
        return [_shrunk(value, sizes) for value in values]
    if not isinstance(values, dict):
        return values
    layers = {values[name] for name, size in sizes.items() if size == _LAYERS and isinstance(values.get(name), int)}
    found = {}
    for name, value in values.items():
        if name in sizes and (type(value) is int or (value is None and name in _NOT_DERIVED)):
            found[name] = sizes[name] if value is None else min(value, sizes[name])
        elif name == "per_layer_config":
            found[name] = None
        elif type(value) is int and name.endswith("token_id"):
            found[name] = min(value, 1)
        elif isinstance(value, list) and len(value) in layers and len(value) > _LAYERS:  # something for each layer
            found[name] = value[:_LAYERS]
        else:
            found[name] = _shrunk(value, sizes)
    return found


def small_config(cls: Any, kind: Any) -> Any:
    """A configuration of the class `kind` with which `cls` has few parameters; ``None`` if none was found."""
    for sizes in ({**_by_name(_SIZES), **_by_name(_COUNTS)}, _by_name(_COUNTS), {}):
        try:
            config = kind.from_dict(kind.from_dict(_shrunk(kind().to_dict(), sizes)).to_dict())
            with torch.device("meta"):
                model = cls._from_config(copy.deepcopy(config))
            kind.from_dict(config.to_dict())
        except Exception:  # a class may raise anything for sizes that do not match
            continue
        if sum(parameter.numel() for parameter in model.parameters()) <= _LIMIT:
            return config
    return None


def names() -> Iterator[str]:
    """Names of model classes: for each kind, one with a head and the one without."""
    seen = set()
    for kind in configuration_auto.CONFIG_MAPPING_NAMES:
        bare = modeling_auto.MODEL_MAPPING_NAMES.get(kind)
        heads = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(kind) for task in _MAPPINGS]
        for name in (next(filter(None, heads), None), bare if isinstance(bare, str) else None):
            if name is not None and name not in seen:
                seen.add(name)
                yield name


def build(name: str) -> Any:
    """A small model of the class in evaluation mode; ``None`` if it cannot be built here."""
    try:
        cls = getattr(transformers, name)
        config = small_config(cls, cls.config_class)
        if config is None:
            return None
        torch.manual_seed(0)
        return cls._from_config(config).eval()
    except Exception:  # a package is missing, or sizes do not match
        return None

"""Models of ``transformers``: straight from the file (P2), or by the library from a state dict (P1)."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from tensorizer._format.dtypes import torch_dtype
from tensorizer._load.report import LoadReport
from tensorizer.integrations._hf import device_maps
from tensorizer.integrations._hf.classes import find_config, model_class_of
from tensorizer.integrations._hf.options import LoadOptions, device_of
from tensorizer.integrations._hf.place import Place
from tensorizer.integrations._hf.straight import empty_on, fill_straight, meta_names
from tensorizer.integrations._hf.weights import Weights, find_weights

__all__ = ["dtype_of_file", "load_model"]

logger = logging.getLogger("tensorizer.integrations.huggingface")

_GENERATION = "generation_config.json"
# What the constructor takes, and P2 can pass on; whatever else was asked for is the library's to do.
_OF_CONSTRUCTION = {"attn_implementation", "experts_implementation", "max_memory", "ignore_mismatched_sizes"}


def load_model(cls: Any, place: Place, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    """A model in evaluation mode, and the loading information that the library would give."""
    config, keywords = find_config(cls, place, options)
    builder = model_class_of(cls, config, place, options)
    weights = find_weights(place, "model", options)
    model: Any = None
    if _can_go_straight(config, options, keywords):
        model, info = _straight(builder, config, weights, options, keywords)
    if model is None:
        model, info = _by_library(builder, config, weights, options, keywords)
    if hasattr(model, "can_generate") and model.can_generate():
        _set_generation_config(model, place)
    model.config.name_or_path = model.name_or_path = place.label
    return model.eval(), info


def _can_go_straight(config: Any, options: LoadOptions, keywords: dict[str, Any]) -> bool:
    quantised = options.quantization_config is not None or getattr(config, "quantization_config", None) is not None
    return not quantised and not isinstance(options.dtype, dict) and not set(keywords) - _OF_CONSTRUCTION


def _straight(
    builder: Any, config: Any, weights: Weights, options: LoadOptions, keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model by P2; ``None`` where that is not the way."""
    config = copy.deepcopy(config)
    dtype = _dtype_of(config, weights, options)
    chosen = {name: keywords[name] for name in ("attn_implementation", "experts_implementation") if name in keywords}
    with empty_on(torch.device("cpu") if options.device_map is not None else device_of(options)):
        make = builder._from_config if hasattr(builder, "_from_config") else builder.from_config
        model = make(config, dtype=dtype, **chosen)
    devices: Any = device_of(options)
    if options.device_map is not None:
        devices = device_maps.resolve(model, options.device_map, keywords.get("max_memory"), dtype)
        if not device_maps.holds_everything(devices):
            return None, {}
    report = fill_straight(model, weights, devices)
    if report is None:
        return None, {}
    left = meta_names(model)
    if left:  # buffers that the class computes when it initialises
        logger.debug("%s: %s has no data yet; the library loads it", weights.label, ", ".join(left[:5]))
        return None, {}
    if options.device_map is not None:
        device_maps.dispatch(model, devices)
    return model, _nothing_wrong()


def _dtype_of(config: Any, weights: Weights, options: LoadOptions) -> torch.dtype:
    """What ``dtype`` means, as the library has it: "auto" is the configuration's, else that of the weights."""
    dtype = options.dtype
    if dtype is None:
        return torch.get_default_dtype()
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        if dtype is None:
            dtype = dtype_of_file(weights)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: wanted a torch.dtype, its name or 'auto', found {options.dtype!r}")
    return dtype


def dtype_of_file(weights: Weights) -> torch.dtype:
    """That of its first tensor of floating-point numbers."""
    if weights.pickled:
        stored = [tensor.dtype for tensor in weights.state_dict().values()]
    else:
        with weights.open() as file:
            stored = [torch_dtype(entry.dtype) for entry in file.entries()]
    return next((one for one in stored if one.is_floating_point), torch.get_default_dtype())


def _nothing_wrong() -> dict[str, Any]:
    """``output_loading_info`` of a load that fits, in the types of the installed release."""
    import transformers

    empty: Any = set if int(transformers.__version__.split(".")[0]) >= 5 else list
    return {"missing_keys": empty(), "unexpected_keys": empty(), "mismatched_keys": empty(), "error_msgs": []}


def _by_library(
    builder: Any, config: Any, weights: Weights, options: LoadOptions, keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model by P1: the library renames, converts, quantises and places what is in a state dict."""
    builder = _concrete(builder, config)
    device_map = options.device_map
    if device_map is None and device_of(options).type != "cpu":
        device_map = {"": device_of(options)}
    passed = {
        "dtype": options.dtype,
        "device_map": device_map,
        "quantization_config": options.quantization_config,
        **keywords,
    }
    passed = {name: value for name, value in passed.items() if value is not None}
    model, info = builder.from_pretrained(
        None, config=config, state_dict=weights.state_dict(), output_loading_info=True, **passed
    )
    if options.strict:
        _check(model, info, weights, keywords)
    return model, info


def _check(model: Any, info: dict[str, Any], weights: Weights, keywords: dict[str, Any]) -> None:
    report = LoadReport(
        module=type(model).__name__,
        source=weights.label,
        missing=tuple(sorted(info.get("missing_keys", ()))),
        unexpected=tuple(sorted(info.get("unexpected_keys", ()))),
    )
    if not report.ok:
        error = report.error((), strict=True)
        error.args = (f"{error} (strict=False takes the model as it is)",)
        raise error


def _concrete(builder: Any, config: Any) -> Any:
    """The model class that an ``AutoModel...`` stands for: they take no state dict without a name."""
    if hasattr(builder, "_from_config"):
        return builder
    with torch.device("meta"):
        return type(builder.from_config(copy.deepcopy(config)))


def _set_generation_config(model: Any, place: Place) -> None:
    if not place.has(_GENERATION):
        return
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig.from_pretrained(place.fetch(_GENERATION))

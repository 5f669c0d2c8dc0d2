"""Adapters of PEFT: into models of ``peft`` and ``transformers``, and into pipelines of ``diffusers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Optional

import torch

from tensorizer._system.redaction import shown_location
from tensorizer.errors import LoadError
from tensorizer.integrations._hf.options import LoadOptions
from tensorizer.integrations._hf.place import Place
from tensorizer.integrations._hf.weights import find_weights

__all__ = ["CONFIG", "is_peft", "load_adapter_into", "load_with_base"]

CONFIG = "adapter_config.json"
_LORA_STEM = "pytorch_lora_weights"
_WRAPPER = "base_model.model."
_DENOISERS = ("unet", "transformer")


def is_peft(obj: Any) -> bool:
    """Whether an object or class is of ``peft``."""
    kind = obj if isinstance(obj, type) else type(obj)
    return any(base.__module__.partition(".")[0] == "peft" for base in kind.__mro__)


def load_with_base(
    cls: Any, place: Place, options: LoadOptions, load_base: Callable[[Any, str], Any], base: Optional[str] = None
) -> Any:
    """An adapter on the model that its configuration names.

    Args:
        cls: ``None`` or a class of ``peft``: the result is a ``PeftModel``. A class of ``transformers``: its model with
            the adapter in it.
        place: The folder of the adapter.
        options: For the adapter and the model.
        load_base: Loads a model by class and source.
        base: The model, instead of the one that is named.

    Raises:
        ValueError: None is named.
    """
    values = place.read_json(CONFIG)
    named = base or values.get("base_model_name_or_path")
    if not named:
        raise ValueError(f"{place.label}: {CONFIG} names no base model (base_model_name_or_path)")
    wraps = cls is None or is_peft(cls)
    model = load_base(None if wraps else cls, named)
    return _wrapped(model, place, options) if wraps else load_adapter_into(model, place, options, "default")


def load_adapter_into(model: Any, place: Place, options: LoadOptions, name: str) -> Any:
    """Puts an adapter into a model or pipeline, and gives that back.

    Raises:
        LoadError: Tensors of the adapter are missing or have no place.
    """
    if hasattr(model, "load_lora_weights"):
        model.load_lora_weights(_for_pipeline(model, place, options), adapter_name=name)
        return model
    if is_peft(model):
        config = _config(place)
        if name not in model.peft_config:
            model.add_adapter(name, config)
        return _filled(model, place, options, name)
    if hasattr(model, "load_adapter"):
        state = find_weights(place, "adapter_model", options).state_dict()
        model.load_adapter(peft_config=_config(place), adapter_state_dict=state, adapter_name=name)
        return model.eval()
    raise TypeError(f"wanted a model of transformers or peft or a pipeline of diffusers, found {type(model).__name__}")


def _config(place: Place) -> Any:
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(place.fetch_one(CONFIG)))
    config.inference_mode = True
    # It is shown wherever the model is; the model has been loaded from it already.
    config.base_model_name_or_path = shown_location(config.base_model_name_or_path or "") or None
    return config


def _wrapped(model: Any, place: Place, options: LoadOptions) -> Any:
    """As ``PeftModel.from_pretrained``, with tensors from our engine."""
    from peft import get_peft_model

    return _filled(get_peft_model(model, _config(place), "default"), place, options, "default")


def _filled(model: Any, place: Place, options: LoadOptions, name: str) -> Any:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    weights = find_weights(place, "adapter_model", options)
    state = weights.state_dict()
    wanted = set(get_peft_model_state_dict(model, adapter_name=name))
    result = set_peft_model_state_dict(model, state, adapter_name=name)
    missing, unexpected = sorted(wanted - set(state)), list(getattr(result, "unexpected_keys", ()))
    if options.strict and (missing or unexpected):
        raise LoadError(
            f"{weights.label}: the adapter does not fit {type(model).__name__}: missing {missing[:10]}, "
            f"unexpected {unexpected[:10]}"
        )
    return model.eval()


def _for_pipeline(pipeline: Any, place: Place, options: LoadOptions) -> Mapping[str, torch.Tensor]:
    """The tensors by the names that pipelines know: those of ``save_lora_weights``, or of one PEFT model."""
    try:
        return find_weights(place, _LORA_STEM, options).state_dict()
    except FileNotFoundError:
        state = find_weights(place, "adapter_model", options).state_dict()
    part = next((name for name in _DENOISERS if getattr(pipeline, name, None) is not None), _DENOISERS[0])
    return {f"{part}.{name.removeprefix(_WRAPPER)}": tensor for name, tensor in state.items()}

"""Models and pipelines of ``diffusers``: every model straight from its file, then handed to the pipeline."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tensorizer.errors import LoadError
from tensorizer.integrations._hf import models
from tensorizer.integrations._hf.options import LoadOptions, device_of
from tensorizer.integrations._hf.place import Place
from tensorizer.integrations._hf.straight import empty_on, fill_straight, meta_names
from tensorizer.integrations._hf.temporary import private_copy, write_safetensors
from tensorizer.integrations._hf.weights import Weights, find_weights

__all__ = ["INDEX", "load_diffusers_model", "load_pipeline"]

INDEX = "model_index.json"
_STEM = "diffusion_pytorch_model"


def load_diffusers_model(cls: Any, place: Place, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    """One model of ``diffusers``, in evaluation mode."""
    import diffusers

    _only_on_one_device(options)
    values = place.read_json("config.json")
    if values is None:
        raise FileNotFoundError(f"{place.label}: wanted config.json in it")
    if cls is None:
        name = values.get("_class_name")
        cls = options.model_class or getattr(diffusers, str(name), None)
        if cls is None:
            raise ValueError(f"{place.label}: diffusers has no class {name}; pass the class, or model_class=")
    weights = find_weights(place, _STEM, options)
    config = cls.load_config(place.fetch("config.json"))
    with empty_on(device_of(options)):
        model = cls.from_config(config)
    model = _with_dtype(model, weights, options)
    report = fill_straight(model, weights, device_of(options))
    if report is None or meta_names(model):
        model = _by_library(cls, place, weights, options)
    model.register_to_config(_name_or_path=place.label)
    return model.eval(), {}


def _only_on_one_device(options: LoadOptions) -> None:
    if options.device_map is not None:
        raise ValueError("device_map: models of diffusers are loaded to one device; wanted device=")


def _with_dtype(model: Any, weights: Weights, options: LoadOptions) -> Any:
    """The empty model in the dtype that was asked for, or in that of the file."""
    dtype = options.dtype
    if dtype == "auto" and not weights.pickled:
        dtype = models.dtype_of_file(weights)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if isinstance(dtype, torch.dtype):
        torch.nn.Module.to(model, dtype=dtype)  # parts that stay in float32 are seen to when they are filled
    return model


def _by_library(cls: Any, place: Place, weights: Weights, options: LoadOptions) -> Any:
    """P3: the library renames and converts, but takes no state dict."""
    keywords = {} if options.dtype in (None, "auto") else {"torch_dtype": options.dtype}
    with private_copy(place.fetch("config.json"), 0) as folder:
        write_safetensors(weights, folder / f"{_STEM}.safetensors", options.allow_plaintext_temp)
        model, info = cls.from_pretrained(
            folder, output_loading_info=True, low_cpu_mem_usage=False, use_safetensors=True, **keywords
        )
    left = [*info.get("missing_keys", ()), *info.get("unexpected_keys", ())]
    if options.strict and left:
        raise LoadError(f"{weights.label}: missing from it or unexpected in it: {', '.join(map(str, left[:20]))}")
    return model.to(device_of(options))


def load_pipeline(cls: Any, place: Place, options: LoadOptions) -> Any:
    """A pipeline with all its components."""
    import diffusers

    _only_on_one_device(options)
    folder = place.fetch_all()
    components = place.read_json(INDEX)
    loaded: dict[str, Any] = {}
    for name, entry in components.items():
        if name.startswith("_") or not isinstance(entry, list) or entry[:1] == [None]:
            continue
        if len(entry) != 2 or not all(isinstance(text, str) for text in entry):
            raise ValueError(f"{place.label}: {INDEX}: wanted library and class of {name!r}, found {entry!r:.200}")
        component = _load_component(name, entry, place.below(name), options)
        if component is not None:
            loaded[name] = component
    keywords = {**options.model_kwargs, **loaded}
    pipeline = (cls or diffusers.DiffusionPipeline).from_pretrained(folder, **keywords)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.to(device_of(options))
    return pipeline


def _load_component(name: str, entry: Any, place: Place, options: LoadOptions) -> Any:
    """A component that has weights; ``None`` for those that the pipeline reads itself."""
    library, class_name = entry
    plain = options.replace(model_kwargs={}, config=None, model_class=None)
    found: Any = None
    with contextlib.suppress(ImportError):
        module = __import__(library) if library in ("diffusers", "transformers") else None
        found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        return None
    if library == "diffusers":
        return load_diffusers_model(found, place, plain)[0]
    return models.load_model(found, place, plain)[0]


def stem_of(component: Any) -> str:
    """The name of the weights of a component: that of its library."""
    return _STEM if type(component).__module__.partition(".")[0] == "diffusers" else "model"

"""Models of ``sentence-transformers``, whose modules read their weights from files alone (P3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorizer.integrations._hf.options import LoadOptions, device_of
from tensorizer.integrations._hf.place import Place
from tensorizer.integrations._hf.temporary import private_copy, write_safetensors
from tensorizer.integrations._hf.weights import find_weights

__all__ = ["MODULES", "is_sentence_transformer", "load_sentence_transformer"]

MODULES = "modules.json"


def is_sentence_transformer(obj: Any) -> bool:
    """Whether an object or class is a model of ``sentence-transformers``."""
    kind = obj if isinstance(obj, type) else type(obj)
    return any(base.__module__.partition(".")[0] == "sentence_transformers" for base in kind.__mro__)


def load_sentence_transformer(cls: Any, place: Place, options: LoadOptions) -> Any:
    """A model with all its modules."""
    from sentence_transformers import SentenceTransformer

    modules = place.read_json(MODULES, list)
    with private_copy(place.fetch_all(), 0) as folder:
        for module in modules:
            if not isinstance(module, dict) or not isinstance(module.get("path"), str):
                raise ValueError(f"{place.label}: {MODULES}: wanted modules with a path, found {module!r:.200}")
            part = place.below(module["path"])
            try:
                weights = find_weights(part, "model", options)
            except FileNotFoundError:
                continue  # a module without parameters, such as pooling
            target = Path(folder, module["path"].strip("/"), "model.safetensors")
            write_safetensors(weights, target, options.allow_plaintext_temp)
        keywords = dict(options.model_kwargs)
        if options.dtype not in (None, "auto"):
            keywords["model_kwargs"] = {**keywords.get("model_kwargs", {}), "torch_dtype": options.dtype}
        model = (cls or SentenceTransformer)(
            str(folder), device=str(device_of(options)), local_files_only=True, **keywords
        )
    return model.eval()

"""Which class a folder of ``transformers`` is for, found without running code from it."""

from __future__ import annotations

import copy
from typing import Any

from tensorizer.integrations._hf.options import LoadOptions
from tensorizer.integrations._hf.place import Place

__all__ = ["find_config", "model_class_of"]

_CONFIG = "config.json"


def find_config(cls: Any, place: Place, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the keywords that are none of its members.

    Args:
        cls: The class that was asked for, or ``None``.
        place: The folder.
        options: ``config`` is taken as it is, if there is one; ``model_kwargs`` that name members override them.

    Raises:
        ValueError: The configuration belongs to code in the repository.
        FileNotFoundError: There is no ``config.json``.
    """
    from transformers import AutoConfig

    keywords = dict(options.model_kwargs)
    if options.config is not None:
        config = copy.deepcopy(options.config)
        for name in [name for name in keywords if hasattr(config, name)]:
            if name != "attn_implementation":
                setattr(config, name, keywords.pop(name))
        return config, keywords
    values = place.read_json(_CONFIG)
    if values is None:
        raise FileNotFoundError(f"{place.label}: wanted {_CONFIG} in it")
    own = getattr(cls, "config_class", None) or getattr(options.model_class, "config_class", None)
    if own is None and "auto_map" in values and not _is_native(values):
        raise ValueError(
            f"{place.label}: its classes are code in the repository ({values['auto_map']}), which is never run; import "
            "the class yourself and pass it as model_class="
        )
    source = own or AutoConfig
    folder = place.fetch(_CONFIG)
    config, rest = source.from_pretrained(folder, return_unused_kwargs=True, **keywords, **_no_code(source))
    return config, rest


def _no_code(source: Any) -> dict[str, Any]:
    """Said to AutoConfig, which would ask on the terminal otherwise; other classes would keep it as a member."""
    return {"trust_remote_code": False} if hasattr(source, "for_model") else {}


def _is_native(values: dict[str, Any]) -> bool:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    named = values.get("architectures") or []
    return values.get("model_type") in CONFIG_MAPPING and (not named or hasattr(transformers, named[0]))


def model_class_of(cls: Any, config: Any, place: Place, options: LoadOptions) -> Any:
    """The class, or ``AutoModel...`` class, that builds the model.

    Raises:
        ValueError: The configuration names no class of the library; the message says how to name one.
    """
    import transformers

    if options.model_class is not None:
        return options.model_class
    if cls is not None:
        return cls
    for name in getattr(config, "architectures", None) or []:
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    named = getattr(config, "architectures", None)
    raise ValueError(
        f"{place.label}: its configuration names {', '.join(named) if named else 'no class'}, which transformers "
        f"{transformers.__version__} does not have; pass the class, as the first argument or as model_class="
    )

"""What kind of object a folder holds, and who loads it."""

from __future__ import annotations

from typing import Any, Callable, Optional

from tensorizer.integrations._hf import adapters, models, pipelines, sentences
from tensorizer.integrations._hf.options import LoadOptions
from tensorizer.integrations._hf.place import Place

__all__ = ["load_object"]


def load_object(
    cls: Any, place: Place, options: LoadOptions, load_base: Callable[[Any, str], Any]
) -> tuple[Any, Optional[dict[str, Any]]]:
    """The object of a folder, by the files in it, and the loading information of ``transformers`` models.

    Raises:
        FileNotFoundError: None of the files that say what it is.
    """
    if place.has(pipelines.INDEX):
        return pipelines.load_pipeline(cls, place, options), None
    if place.has(sentences.MODULES) and (cls is None or sentences.is_sentence_transformer(cls)):
        return sentences.load_sentence_transformer(cls, place, options), None
    if place.has(adapters.CONFIG) and not place.has("config.json"):
        return adapters.load_with_base(cls, place, options, load_base), None
    values = place.read_json("config.json")
    if values is None and options.config is None:
        raise FileNotFoundError(
            f"{place.label}: wanted config.json, {adapters.CONFIG}, {pipelines.INDEX} or {sentences.MODULES} in it, "
            "found none of them"
        )
    if values is not None and "_class_name" in values:
        return pipelines.load_diffusers_model(cls, place, options)[0], None
    return models.load_model(cls, place, options)

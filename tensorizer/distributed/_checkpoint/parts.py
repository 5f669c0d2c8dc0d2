"""Takes apart tensors that are made of other tensors, such as those of quantising libraries, and rebuilds them.

Their classes do the work: ``__tensor_flatten__`` returns the names of the inner tensors and a context, and
``__tensor_unflatten__`` makes a tensor from both. The save stores the context as text, and the load compares it with
the context of the target tensor. It imports nothing for that: the text holds classes and enumerations as names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from tensorizer._format.payloads import dense_nbytes, has_own_data, stored_dtype
from tensorizer.distributed._checkpoint.json_values import NotSimple, Place, decoded, encoded
from tensorizer.errors import FormatError, UnsupportedContentError


class Part(NamedTuple):
    """One inner tensor of a tensor, or of an inner tensor of it."""

    path: str
    """The attributes that lead to it, with dots."""
    tensor: torch.Tensor


def about_name(name: str) -> str:
    """The name of the record that holds the text of :func:`take_apart`, if it is encrypted or long."""
    return f"{name}.__tensor_flatten__"


def is_made_of_parts(tensor: Any) -> bool:
    """Whether a tensor has no memory of its own, and its class can flatten it to other tensors.

    This is false for the result of a collective that may still run, because waiting for it gives a plain tensor.
    """
    kind = type(tensor)
    return (
        hasattr(kind, "__tensor_flatten__")
        and not hasattr(kind, "trigger_wait")
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not has_own_data(tensor)
    )


def take_apart(name: str, tensor: torch.Tensor) -> tuple[str, list[Part]]:
    """The JSON text for classes and contexts of a tensor, and the plain tensors that it is made of.

    Raises:
        UnsupportedContentError: A context has values other than simple ones, enumerations and dataclasses of them.
        NotImplementedError: The format cannot hold an inner tensor.
    """
    parts: list[Part] = []
    node = _node(name, tensor, "", parts, {})
    if not parts:
        raise UnsupportedContentError(f"tensor {name!r:.200}: a {_name_of(type(tensor))} without tensors in it")
    for part in parts:
        stored_dtype(f"{name}.{part.path}", part.tensor)
    return json.dumps(node, separators=(",", ":")), parts


def same_parts(name: str, text: Any, paths: Sequence[str], tensor: torch.Tensor) -> Optional[list[Part]]:
    """The inner tensors of a tensor that has the classes and contexts of `text`; ``None`` if a context differs.

    Raises:
        UnsupportedContentError: The tensor has another class.
        FormatError: :func:`take_apart` does not write such a text, or not for parts with these paths.
    """
    parts: list[Part] = []
    wanted = _parsed(name, text)
    if list(_paths(name, wanted, "")) != list(paths):
        raise FormatError(f"tensor {name!r:.200}: expected its parts, got {list(paths)!r:.200}")
    found = _node(name, tensor, "", parts, {}) if is_made_of_parts(tensor) else None
    _check_class(name, wanted, tensor)
    return parts if found == wanted else None


def put_together(name: str, text: Any, like: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
    """Makes a tensor of the classes of `like` from these inner tensors, in the order of :func:`take_apart`. Call
    :func:`same_parts` first.

    Raises:
        UnsupportedContentError: Its classes, or values of its context that are stored as names, differ from `like`.
    """
    return _built(name, _parsed(name, text), like, iter(tensors))


@contextlib.contextmanager
def unsupported(name: str, tensor: torch.Tensor) -> Iterator[None]:
    """A block that calls methods of a tensor class. Their errors become ``UnsupportedContentError``."""
    try:
        yield
    except Exception as error:  # classes of other libraries may raise anything
        raise UnsupportedContentError(
            f"tensor {name!r:.200}: a {_name_of(type(tensor))} cannot take what was saved, whose parts differ: {error}"
        ) from error


def _parsed(name: str, text: Any) -> dict[str, Any]:
    try:
        node = json.loads(text)
    except (ValueError, RecursionError):
        node = None
    if not isinstance(node, dict):
        raise FormatError(f"tensor {name!r:.200}: expected what is known of a tensor of parts, got {text!r:.80}")
    return node


def _paths(name: str, node: Mapping[str, Any], above: str) -> Iterator[str]:
    """The paths of the inner tensors in a text. Raises ``FormatError`` for another text."""
    try:
        tensors = [(str(attribute), inner) for attribute, inner in node["tensors"]]
        is_known = isinstance(node["class"], str) and "context" in node and dense_nbytes(node["shape"], 1) is not None
    except (ValueError, TypeError, KeyError):
        is_known, tensors = False, []
    if not is_known or not {type(inner) for _, inner in tensors} <= {dict, type(None)}:
        raise FormatError(f"tensor {name!r:.200}: expected what is known of its parts, got {node!r:.80}")
    for attribute, inner in tensors:
        path = f"{above}.{attribute}" if above else attribute
        yield from [path] if inner is None else _paths(name, inner, path)


def _node(name: str, tensor: Any, path: str, parts: list[Part], named: dict[str, Any]) -> dict[str, Any]:
    """The JSON node of a tensor. Adds its inner tensors to `parts`, and values that are stored as names to `named`."""
    attributes, context = tensor.__tensor_flatten__()
    tensors: list[list[Any]] = []
    for attribute in attributes:
        inner = getattr(tensor, attribute)
        below = f"{path}.{attribute}" if path else attribute
        if is_made_of_parts(inner):
            tensors.append([attribute, _node(name, inner, below, parts, named)])
        else:
            tensors.append([attribute, None])
            parts.append(Part(below, inner.detach()))
    try:
        known = encoded(context, lambda value, _: _leaf(value, named))
    except (NotSimple, RecursionError) as error:
        raise UnsupportedContentError(
            f"tensor {name!r:.200}: what {_name_of(type(tensor))} says of itself besides its tensors cannot be stored: "
            f"{error}"
        ) from None
    return {"class": _name_of(type(tensor)), "shape": list(tensor.shape), "context": known, "tensors": tensors}


def _leaf(value: Any, named: dict[str, Any]) -> Any:
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).rpartition(".")[2]}
    if isinstance(value, torch.device):
        node: Any = {"device": None}  # the value of the target tensor
    elif isinstance(value, enum.Enum):
        node = {"enum": [_name_of(type(value)), value.name]}
    elif isinstance(value, type):
        node = {"class": _name_of(value)}
    elif dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        node = {"fields": [_name_of(type(value)), encoded(fields, lambda inner, _: _leaf(inner, named))]}
    else:
        raise NotSimple(f"got a value of type {type(value).__name__}")
    named[json.dumps(node)] = value
    return node


def _built(name: str, node: Mapping[str, Any], like: Any, tensors: Iterator[torch.Tensor]) -> Any:
    _check_class(name, node, like)
    inner = {}
    for attribute, below in node["tensors"]:
        of_like = getattr(like, attribute, None)
        inner[attribute] = next(tensors) if below is None else _built(name, below, of_like, tensors)
    named: dict[str, Any] = {}
    _node(name, like, "", [], named)

    def leaf(content: Any, _: Place) -> Any:
        ((kind, value),) = content.items()
        if kind == "size":
            return torch.Size(value)
        return getattr(torch, value) if kind == "torch" else named[json.dumps(content)]

    try:
        context = decoded(node["context"], leaf)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnsupportedContentError(
            f"tensor {name!r:.200}: was saved with another {node['class']:.200} than the one it is loaded into: {error}"
        ) from None
    shape = torch.Size(node["shape"])
    stride = torch.empty(shape, device="meta").stride()
    return type(like).__tensor_unflatten__(inner, context, shape, stride)


def _check_class(name: str, node: Mapping[str, Any], tensor: Any) -> None:
    if node["class"] != _name_of(type(tensor)):
        raise UnsupportedContentError(
            f"tensor {name!r:.200}: was saved as the parts of a {node['class']:.200}; "
            f"expected one to load it into, got a {_name_of(type(tensor))}"
        )


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

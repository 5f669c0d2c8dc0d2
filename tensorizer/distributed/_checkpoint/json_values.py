"""Stores leaves that are numbers, texts or containers of them as JSON, so that they need no pickle.

JSON has fewer types than Python. So containers and other values that JSON lacks become objects with one member, whose
name is the kind: ``t`` tuple, ``d`` dict and ``o`` OrderedDict (lists of pairs), ``b`` bytes (Base64), ``s`` a stream
of bytes in memory (its Base64 and its position), ``n`` a scalar of numpy (its dtype and Base64), ``f`` NaN or an
infinite float, ``i`` an integer of more than 64 bits (hexadecimal), ``x`` a value that the caller encodes.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import functools
import io
import json
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, Optional, Union

import numpy as np
import torch

from tensorizer._system.redaction import torch_refusal
from tensorizer.errors import FormatError

_MAX_JSON_INT = 1 << 63
#: The dtypes of numbers, as numpy writes them. Other texts are refused, because numpy parses some as Python code.
NUMPY_NUMBER = r"[<>|][biufc]\d{1,2}"

#: The keys and positions that lead to a value.
Place = tuple[Any, ...]


class NotSimple(TypeError):
    """JSON cannot hold a value. The error has the keys that lead to it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason, self.path = reason, ""

    def below(self, key: Any) -> NotSimple:
        """The same error, seen from the container that has the value under `key`."""
        self.path = f"[{key!r:.100}]{self.path}"
        return self

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


def to_json(value: Any) -> Optional[str]:
    """Encodes a value as text; ``None`` if it contains a value that is not of a simple type."""
    try:
        return json.dumps(encoded(value), separators=(",", ":"), allow_nan=False)
    except (NotSimple, RecursionError):
        return None


def from_json(text: Union[str, bytes], leaf: Optional[Callable[[Any, Place], Any]] = None) -> Any:
    """Decodes a text of :func:`to_json`; `leaf` as for :func:`decoded`.

    Raises:
        FormatError: :func:`to_json` does not write such a text.
    """
    try:
        return decoded(json.loads(text), leaf)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(f"expected a value in JSON, got {text!r:.80} ({error})") from None


def encoded(value: Any, leaf: Optional[Callable[[Any, Place], Any]] = None, place: Place = ()) -> Any:
    """Encodes a value with the types of JSON; :func:`decoded` decodes it.

    Args:
        value: Any value.
        leaf: Called with a value of another type and its place; returns a value that JSON can hold.
        place: The keys and positions that lead to the value.

    Raises:
        NotSimple: The value contains another type, and there is no `leaf`.
        RecursionError: It contains itself, or is nested hundreds of times.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_MAX_JSON_INT <= value < _MAX_JSON_INT else {"i": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if kind is bytes:
        return {"b": base64.b64encode(value).decode()}
    if kind is io.BytesIO:
        return {"s": [base64.b64encode(value.getbuffer()).decode(), value.tell()]}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"n": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if kind in (list, tuple):
        items = [_encoded_below(i, item, leaf, place) for i, item in enumerate(value)]
        return items if kind is list else {"t": items}
    if kind in (dict, collections.OrderedDict):
        pairs = [
            [_encoded_below(key, key, leaf, place), _encoded_below(key, item, leaf, place)]
            for key, item in value.items()
        ]
        return {"d" if kind is dict else "o": pairs}
    if leaf is None:
        raise NotSimple(f"expected numbers, texts, bytes and containers of them, got {kind.__name__}")
    return {"x": leaf(value, place)}


def _encoded_below(key: Any, value: Any, leaf: Optional[Callable[[Any, Place], Any]], place: Place) -> Any:
    try:
        return encoded(value, leaf, (*place, key))
    except NotSimple as error:
        raise error.below(key) from None


def decoded(node: Any, leaf: Optional[Callable[[Any, Place], Any]] = None, place: Place = ()) -> Any:
    """Decodes a node of :func:`encoded`. For values of other types, it calls `leaf` with the node and its place.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, OverflowError: :func:`encoded` returns no such node.
    """
    if isinstance(node, list):
        return [decoded(item, leaf, (*place, i)) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "t":
        return tuple(decoded(item, leaf, (*place, i)) for i, item in enumerate(content))
    if kind in ("d", "o"):
        keys = [decoded(key, leaf, place) for key, _ in content]
        pairs = [(key, decoded(item, leaf, (*place, key))) for key, (_, item) in zip(keys, content)]
        return dict(pairs) if kind == "d" else collections.OrderedDict(pairs)
    if kind == "b":
        return base64.b64decode(content, validate=True)
    if kind == "s":
        stream = io.BytesIO(base64.b64decode(content[0], validate=True))
        stream.seek(content[1])
        return stream
    if kind == "n":
        if not re.fullmatch(NUMPY_NUMBER, content[0]):
            raise ValueError(f"expected the dtype of a number, got {content[0]!r:.50}")
        return np.frombuffer(base64.b64decode(content[1], validate=True), np.dtype(content[0]))[0]
    if kind == "f":
        return float(content)
    if kind == "i":
        return int(content, 16)
    if kind == "x" and leaf is not None:
        return leaf(content, place)
    raise ValueError(f"unknown kind {kind!r}")


def load_harmless(data: io.BytesIO, map_location: Any = "cpu") -> Any:
    """``torch.load(weights_only=True)`` with :func:`harmless_types`."""
    with harmless_types():
        return torch.load(data, map_location=map_location, weights_only=True)


def harmless_types() -> contextlib.AbstractContextManager[Any]:
    """A block in which ``weights_only=True`` also accepts streams in memory, and numpy's scalars and arrays of numbers.

    Making them runs no code of the file. The block has no effect before torch 2.5.
    """
    allow: Any = getattr(torch.serialization, "safe_globals", None)
    return contextlib.nullcontext() if allow is None else allow([io.BytesIO, *_numpy_numbers()])


@functools.lru_cache(1)
def _numpy_numbers() -> list[Any]:
    """The names in pickles of numpy's scalars and arrays of numbers. Arrays of objects name another dtype."""
    scalar, array = np.int64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDG"}
    return [scalar, array, bytes, np.ndarray, np.dtype, *dtypes]


def torch_saved(value: Any) -> io.BytesIO:
    """Encodes a value with ``torch.save``, as torch's planners expect it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def load_vetted(name: str, data: io.BytesIO, trusting: str = "allow_pickle=True") -> Any:
    """Loads a value from bytes of ``torch.save``. The loader calls no function that the bytes name.

    Args:
        name: Name of the leaf, for the error.
        data: The bytes.
        trusting: The argument with which the caller can load it anyway, for the error.

    Raises:
        pickle.UnpicklingError: The bytes hold more than tensors and simple values, or cannot be read.
    """
    try:
        return load_harmless(data)
    except Exception as error:
        raise pickle.UnpicklingError(
            f"{name!r} was refused by torch.load(weights_only=True); with {trusting} its pickle would be "
            f"executed, which is only for checkpoints from trusted sources: {torch_refusal(error)}"
        ) from error

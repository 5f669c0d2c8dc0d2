"""The check of ``stream_options=``, the same whatever is opened: a name that nobody knows is a mistake everywhere."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Optional

from tensorizer._io.options import HTTPOptions

__all__ = ["check_stream_options"]


def check_stream_options(options: Optional[Mapping[str, Any]]) -> None:
    """Refuses what is no keyword of :func:`tensorizer.stream_io.open_stream`.

    Raises:
        TypeError: Not a mapping, or an unknown name; the message has the name that was probably meant.
    """
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(f"stream_options: wanted a mapping of keywords, found {type(options).__name__}")
    if not options:
        return
    from tensorizer import stream_io

    parameters = inspect.signature(stream_io.open_stream).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # a program has put a function of its own there
    known = [name for name in parameters if name not in ("path_uri", "mode")]
    for name in options:
        if name not in known:
            raise TypeError(f"stream_options: unknown keyword {name!r}; {_instead_of(str(name), known)}")


def _instead_of(name: str, known: list[str]) -> str:
    if name in {field.name for field in dataclasses.fields(HTTPOptions)}:
        return f"it is a field of HTTPOptions: write {{'http_options': HTTPOptions({name}=...)}}"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"wanted some of {', '.join(known)}"

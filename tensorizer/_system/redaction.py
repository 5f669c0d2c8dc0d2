"""What messages leave out: secrets, the parts of URLs that may hold some, and advice of other libraries."""

from __future__ import annotations

import os
import pickle
import re
from typing import Any, Optional

__all__ = ["hidden", "shown_location", "shown_uri", "torch_refusal", "without_secrets"]

# In these schemes the text before the at sign names a container, and no user.
_CONTAINER_SCHEMES = ("az", "abfs", "abfss")
_LOGIN = r"(?<=://)[^/\s\"'@]*@"
# No host: what follows its colon is no port. The slash belongs to a password in which it should have been written %2F.
_SLASH_IN_LOGIN = re.compile(r"[^/@\[\]]*:(?!\d*/)[^/@]*/.*@")


class HiddenText(str):
    """Text that ``repr`` does not show, and so no tool that records local variables."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<hidden>"


def hidden(text: Optional[str]) -> Optional[str]:
    """The same text, for use and not for show; ``None`` and what is no text stay what they are."""
    return HiddenText(text) if type(text) is str and text else text


def shown_uri(uri: str) -> str:
    """A URI for messages: without credentials, without query (which may be a signature) and fragment. Paths stay."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    first, *further = rest.split("?", 1)[0].split("#", 1)[0].split("://")  # of chained schemes
    if scheme.rpartition("::")[2].lower() not in _CONTAINER_SCHEMES:
        first = _without_login(first)
    return "://".join([scheme, first, *map(_without_login, further)])


def _without_login(place: str) -> str:
    if _SLASH_IN_LOGIN.match(place):
        return place.rpartition("@")[2]
    authority, slash, path = place.partition("/")
    return authority.rpartition("@")[2] + slash + path


def shown_location(location: Any) -> str:
    """A path, a URI or an open file, for messages."""
    if isinstance(location, (bytes, os.PathLike)):
        return os.fsdecode(location)
    if isinstance(location, str):
        return shown_uri(location)
    name = getattr(location, "name", None)
    return name if isinstance(name, str) else f"<{type(location).__name__}>"


def without_secrets(text: str) -> str:
    """Somebody else's message: the URLs in it lose their credentials and queries."""
    return re.sub(_LOGIN, "", re.sub(r"\?[^\s\"']*", "", text))


def torch_refusal(error: Exception) -> str:
    """Why ``torch.load(weights_only=True)`` refused: without its advice, which is to load the file all the same."""
    inner = error.__context__  # torch wraps what its unpickler raised in the advice
    reason = inner if isinstance(inner, pickle.UnpicklingError) else error
    return str(reason).strip().partition("\n")[0].partition(" Please use ")[0] or type(error).__name__

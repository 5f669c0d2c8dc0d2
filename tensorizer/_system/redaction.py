"""Removes from messages: secrets, the parts of URLs that may contain them, and advice of other libraries."""

from __future__ import annotations

import os
import pickle
import re
from typing import Any

#: In these schemes, the text before the at sign names a container, not a user.
CONTAINER_SCHEMES = ("az", "abfs", "abfss")
_LOGIN = r"(?<=://)[^/\s\"'@]*@"
# In these, a user and a password may stand before the host. An unescaped password may contain further at signs.
_LOGIN_SCHEMES = ("dav", "davs", "ftp", "http", "https", "redis", "rediss", "sftp", "smb", "ssh", "webdav")


def shown_uri(uri: str) -> str:
    """A URI for messages, without credentials, query (which may be a signature) and fragment. Paths stay whole, as do
    keys of S3, in which ``?`` and ``#`` are ordinary characters."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    shown = scheme
    while separator:  # the paths of chained schemes contain further URIs
        scheme = re.split("[:/]", scheme)[-1].lower()
        place, separator, further = rest.partition("://")
        if re.search("[?#]", place):  # the further URI is part of a query
            place, separator = rest, ""
        place = _cut(place, scheme)
        authority, slash, path = place.partition("/")
        if scheme not in CONTAINER_SCHEMES:
            authority = authority.rpartition("@")[2]
        shown += f"://{authority}{slash}{path}"
        scheme, rest = place, further
    return shown


def _cut(rest: str, scheme: str) -> str:
    """Cuts query, fragment and login off the text after a scheme, also if a character of the login was not escaped."""
    if scheme == "s3":  # its keys may contain either character, and its URIs have no queries with secrets
        return rest
    cut = re.split("[?#]", rest, maxsplit=1)[0]
    authority = cut.partition("/")[0]
    host, colon, port = authority.rpartition(":")
    is_port = (host != "" and port.isdecimal()) or port.endswith("]")
    if scheme not in _LOGIN_SCHEMES or not colon or "@" in authority or is_port:
        return cut
    if "@" in cut:
        return cut.rpartition("@")[2]
    if "@" in rest:
        return re.split("[?#]", rest.partition("@")[2], maxsplit=1)[0]
    return host + cut[len(authority) :]  # a login whose host is missing


def shown_location(location: Any) -> str:
    """A path, a URI or an open file, for messages."""
    if isinstance(location, (bytes, os.PathLike)):
        return os.fsdecode(location)
    if isinstance(location, str):
        return shown_uri(location)
    name = getattr(location, "name", None)
    return name if isinstance(name, str) else f"<{type(location).__name__}>"


def without_secrets(text: str) -> str:
    """Removes credentials and queries from the URLs in another library's message."""
    return re.sub(_LOGIN, "", re.sub(r"\?[^\s\"']*", "", text))


def torch_refusal(error: Exception) -> str:
    """Why ``torch.load(weights_only=True)`` refused, without torch's advice to load the file anyway."""
    inner = error.__context__  # torch wraps what its unpickler raised in the advice
    reason = inner if isinstance(inner, pickle.UnpicklingError) else error
    return str(reason).strip().partition("\n")[0].partition(" Please use ")[0] or type(error).__name__

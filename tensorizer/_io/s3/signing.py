"""Presigned requests: their URLs, and the headers that were signed with them."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tensorizer._system.redaction import hidden

__all__ = ["SignedRequest", "presign"]

# The request that botocore is about to sign in this thread.
_signing = threading.local()


class SignedRequest(NamedTuple):
    """What has to be sent as it is. Shows nothing of it."""

    url: str
    headers: dict[str, str]

    def __repr__(self) -> str:
        return "SignedRequest(<hidden>)"


def presign(client: Any, method: str, params: dict[str, Any], seconds: int) -> SignedRequest:
    """Signs one request.

    Args:
        client: A boto3 client.
        method: Its method, ``"get_object"`` for example.
        params: The method's parameters. Some become part of the URL, others headers.
        seconds: For which the URL is good.

    Raises:
        botocore.exceptions.BotoCoreError: No credentials, a parameter that is missing or has another type.
    """
    _signing.headers = {}
    events = getattr(client.meta, "events", None)
    if events is not None:
        events.register("before-sign.s3", _remember, unique_id="tensorizer-presign")
    url = hidden(client.generate_presigned_url(method, Params=params, ExpiresIn=seconds))
    assert url is not None
    headers, _signing.headers = _signing.headers, {}
    return SignedRequest(url, {name: value for name, value in headers.items() if _is_sent(name, url)})


def _remember(request: Any, **_: Any) -> None:
    _signing.headers = {
        name.lower(): value.decode() if isinstance(value, bytes) else str(value)
        for name, value in request.headers.items()
    }


def _is_sent(name: str, url: str) -> bool:
    """Whether the header goes with the request, or is part of the URL already (signatures of version 2)."""
    query = parse_qs(urlsplit(url).query)
    if "X-Amz-SignedHeaders" in query:
        return name != "host" and name in query["X-Amz-SignedHeaders"][0].split(";")
    return "Signature" not in query and name not in ("host", "user-agent", "date", "expect", "content-length")

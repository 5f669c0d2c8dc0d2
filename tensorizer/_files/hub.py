"""What the Hugging Face hub says about a file: its digest."""

from __future__ import annotations

import re

from tensorizer._system.redaction import shown_uri
from tensorizer.errors import FormatError

__all__ = ["sha256_of_hub_file"]

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def sha256_of_hub_file(uri: str) -> str:
    """The SHA-256 that the hub states for a large file (it is the file's ETag there).

    Args:
        uri: ``hf://org/name[@revision]/path``.

    Raises:
        ValueError: Another URI.
        FormatError: The hub states none, as for small files that it keeps in git.
        ImportError: The package ``huggingface_hub`` is not installed.
    """
    match = re.fullmatch(r"hf://(?:models/)?([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", uri)
    if match is None:
        raise ValueError(f"wanted hf://org/name[@revision]/path, found {shown_uri(uri)}")
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(match[1], match[3], revision=match[2])
    etag = huggingface_hub.get_hf_file_metadata(url).etag or ""
    if not _SHA256.match(etag):
        raise FormatError(f"{shown_uri(uri)}: the hub states no SHA-256 for it")
    return etag

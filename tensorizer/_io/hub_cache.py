"""Repositories in the cache of ``huggingface_hub``, for when its hub cannot be asked.

Importing this module does not import ``huggingface_hub``.
"""

from __future__ import annotations

import builtins
import re
import urllib.parse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Optional, cast

from tensorizer._io.uri import local_path
from tensorizer._system.redaction import shown_location, shown_uri, without_secrets
from tensorizer.errors import StreamNotFoundError

_PART = r"[A-Za-z0-9][\w.-]*"
_FILE = re.compile(rf"(?i:hf)://(?:models/)?((?!(?:datasets|spaces|buckets)/){_PART}/{_PART})(?:@([^/]+))?/(.+)\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")

# What HTTP clients call the errors of requests that got no answer: httpx, requests.
_NO_ANSWER = {"TransportError", "ConnectionError", "Timeout", "OfflineModeIsEnabled"}

_warned: set[str] = set()  # repositories


def is_offline() -> bool:
    """Whether the hub may not be asked (``HF_HUB_OFFLINE``)."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return bool(constants.HF_HUB_OFFLINE)


def snapshot(repo: str, revision: Optional[str]) -> Optional[Path]:
    """The folder with those files of a commit that are in the cache; ``None`` where none are.

    Args:
        repo: ``org/name``.
        revision: Branch, tag or commit; ``None`` is the main branch.
    """
    from huggingface_hub import constants

    wanted = constants.DEFAULT_REVISION if revision is None else revision
    if {"", ".", ".."} & set(wanted.split("/")):
        return None
    base = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    reference = base / "refs" / wanted
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
    folder = base / "snapshots" / commit
    return folder if folder.is_dir() else None


def stated_sha256(location: Any) -> Optional[str]:
    """The SHA-256 that the hub states for a large file (its ETag there); ``None`` where it states none.

    A large file in the cache is a link to one whose name is its SHA-256, as the hub stated it when it was fetched.

    Args:
        location: A path in the cache, ``hf://org/name[@revision]/path``, or the address of a file of the hub.

    Raises:
        ValueError: It is not from the hub.
        ImportError: The package ``huggingface_hub`` is not installed.
    """
    path, stated = local_path(location), None
    if path is not None:
        blob = Path(path).resolve()
        if blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--"):
            stated = blob.name
    else:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        found = _FILE.match(location)
        address = location if location.startswith(f"{constants.ENDPOINT}/") else None
        if found is not None:
            revision = None if found[2] is None else urllib.parse.unquote(found[2])
            address = hf_hub_url(found[1], found[3], revision=revision)
        if address is not None:
            stated = get_hf_file_metadata(address).etag or ""
    if stated is None:
        raise ValueError(
            f"{shown_location(location)}: expected a file of the hub or of its cache, since the hub is asked for its "
            "SHA-256, got another one"
        )
    return stated if _SHA256.match(stated) else None


def is_down(error: Optional[BaseException]) -> bool:
    """Whether the hub gave no answer, or one of 5xx: what an error, or one behind it, says."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status >= 500
        if isinstance(error, (builtins.ConnectionError, TimeoutError)):
            return True
        if _NO_ANSWER & {base.__name__ for base in type(error).__mro__}:
            return True
        error = error.__cause__ or error.__context__
    return False


def warn_of(repo: str, error: BaseException, stacklevel: int) -> None:
    """Says that files of the cache are used."""
    reason = without_secrets(" ".join(str(error).split()))[:200] or type(error).__name__
    warnings.warn(
        f"{repo}: the hub cannot be reached, so the files in its cache are used as they are ({reason})",
        stacklevel=stacklevel + 1,
    )


def open_file(uri: str, open_it: Callable[[], BinaryIO]) -> BinaryIO:
    """A file of the hub for reading: by `open_it`, or from the cache where the hub must not or cannot be asked.

    Raises:
        StreamNotFoundError: The hub must not be asked, or cannot, and the file is not in the cache.
        OSError: What `open_it` raises.
    """
    match = _FILE.match(uri)
    if match is None:
        return open_it()
    repo, revision, name = match[1], match[2], match[3]
    revision = None if revision is None else revision.replace("%2F", "/").replace("%2f", "/")
    reason: Optional[BaseException] = None
    if not is_offline():
        try:
            return open_it()
        except Exception as error:
            if not is_down(error) or snapshot(repo, revision) is None:
                raise
            reason = error
    folder = snapshot(repo, revision)
    path = None if folder is None or {"", ".", ".."} & set(name.split("/")) else folder / name
    if path is None or not path.is_file():
        why = "may not be asked (HF_HUB_OFFLINE)" if reason is None else "cannot be reached"
        raise StreamNotFoundError(f"{shown_uri(uri)}: not in the cache of the hub, and the hub {why}") from None
    if reason is not None and repo not in _warned:
        _warned.add(repo)
        warn_of(repo, reason, 5)
    return cast(BinaryIO, builtins.open(path, "rb"))

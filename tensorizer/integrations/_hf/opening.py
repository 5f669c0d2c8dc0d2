"""From what a caller named to the place that it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from tensorizer._io.uri import LOCAL_SCHEMES, path_of_file_uri, scheme_of
from tensorizer._system.redaction import shown_location
from tensorizer.integrations._hf import hub
from tensorizer.integrations._hf.place import LocalPlace, Place, RemotePlace

__all__ = ["open_place"]


def _names_weights(name: str) -> bool:
    """Whether a name is that of a file of tensors, which then stands for the folder that it is in."""
    return name.endswith((".tensors", ".safetensors"))


@contextlib.contextmanager
def open_place(
    source: Any,
    *,
    revision: Optional[str],
    cache: bool,
    local_files_only: bool,
    token: Any,
    stream_options: Optional[Mapping[str, Any]],
) -> Iterator[Place]:
    """The folder that a caller named, or that holds the file named.

    It is a path, a URI, ``hf://org/name[@revision]`` or a hub id.

    Raises:
        FileNotFoundError: No such folder or repository.
        ValueError: A source of another kind; a revision for what is not on the hub.
    """
    place: Place
    scheme = scheme_of(source)
    if scheme is None or scheme in LOCAL_SCHEMES:
        folder = Path(os.path.expanduser(source if scheme is None else path_of_file_uri(source)))
        if folder.is_dir():
            place = LocalPlace(folder)
        elif _names_weights(folder.name) and folder.is_file():
            place = LocalPlace(folder.parent)
            place.file = folder.name
        elif isinstance(source, str) and not folder.exists() and hub.is_repo_id(source):
            place = hub.open_repo(source, revision, "", cache, local_files_only, token)
        else:
            found = "a file" if folder.exists() else "nothing"
            wanted = "a folder, a .tensors or .safetensors file, a URI or the id of a hub repository"
            raise FileNotFoundError(f"{shown_location(source)}: wanted {wanted}, found {found}")
    elif scheme == "hf":
        repo, named, inside = hub.parse_uri(source)
        if named and revision and named != revision:
            raise ValueError(f"{shown_location(source)}: the URI names revision {named!r}, the argument {revision!r}")
        place = hub.open_repo(repo, named or revision, inside, cache, local_files_only, token)
    elif _names_weights(source) and "?" not in source:
        prefix, _, name = source.rpartition("/")
        place = RemotePlace(prefix, stream_options)
        place.file = name
    else:
        place = RemotePlace(source, stream_options)
    if revision is not None and not place.has_revision:
        place.close()
        raise ValueError(f"revision: only repositories of the hub have one, found {revision!r} for {place.label}")
    try:
        yield place
    finally:
        place.close()

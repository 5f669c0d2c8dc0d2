"""Checkpoint folders among the sources of commands: what tells one, and who reads it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Optional

from tensorizer._io.model_files import exists
from tensorizer._io.uri import folder_uri, local_path, scheme_of

_MARKERS = (".metadata", "__0.metadata")  # of all ranks; of the first one that saved without the others


def is_checkpoint(source: Any, stream_options: Optional[Mapping[str, Any]] = None) -> bool:
    """Whether a local path or an ``s3://`` prefix is a folder of ``torch.distributed.checkpoint``, with its marker."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    path = local_path(source)
    if path is not None:
        return any(os.path.isfile(os.path.join(path, name)) for name in _MARKERS)
    if scheme_of(source) != "s3" or os.fspath(source).endswith((".tensors", ".safetensors", ".json")):
        return False
    return any(exists(f"{folder_uri(os.fspath(source))}/{name}", stream_options) for name in _MARKERS)


def reader() -> Any:
    """The module that reads checkpoints as files are read. It is above this folder and needs torch, so it is imported
    by its name when a checkpoint was found."""
    return importlib.import_module("tensorizer.distributed._checkpoint.as_file")

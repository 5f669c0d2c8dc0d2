"""What an earlier save of a model left in another form: one file where there are shards now, or the other way round."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from tensorizer._files.copy import exists
from tensorizer._format import shards

__all__ = ["older_forms", "remove_forms"]


def older_forms(target: Any, files: Sequence[Any], stream_options: Optional[Mapping[str, Any]] = None) -> list[str]:
    """Files that readers of the same model could take instead of those that are written.

    Args:
        target: The name of the model: of its single file.
        files: What is written under this name; the index among it where there are several.
        stream_options: Keywords for opening a URI.

    Returns:
        Of a local folder all files of the model but `files`. Of a bucket, which need not let itself be listed, the one
        name that a reader tries: shards that no index names are not read. Nothing for targets of other kinds.
    """
    if not isinstance(target, (str, os.PathLike)):
        return []
    path = os.fspath(target)
    if "://" in path:
        return _in_bucket(path, files, stream_options) if path.startswith("s3://") else []
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        return []
    of_model = shards.names_of_model(name, os.listdir(folder))
    written = {os.path.basename(file) for file in files if isinstance(file, (str, os.PathLike))}
    return [os.path.join(folder, other) for other in of_model if other not in written]


def _in_bucket(path: str, files: Sequence[Any], stream_options: Optional[Mapping[str, Any]]) -> list[str]:
    other = shards.index_name(path) if len(files) == 1 else path
    try:
        return [other] if exists(other, stream_options) else []
    except PermissionError:  # as stores answer for names that are not there, if the keys may not list
        return []


def remove_forms(paths: Sequence[str], stream_options: Optional[Mapping[str, Any]] = None) -> None:
    """Removes files that :func:`older_forms` has found.

    Raises:
        OSError: The file system or store refused.
    """
    for path in paths:
        if path.startswith("s3://"):
            from tensorizer import stream_io

            folder, _, name = path.rpartition("/")
            stream_io._s3_prefix(folder, **(stream_options or {})).delete([name])
        else:
            os.unlink(path)

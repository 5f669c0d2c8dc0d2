"""What lies beside the tensors of a model: configuration, tokenizer, licence."""

from __future__ import annotations

import os
import posixpath
from typing import Any

from tensorizer._files.copy import check_target
from tensorizer._files.write import WriteOptions
from tensorizer._system.redaction import shown_location

__all__ = ["copies_beside"]

# Of models in any format, and of the indexes of their shards.
_MODELS = (".safetensors", ".tensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_INDEXES = tuple(f"{ending}.index" for ending in _MODELS)


def copies_beside(source: Any, target: Any, options: WriteOptions) -> list[tuple[str, str]]:
    """The files in the folder of a local source that hold no tensors, each with its name in the folder of the target.

    Hidden files and folders are left out.

    Raises:
        StreamExistsError: One exists at the target, without ``force``.
        ValueError: The source is not a local path, or the target no path or URI.
    """
    for name, value in (("source", source), ("target", target)):
        if not isinstance(value, (str, os.PathLike)) or (name == "source" and "://" in os.fspath(value)):
            raise ValueError(
                f"all_files: wanted a local path as source and a path or URI as target, found {shown_location(value)!r}"
            )
    path, place = os.path.abspath(os.fspath(source)), os.fspath(target)
    folder = posixpath.dirname(place) if "://" in place else os.path.dirname(os.path.abspath(place))
    with os.scandir(path if os.path.isdir(path) else os.path.dirname(path)) as entries:
        found = sorted(entry.path for entry in entries if entry.is_file() and not _is_left_out(entry.name))
    pairs = [(file, f"{folder}/{os.path.basename(file)}") for file in found]
    pairs = [(file, copy) for file, copy in pairs if os.path.realpath(file) != os.path.realpath(copy)]
    for _, copy in pairs:
        check_target(copy, options.force, options.stream_options)
    return pairs


def _is_left_out(name: str) -> bool:
    signed = name.removesuffix(".sig")  # a signature is of that one file
    return name.startswith(".") or signed.endswith(_MODELS) or any(index in name for index in _INDEXES)

"""Files as they are: copies between any two places, what lies beside a model, and what stands in the way there."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensorizer import _C
from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.model_files import belongs_to_weights, exists
from tensorizer._io.sinks import WholeFile
from tensorizer._io.sources import OpenedSource, open_source
from tensorizer._io.uri import local_path, scheme_of, signature_place
from tensorizer._system.redaction import shown_location
from tensorizer.errors import StreamExistsError, UnsupportedContentError

if TYPE_CHECKING:
    from tensorizer._load.digests import Verification
    from tensorizer._load.open_file import OpenFile

logger = logging.getLogger("tensorizer.serialization")


def check_target(target: Any, force: bool, options: CallOptions = PLAIN) -> None:
    """Raises :class:`StreamExistsError` for a target that exists, unless `force`."""
    if not force and exists(target, options):
        raise StreamExistsError(f"{shown_location(target)} exists (force replaces it)")


def copy_file(source: Any, target: Any, options: CallOptions = PLAIN) -> None:
    """Copies a file between two paths or URIs; the target appears when it is complete.

    Raises:
        OSError: It cannot be read or written.
    """
    opened = open_source(source, options)
    with contextlib.closing(opened), WholeFile(target, options) as file:
        file.copy_from(opened.source)


def has_signature_beside(source: Any) -> bool:
    """Whether a local file has detached signatures (``.sig``)."""
    return local_path(source) is not None and os.path.isfile(local_path(signature_place(source)) or "")


# --- read once -------------------------------------------------------------------------------------------------------


def open_once(source: Any, options: CallOptions, verify: Verification) -> OpenFile:
    """Opens a file as :func:`open_whole`, for a caller that does not read it in its order.

    Where a server knows no ranges, the file is copied to a temporary file without a name first. If the temporary folder
    has no room for it, it is read as it is. The reads of a copy in the cache of the node need none.
    """
    from tensorizer._load.open_file import WHOLE, file_of
    from tensorizer._load.open_index import open_files

    opened = open_files(source, options)
    try:
        if isinstance(opened, OpenedSource) and _lacks_ranges(opened):
            opened = _spooled(opened)
    except BaseException:
        opened.close()
        raise
    return file_of(opened, options, WHOLE.verifying(verify)._replace(allow_missing_hashes=not verify.stored))


def _lacks_ranges(opened: OpenedSource) -> bool:
    return isinstance(opened.source, _C.HttpSource) and " 200" in opened.source.response_status_line


def _spooled(opened: OpenedSource) -> OpenedSource:
    """The bytes of a source in a temporary file; itself if there is no room."""
    nbytes = opened.source.size()
    with tempfile.TemporaryFile() as file:
        if nbytes is not None and nbytes > shutil.disk_usage(tempfile.gettempdir()).free:
            return opened
        sink = _C.FileSink.overwrite(file.fileno(), opened.name)
        sink.copy_from(opened.source)
        sink.finish()
        source = _C.FileSource(file.fileno(), opened.name)
    opened.close()
    return opened._replace(source=source, close=source.close)


# --- beside the tensors of a model ----------------------------------------------------------------------------------


def copies_beside(source: Any, target: Any, force: bool, options: CallOptions = PLAIN) -> list[tuple[str, str]]:
    """The files in the folder of a local source that hold no tensors, each with its name in the folder of the target.

    Hidden files and folders are left out.

    Raises:
        StreamExistsError: One exists at the target, without ``force``.
        UnsupportedContentError: The model is quantised by torchao.
        ValueError: The source is not a local path, or the target no path or URI.
    """
    for name, value in (("source", source), ("target", target)):
        if not isinstance(value, (str, os.PathLike)) or (name == "source" and "://" in os.fspath(value)):
            raise ValueError(
                f"all_files: expected a local path as source and a path or URI as target, got {shown_location(value)!r}"
            )
    path, place = os.path.abspath(os.fspath(source)), os.fspath(target)
    folder = place.rpartition("/")[0] if "://" in place else os.path.dirname(os.path.abspath(place))
    beside = path if os.path.isdir(path) else os.path.dirname(path)
    with os.scandir(beside) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    kept = [name for name in names if not (name.startswith(".") or belongs_to_weights(name))]
    found = [os.path.join(beside, name) for name in kept]
    _refuse_layouts_in_headers(found)
    pairs = [(file, f"{folder}/{os.path.basename(file)}") for file in found]
    pairs = [(file, copy) for file, copy in pairs if os.path.realpath(file) != os.path.realpath(copy)]
    for _, copy in pairs:
        check_target(copy, force, options)
    return pairs


def _refuse_layouts_in_headers(files: Sequence[str]) -> None:
    """Refuses a model of which the library finds the layout of its tensors only in the headers of its own files."""
    config = next((file for file in files if os.path.basename(file) == "config.json"), None)
    if config is None:
        return
    from tensorizer._io.model_files import is_quantised_by_torchao

    values: Any = None
    with open(config, "rb") as stream, contextlib.suppress(ValueError):
        values = json.load(stream)
    if is_quantised_by_torchao(values):
        raise UnsupportedContentError(
            f"{config}: torchao, which has quantised this model, keeps the layout of its tensors in the headers of its "
            ".safetensors files, so the library loads only a plain copy of the folder"
        )


def remove_files(paths: Sequence[str], options: CallOptions = PLAIN) -> None:
    """Removes files that :func:`other_forms` has found.

    Raises:
        OSError: The file system or store refused.
    """
    for path in paths:
        if scheme_of(path) == "s3":
            from tensorizer._io.s3.objects import S3Prefix

            folder, _, name = path.rpartition("/")
            S3Prefix(folder, options).delete([name])
        elif scheme_of(path) is not None:
            from tensorizer._io import fsspec

            fsspec.remove(path)
        else:
            os.unlink(path)

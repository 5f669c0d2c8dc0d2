"""Which files of a folder are a model: their names, and how they are found.

Every function that takes a folder or a prefix asks :func:`find_model`. Where names cannot be listed, the usual ones are
tried; :func:`absence` says which answers of a store count. The names of shards and of their index are those of
docs/format.md, "Shards".
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.sources import open_source
from tensorizer._io.uri import folder_uri, local_path, scheme_of
from tensorizer._system.redaction import shown_location
from tensorizer.errors import MAY_BE_FORBIDDEN, is_absent, is_denied

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger("tensorizer.serialization")

#: The formats of files of tensors, in the order in which readers try them.
FORMATS = ("safetensors", "tensors")
# Endings of what torch.save writes.
_PICKLED_ENDINGS = (".bin", ".pt", ".pth")
#: Endings of models in any format.
MODEL_ENDINGS = (".tensors", ".safetensors", *_PICKLED_ENDINGS, ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
# Of files. Other names may be folders, whatever dots they have: Qwen2.5-7B.
_FILE_ENDINGS = (*MODEL_ENDINGS, ".json", ".sig")
_PICKLED_INDEX = ".bin.index.json"
_PICKLED_STEMS = {"model": "pytorch_model"}  # the others are called the same in every format

# Patterns are compiled when they are first used: each takes as long as importing a small module.
# "model.safetensors.index.json", with a variant before or behind "index".
_INDEX_NAME = r"\.(safetensors|tensors)(\.[^./]+)?\.index(\.[^./]+)?\.json\Z"
_FILE_NAME = r"\.(safetensors|tensors)\Z"

# Requests to one store at the same time.
_ASKED_TOGETHER = 64

Found = TypeVar("Found")


# --- finding them -----------------------------------------------------------------------------------------------------


def usual_names(
    stem: str = "model", variant: Optional[str] = None, formats: Sequence[str] = FORMATS
) -> tuple[str, ...]:
    """The names of files and indexes under which libraries keep a model, in the order in which they are tried.

    Args:
        stem: ``model``, ``adapter_model``, ``diffusion_pytorch_model`` and others.
        variant: A word in the names, as in ``model.fp16.safetensors``.
        formats: Endings without their dot.
    """
    names: list[str] = []
    for format in formats:
        if variant is None:
            names += [f"{stem}.{format}.index.json", f"{stem}.{format}"]
        else:
            names += [
                f"{stem}.{format}.index.{variant}.json",
                f"{stem}.{variant}.{format}.index.json",
                f"{stem}.{format}.{variant}.index.json",
                f"{stem}.{variant}.{format}",
            ]
    return tuple(names)


def find_model(
    those_of: Callable[[Sequence[str]], Collection[str]],
    stem: str = "model",
    variant: Optional[str] = None,
    listing: Optional[Collection[str]] = None,
) -> list[str]:
    """The files and indexes of a folder that are a model; several are forms of one, or :mod:`tensorizer._io.forms`
    refuses them.

    Args:
        those_of: Which of some names are in the folder.
        stem: As for :func:`usual_names`.
        variant: As for :func:`usual_names`.
        listing: All names in the folder, if files under other names are the model where no usual name is there.
    """
    names = usual_names(stem, variant)
    there = those_of(names)
    found = [name for name in names if name in there]
    if found or listing is None:
        return found
    files = sorted(name for name in listing if re.search(_FILE_NAME, name))
    indexes = sorted(filter(is_index_name, listing))
    if not indexes:
        return files
    stems = {form_stem(name) for name in indexes}  # files of other stems are shards
    return indexes + [name for name in files if form_stem(name) in stems]


def find_pickled(
    those_of: Callable[[Sequence[str]], Collection[str]], stem: str = "model", variant: Optional[str] = None
) -> Optional[str]:
    """The file or index of a folder that ``torch.save`` wrote, under the usual names; ``None`` where there is none."""
    names = usual_names(_PICKLED_STEMS.get(stem, stem), variant, ("bin",))
    there = those_of(names)
    return next((name for name in reversed(names) if name in there), None)


def only_pickled(listing: Collection[str]) -> Optional[str]:
    """The file or index of pickled weights in a folder of which these are all names; ``None`` where there are several,
    or files of tensors beside it."""
    if any(re.search(_FILE_NAME, name) for name in listing):
        return None
    found = [name for name in listing if name.endswith(_PICKLED_INDEX)] or list(filter(is_pickled_name, listing))
    return found[0] if len(found) == 1 else None


def exists(location: Any, options: CallOptions = PLAIN) -> bool:
    """Whether something is at a path or URI, as far as the credentials may see: see :func:`absence`."""
    if not isinstance(location, str) or "://" not in location:
        return os.path.lexists(location)
    error = absence(location, options)
    if error is not None and is_denied(error):
        logger.info("%s is taken for a name that is not there: %s", shown_location(location), MAY_BE_FORBIDDEN)
    return error is None


def absence(uri: str, options: CallOptions = PLAIN) -> Optional[OSError]:
    """The error that says that no file is at a URI; ``None`` if one is there.

    Status 403 counts as one: stores give it to those who may read files and not list them, for every name that is not
    there.

    Raises:
        OSError: The store did not answer, or rejected the credentials.
    """
    try:
        open_source(uri, options).close()
    except OSError as error:
        if not is_absent(error):
            raise
        return error
    return None


def each_at_once(function: Callable[[str], Found], names: Sequence[str], place: str) -> list[Found]:
    """What a function gives for each name below a place; where every answer takes a round trip, at the same time."""
    if len(names) < 2 or not answers_together(place):
        return list(map(function, names))
    with asking(len(names)) as ask:
        return [answer.result() for answer in [ask(function, name) for name in names]]


def answers_together(place: str) -> bool:
    """Whether several threads may ask a store, of which each answer costs a round trip."""
    if local_path(place) is not None:
        return False
    if scheme_of(place) in ("http", "https", "s3"):
        return True
    from tensorizer._io import fsspec

    return fsspec.allows_threads(place)


@contextlib.contextmanager
def asking(count: int) -> Iterator[Callable[..., Future[Any]]]:
    """Calls functions on threads; after an error, none is begun."""
    from concurrent.futures import ThreadPoolExecutor  # not for local files

    with ThreadPoolExecutor(min(count, _ASKED_TOGETHER), "tensorizer-open") as pool:
        try:
            yield pool.submit
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_MARKERS = (".metadata", "__0.metadata")  # of all ranks; of the first one that saved without the others


def is_checkpoint(source: Any, options: CallOptions = PLAIN) -> bool:
    """Whether a local path or an ``s3://`` prefix is a folder of ``torch.distributed.checkpoint``, with its marker."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    path = local_path(source)
    if path is not None:
        return any(os.path.isfile(os.path.join(path, name)) for name in _MARKERS)
    if scheme_of(source) != "s3" or not may_be_folder(os.fspath(source)):
        return False
    return any(exists(f"{folder_uri(os.fspath(source))}/{name}", options) for name in _MARKERS)


# --- their names ------------------------------------------------------------------------------------------------------


def may_be_folder(name: str) -> bool:
    """Whether a name, whose dots say little, may be that of a folder: it has no ending that files have."""
    return not name.endswith(_FILE_ENDINGS)


def is_tensors_name(name: str) -> bool:
    """Whether a name is that of a file of tensors."""
    return re.search(_FILE_NAME, name) is not None


def is_pickled_name(name: str) -> bool:
    """Whether a name is that of a file of ``torch.save``."""
    return name.endswith(_PICKLED_ENDINGS)


def is_pickled_index(name: str) -> bool:
    """Whether a name is that of an index of files of ``torch.save``."""
    return name.endswith(_PICKLED_INDEX)


def is_weight(name: str) -> bool:
    """Whether a file holds weights, in whatever format."""
    return name.endswith(MODEL_ENDINGS)


def belongs_to_weights(name: str) -> bool:
    """Whether a file holds weights, or is the index or the signature of such files."""
    return is_weight(name.removesuffix(".sig")) or any(f"{ending}.index" in name for ending in MODEL_ENDINGS)


def index_format(name: str) -> Optional[str]:
    """``"safetensors"`` or ``"tensors"`` for the name of an index of such files; else ``None``."""
    found = re.search(_INDEX_NAME, name.rpartition("/")[2])
    return None if found is None else found[1]


def is_index_name(name: str) -> bool:
    """Whether a name is that of an index, which no file of tensors may have: it would be read as one."""
    return index_format(name) is not None


def index_name(name: str) -> str:
    """The index that belongs to a name: ``model.safetensors.index.json``."""
    return f"{name}.index.json"


def form_stem(name: str) -> Optional[str]:
    """The part of a name that the forms of one model have in common, with its variant: ``model.fp16`` for
    ``model.fp16.tensors`` and ``model.safetensors.index.fp16.json``; ``None`` for the name of another file."""
    found = re.search(_INDEX_NAME, name)
    if found is not None:
        return name[: found.start()] + (found[2] or found[3] or "")
    found = re.search(_FILE_NAME, name)
    return None if found is None else name[: found.start()]


def shard_names(name: str, count: int) -> list[str]:
    """``model.safetensors`` for one, ``model-00001-of-00002.safetensors`` and so on for more."""
    if count == 1:
        return [name]
    stem, extension = os.path.splitext(name)
    return [f"{stem}-{number:05}-of-{count:05}{extension}" for number in range(1, count + 1)]


def names_of_model(name: str, among: Iterable[str]) -> list[str]:
    """Those of `among` that are a model of that name: its file, its index, its shards in whatever number."""
    stem, extension = os.path.splitext(name)
    shard = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(extension)}\Z")
    return sorted(other for other in among if other in (name, index_name(name)) or shard.match(other))


# --- what lies beside a model that is written ------------------------------------------------------------------------


def other_forms(target: Any, files: Sequence[Any], options: CallOptions = PLAIN) -> list[str]:
    """Files that readers of the same model could take instead of those that are written.

    Args:
        target: The name of the model: of its single file.
        files: What is written under this name; the index among it where there are several.
        options: For opening a URI.

    Returns:
        Of a local folder all files of the model but `files`. Of a store, which need not let itself be listed, the one
        name that a reader tries: shards that no index names are not read. Nothing for open files.
    """
    if not isinstance(target, (str, os.PathLike)):
        return []
    path = local_path(target)
    if path is None:
        if scheme_of(target) in ("http", "https", "redis", "rediss"):  # opening these for writing says what is wrong
            return []
        uri = os.fspath(target)
        other = index_name(uri) if len(files) == 1 else uri
        return [other] if exists(other, options) else []
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        return []
    of_model = names_of_model(name, os.listdir(folder))
    written = {os.path.basename(local_path(file) or "") for file in files if isinstance(file, (str, os.PathLike))}
    return [os.path.join(folder, other) for other in of_model if other not in written]


def other_format_beside(target: Any, options: CallOptions = PLAIN) -> list[str]:
    """Names of files and indexes that hold, in the folder of a file, the same model in the other format."""
    path = local_path(target)
    folder, name = os.path.split(os.fspath(target) if path is None else os.path.abspath(path))
    ending = ".tensors" if name.endswith(".safetensors") else ".safetensors"
    if path is not None:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        return sorted(other for other in names if ending in other and form_stem(other) == form_stem(name))
    single = f"{form_stem(name)}{ending}"
    return [other for other in (single, index_name(single)) if exists(f"{folder}/{other}", options)]


def is_quantised_by_torchao(config: Any) -> bool:
    """Whether the configuration of a model, an object or the content of its file, says that torchao quantised it."""
    quantised = (config if isinstance(config, Mapping) else getattr(config, "__dict__", {})).get("quantization_config")
    method = (
        quantised.get("quant_method") if isinstance(quantised, Mapping) else getattr(quantised, "quant_method", None)
    )
    return str(getattr(method, "value", method)) == "torchao"

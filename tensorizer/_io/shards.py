"""Files that share one set of tensors: their names, sizes and index (docs/format.md, "Shards"), and opening them.

A folder, an index file, or the URI of either stands for its shards (docs/safetensors.md).
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional, Union

from tensorizer import _C
from tensorizer._io.sources import OpenedSource, is_path, open_source, read_checked
from tensorizer._io.uri import folder_uri, local_path, scheme_of, split_query
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import parse_size
from tensorizer.errors import FormatError, StreamIsADirectoryError, StreamNotFoundError, named

# Tried in this order where a folder cannot be listed, and preferred where it can.
TRIED_NAMES = ("model.safetensors.index.json", "model.safetensors", "model.tensors.index.json", "model.tensors")
MAX_INDEX_NBYTES = 100_000_000

# Patterns are compiled when they are first used: each takes as long as importing a small module.
# "model.safetensors.index.json", with a variant before or behind "index".
_INDEX_NAME = r"\.(safetensors|tensors)(\.[^./]+)?\.index(\.[^./]+)?\.json\Z"
_SHARD_NAME = r"\.(safetensors|tensors)\Z"
_NO_PREFIX_SCHEMES = ("redis", "rediss")  # keys are no paths there
_HUB_MODEL = r"(?i)hf://(?:models/)?[^/]+/[^/]+/?\Z"  # a whole repository, whatever dots it has


class OpenedShards(NamedTuple):
    """The files of one sharded model, all of them open."""

    name: str  # of the index, for messages
    weight_map: dict[str, str]  # tensor to file
    metadata: dict[str, str]  # of the index
    files: dict[str, OpenedSource]  # in the order in which the map names them
    location: Any  # the path or URI of the index
    stream: Any = None

    @property
    def locations(self) -> list[Any]:
        """The paths or URIs of what is open, the index first."""
        return [self.location, *(opened.location for opened in self.files.values())]

    def close(self) -> None:
        for opened in self.files.values():
            opened.close()


OpenedFiles = Union[OpenedSource, OpenedShards]


def open_files(file_obj: Any, stream_options: Optional[Mapping[str, Any]] = None) -> OpenedFiles:
    """Opens what ``TensorDeserializer`` was given: one file, or the shards that a folder or an index stands for.

    Raises:
        OSError: A file cannot be opened; :class:`StreamNotFoundError` names a shard that is missing.
        FormatError: An index that is none, or that names files it must not.
        ValueError, TypeError: As :func:`tensorizer._io.sources.open_source`.
    """
    if not is_path(file_obj) or isinstance(file_obj, int):
        return open_source(file_obj, stream_options)
    folder = _ModelFolder.of(file_obj, stream_options)
    if folder is None:
        return open_source(file_obj, stream_options)
    return folder.open()


class _ModelFolder(NamedTuple):
    """A folder or URI prefix, and the name in it that was asked for, if any."""

    folder: str
    name: Optional[str]
    remote: bool
    stream_options: Optional[Mapping[str, Any]]
    asked_for: Any  # as given, to be opened as a file after all

    @classmethod
    def of(cls, file_obj: Any, stream_options: Optional[Mapping[str, Any]]) -> Optional[_ModelFolder]:
        """``None`` for what can only be a single file."""
        scheme = scheme_of(file_obj)
        path = local_path(file_obj)
        if path is not None:
            if os.path.isdir(path):
                return cls(path, None, False, stream_options, file_obj)
            folder, name = os.path.split(path)
            return cls(folder, name, False, stream_options, file_obj) if re.search(_INDEX_NAME, name) else None
        bare, behind = split_query(file_obj)
        if re.match(_HUB_MODEL, bare):
            return cls(bare.rstrip("/"), None, True, stream_options, f"{bare.rstrip('/')}/")
        folder, _, name = bare.rpartition("/")
        if re.search(_INDEX_NAME, name):
            return cls(folder, name, True, stream_options, file_obj)
        is_bucket = scheme == "s3" and "/" not in bare.partition("://")[2]
        if scheme not in _NO_PREFIX_SCHEMES and not behind and ("." not in name or is_bucket):
            # A name without an extension may be a file's; what ends with a slash is none.
            return cls(folder_uri(bare), None, True, stream_options, f"{bare}/" if is_bucket else file_obj)
        return None

    def open(self) -> OpenedFiles:
        if self.name is not None:
            return self.open_shards(self.name)
        return self._open_prefix() if self.remote else self._open_folder()

    def _open_folder(self) -> OpenedFiles:
        names = os.listdir(self.folder)
        indexes = [name for name in names if re.search(_INDEX_NAME, name)]
        files = [name for name in names if re.search(_SHARD_NAME, name)]
        for name in TRIED_NAMES:
            if name in indexes:
                single = name[: -len(".index.json")]
                if single in files:
                    raise FormatError(
                        f"{self.folder}: found both {single} and {name}, two forms of one model: name the one that is "
                        "meant, or remove the other"
                    )
                return self.open_shards(name)
            if name in files:
                return self.open_file(name)
        for found, open_it in ((indexes, self.open_shards), (files, self.open_file)):
            if len(found) == 1:
                return open_it(found[0])
            if found:
                raise FormatError(
                    f"{self.folder}: wanted one index or one model file, found {', '.join(sorted(found))[:300]}"
                )
        found_text = "none" if names else "an empty folder"
        raise StreamIsADirectoryError(
            errno.EISDIR,
            f"a folder: wanted a .safetensors or .tensors file, or an index of some, in it, found {found_text}",
            self.folder,
        )

    def _open_prefix(self) -> OpenedFiles:
        first: Optional[OSError] = None
        if not self.asked_for.endswith("/"):
            try:
                return open_source(self.asked_for, self.stream_options)
            except (StreamNotFoundError, StreamIsADirectoryError) as error:  # some file systems of fsspec have folders
                first = error
        for name in TRIED_NAMES:
            is_index = name.endswith(".json")
            try:
                if not is_index:
                    return self.open_file(name)
                index = self._read_index(name)
            except StreamNotFoundError as error:
                if not is_index:
                    first = first or error
                continue
            return self._open_files_of(index)  # a shard that is missing does not mean another form of the model
        assert first is not None
        raise first

    # ---- one name below the place -----------------------------------------------------------------------------------

    def join(self, name: str) -> str:
        if not self.remote:
            return os.path.join(self.folder, name)
        quoted = urllib.parse.quote(name) if scheme_of(self.folder) in ("http", "https") else name
        return f"{self.folder}/{quoted}"

    def open_file(self, name: str) -> OpenedSource:
        return open_source(self.join(name), self.stream_options)

    def open_shards(self, name: str) -> OpenedShards:
        """The shards of an index."""
        return self._open_files_of(self._read_index(name))

    def _read_index(self, name: str) -> OpenedShards:
        """What an index says, with no file open yet."""
        shown = shown_location(self.join(name))

        def parsed(text: bytes) -> tuple[dict[str, str], dict[str, str]]:
            weight_map, metadata = named(shown, _C.parse_shard_index, text)
            if not weight_map:
                raise FormatError(f"{shown}: its weight_map names no tensor")
            return weight_map, metadata

        where = self.asked_for if name == self.name else self.join(name)  # with its query
        weight_map, metadata = read_checked(where, self.stream_options, parsed, MAX_INDEX_NBYTES)
        return OpenedShards(shown, weight_map, metadata, {}, where)

    def _open_files_of(self, shards: OpenedShards) -> OpenedShards:
        wanted = re.search(_INDEX_NAME, shards.name)
        assert wanted is not None
        try:
            for file in dict.fromkeys(shards.weight_map.values()):
                self._check_file_name(shards.name, file, wanted.group(1))
                try:
                    shards.files[file] = self.open_file(file)
                except FileNotFoundError as error:
                    raise StreamNotFoundError(f"{shards.name}: its shard {file!r:.200} is missing ({error})") from None
        except BaseException:
            shards.close()
            raise
        return shards

    def _check_file_name(self, index: str, file: str, extension: str) -> None:
        parts = re.split(r"[/\\]", file)
        drive = re.match(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]*://", file)
        if drive or "\0" in file or "\\" in file or {"", ".", ".."} & set(parts):
            raise FormatError(f"{index}: wanted the name of a file in its folder, found {file!r:.200}")
        if not file.endswith("." + extension):
            raise FormatError(f"{index}: wanted .{extension} files, found {file!r:.200}")
        if not self.remote and not _is_inside(self.folder, self.join(file)):
            raise FormatError(f"{index}: {file!r:.200} is a link to a place outside of the folder")


def _is_inside(folder: str, path: str) -> bool:
    """Whether a path stays below the folder once links are resolved, or leads to the blobs of a hub cache."""
    root, target = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([root, target]) == root:
        return True
    # .../models--NAME/snapshots/REVISION/... links to .../models--NAME/blobs/DIGEST
    parts = root.split(os.sep)
    if "snapshots" not in parts:
        return False
    at = len(parts) - 1 - parts[::-1].index("snapshots")
    blobs = posixpath.join(os.sep.join(parts[:at]), "blobs")
    return os.path.dirname(target) == blobs


# --- their names, and the index --------------------------------------------------------------------------------------


def nbytes_of(size: Union[str, int]) -> int:
    """Bytes of a size like ``"5GB"``: ``GB`` is decimal, as ``huggingface_hub`` counts; fractions are allowed.

    Raises:
        ValueError: No such size, or none above 0.
    """
    try:
        nbytes = parse_size("max_shard_size", size)
    except (TypeError, ValueError):
        nbytes = 0
    if nbytes < 1:
        raise ValueError(f"max_shard_size: wanted bytes, or a text like '5GB' or '500MB', found {size!r}")
    return nbytes


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


def is_index_name(name: str) -> bool:
    """Whether a name is that of an index, which no file of tensors may have: it would be read as one."""
    return re.search(_INDEX_NAME, name.rpartition("/")[2]) is not None


def index_name(name: str) -> str:
    """The index that belongs to a name: ``model.safetensors.index.json``."""
    return f"{name}.index.json"


def index_bytes(files: Mapping[str, str], total_size: int, metadata: Mapping[str, Any]) -> bytes:
    """The index of shards.

    Args:
        files: From the name of each tensor to its file.
        total_size: Bytes of all tensors, shared ones counted once.
        metadata: Further texts.
    """
    content = {"metadata": {**metadata, "total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(content, indent=2, sort_keys=False, ensure_ascii=False) + "\n").encode()

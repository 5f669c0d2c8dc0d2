"""Files that share one set of tensors: their sizes and their index (docs/format.md, "Shards"), and opening them.

A folder, an index file, or the URI of either stands for its shards (docs/safetensors.md).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import re
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar, Union, cast

from tensorizer import _C
from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.model_files import (
    answers_together,
    asking,
    each_at_once,
    find_model,
    form_stem,
    index_format,
    is_index_name,
    may_be_folder,
    usual_names,
)
from tensorizer._io.sources import (
    OpenedSource,
    close_between_reads,
    files_at_once,
    is_one_file,
    open_source,
    read_checked,
)
from tensorizer._io.uri import folder_uri, local_path, scheme_of, split_query, split_uri
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import parse_size
from tensorizer.errors import (
    MAY_BE_FORBIDDEN,
    FormatError,
    StreamError,
    StreamIsADirectoryError,
    StreamNotFoundError,
    is_absent,
    is_denied,
    named,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

MAX_INDEX_NBYTES = 100_000_000

#: Under which name the metadata of a file say what it was made from (:mod:`tensorizer._io.forms`).
ORIGIN_KEY = "tensorizer.made_from"
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

    def __repr__(self) -> str:
        """Without the secrets of URIs."""
        return f"OpenedShards({self.name!r}, {len(self.files)} files)"

    @property
    def locations(self) -> list[Any]:
        """The paths or URIs of what is open, the index first."""
        return [self.location, *(opened.location for opened in self.files.values())]

    def close(self) -> None:
        for opened in self.files.values():
            opened.close()


OpenedFiles = Union[OpenedSource, OpenedShards]
Found = TypeVar("Found")

#: From a folder for messages, the names of several sets of weights in it, and what makes a path or URI of a name, to
#: the one that is read; it raises ``FormatError`` where that cannot be told.
Choose = Callable[[str, Sequence[str], Callable[[str], Any]], str]


def open_files(file_obj: Any, options: CallOptions, choose: Choose) -> OpenedFiles:
    """Opens what ``TensorDeserializer`` was given: one file, or the shards that a folder or an index stands for.

    Args:
        file_obj: The file, folder or index.
        options: For opening URIs.
        choose: Asked where a folder has several sets of weights.

    Raises:
        OSError: A file cannot be opened; :class:`StreamNotFoundError` names a shard that is missing.
        FormatError: The index is damaged, or names files it must not; several sets of weights.
        ValueError, TypeError: As :func:`tensorizer._io.sources.open_source`.
    """
    if is_one_file(file_obj):
        return open_source(file_obj, options)
    folder = _ModelFolder.of(file_obj, options)
    if folder is None:
        return open_source(file_obj, options)
    return folder.open(choose)


class _ModelFolder(NamedTuple):
    """A folder or URI prefix, and the name in it that was asked for, if any."""

    folder: str
    name: Optional[str]
    remote: bool
    options: CallOptions
    asked_for: Any  # as given, to be opened as a file after all

    def __repr__(self) -> str:
        """Without the options, which may hold passwords."""
        return f"_ModelFolder({shown_location(self.folder)!r}, {self.name!r})"

    @classmethod
    def of(cls, file_obj: Any, options: CallOptions) -> Optional[_ModelFolder]:
        """``None`` for what can only be a single file."""
        scheme = scheme_of(file_obj)
        path = local_path(file_obj)
        if path is not None:
            if os.path.isdir(path):
                return cls(path, None, False, options, file_obj)
            folder, name = os.path.split(path)
            is_index = name.endswith(".json") and is_index_name(name)  # benchmarks.walks
            return cls(folder, name, False, options, file_obj) if is_index else None
        bare, behind = split_query(file_obj)
        if re.match(_HUB_MODEL, bare):
            return cls(bare.rstrip("/"), None, True, options, f"{bare.rstrip('/')}/")
        folder, _, name = bare.rpartition("/")
        if is_index_name(name):
            return cls(folder, name, True, options, file_obj)
        is_bucket = scheme == "s3" and not bare.endswith("/") and not split_uri(bare).path
        if scheme not in _NO_PREFIX_SCHEMES and not behind and (is_bucket or may_be_folder(name)):
            # A name without such an ending may be a file's; a slash at its end says that it is a folder's.
            return cls(folder_uri(bare), None, True, options, f"{bare}/" if is_bucket else file_obj)
        return None

    def open(self, choose: Choose) -> OpenedFiles:
        if self.name is not None:
            return self.open_shards(self.name)
        return self._open_prefix(choose) if self.remote else self._open_folder(choose)

    def _open_folder(self, choose: Choose) -> OpenedFiles:
        names = os.listdir(self.folder)
        forms = find_model(lambda _: names, listing=names)
        if len({form_stem(name) for name in forms}) > 1:
            raise FormatError(f"{self.folder}: expected one index or one model file, got {', '.join(forms)[:300]}")
        if not forms:
            other = next((name for name in sorted(names) if name.endswith(".gguf")), None)
            found_text = "none" if names else "an empty folder"
            if other is not None:
                found_text = f"GGUF, which is not read here: {other}"
            raise StreamIsADirectoryError(
                errno.EISDIR,
                f"a folder: expected a .safetensors or .tensors file, or an index of some, in it, got {found_text}",
                self.folder,
            )
        return self._open_form(self._chosen(forms, choose))

    def _open_prefix(self, choose: Choose) -> OpenedFiles:
        first: Optional[OSError] = None
        if not self.asked_for.endswith("/"):
            try:
                return open_source(self.asked_for, self.options)
            except OSError as error:
                if not (is_absent(error) or isinstance(error, StreamIsADirectoryError)):  # fsspec may have folders
                    raise
                first = error
        found: dict[str, OpenedFiles] = {}
        absent: list[OSError] = []
        forms = find_model(lambda names: self._probe(names, found, absent))
        if len(forms) > 1:
            for opened in found.values():
                opened.close()
            try:
                return self._open_form(self._chosen(forms, choose))
            except FormatError:
                for index in found.values():
                    if isinstance(index, OpenedShards):
                        self._open_files_of(index).close()  # half an upload is told by the shard that is missing
                raise
        for opened in found.values():
            # A shard that is missing does not mean another form of the model.
            return self._open_files_of(opened) if isinstance(opened, OpenedShards) else opened
        denied = next((error for error in (first, *absent) if error is not None and is_denied(error)), None)
        first = first or absent[usual_names().index("model.safetensors")]
        if denied is None:
            raise first
        told = StreamError(f"{denied}; nor could {', '.join(usual_names())} be opened below it: {MAY_BE_FORBIDDEN}")
        told.source, told.status = getattr(denied, "source", None), getattr(denied, "status", None)
        raise told from first

    def _probe(self, names: Sequence[str], found: dict[str, OpenedFiles], absent: list[OSError]) -> Collection[str]:
        """Those of `names` that are there.

        Args:
            names: Names below the folder.
            found: Gets what is there by its name: single files open, indexes read.
            absent: Gets the errors of names that are not there.

        Raises:
            OSError: The store does not say whether one is there.
            FormatError: An index is damaged.
        """
        errors: list[Exception] = []
        for name, probe in zip(names, each_at_once(self._opened_or_error, names, self.folder)):
            if not isinstance(probe, Exception):
                found[name] = probe
            elif isinstance(probe, OSError) and is_absent(probe):
                absent.append(probe)
            else:
                errors.append(probe)
        for error in errors:
            for opened in found.values():
                opened.close()
            raise error
        return found

    def _opened_or_error(self, name: str) -> Union[OpenedFiles, Exception]:
        try:
            return self._read_index(name) if is_index_name(name) else self.open_file(name)
        except Exception as error:
            return error

    def _chosen(self, forms: list[str], choose: Choose) -> str:
        return forms[0] if len(forms) == 1 else choose(str(shown_location(self.folder)), forms, self.join)

    def _open_form(self, name: str) -> OpenedFiles:
        return self.open_shards(name) if is_index_name(name) else self.open_file(name)

    # ---- one name below the place -----------------------------------------------------------------------------------

    def join(self, name: str) -> str:
        if not self.remote:
            return os.path.join(self.folder, name)
        quoted = urllib.parse.quote(name) if scheme_of(self.folder) in ("http", "https") else name
        return f"{self.folder}/{quoted}"

    def open_file(self, name: str) -> OpenedSource:
        return open_source(self.join(name), self.options)

    def open_shards(self, name: str) -> OpenedShards:
        """The shards of an index."""
        return self._open_files_of(self._read_index(name))

    def _read_index(self, name: str) -> OpenedShards:
        """What an index says, with no file open yet."""
        shown = shown_location(self.join(name))

        def parsed(text: bytes) -> tuple[dict[str, str], dict[str, str]]:
            weight_map, metadata = parse_index(shown, text)
            if not weight_map:
                raise FormatError(f"{shown}: its weight_map names no tensor")
            return weight_map, metadata

        where = self.asked_for if name == self.name else self.join(name)  # with its query
        weight_map, metadata = read_checked(where, self.options, parsed, MAX_INDEX_NBYTES)
        return OpenedShards(shown, weight_map, metadata, {}, where)

    def _open_files_of(self, shards: OpenedShards) -> OpenedShards:
        extension = index_format(shards.name)
        assert extension is not None
        files = list(dict.fromkeys(shards.weight_map.values()))
        for file in files:
            self._check_file_name(shards.name, file, extension)

        def open_one(file: str) -> OpenedSource:
            try:
                return self.open_file(file)
            except FileNotFoundError as error:
                raise StreamNotFoundError(f"{shards.name}: its shard {file!r:.200} is missing ({error})") from None

        if len(files) > 1 and self.remote and answers_together(self.folder):
            shards.files.update(zip(files, _opened_together(files, open_one)))
            return shards
        most_open = files_at_once()
        try:
            for file in files:
                shards.files[file] = open_one(file)
                if len(shards.files) > most_open:
                    close_between_reads(shards.files[file])
        except BaseException:
            shards.close()
            raise
        return shards

    def _check_file_name(self, index: str, file: str, extension: str) -> None:
        parts = re.split(r"[/\\]", file)
        drive = re.match(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]*://", file)
        if drive or "\0" in file or "\\" in file or {"", ".", ".."} & set(parts):
            raise FormatError(f"{index}: expected the name of a file in its folder, got {file!r:.200}")
        if not file.endswith("." + extension):
            raise FormatError(f"{index}: expected .{extension} files, got {file!r:.200}")
        if not self.remote and not _is_inside(self.folder, self.join(file)):
            raise FormatError(f"{index}: {file!r:.200} is a link to a place outside of the folder")


def _opened_together(files: Sequence[str], open_one: Callable[[str], OpenedSource]) -> list[OpenedSource]:
    """All files, in order. If one cannot be opened, all are closed, and the first such error is raised."""
    waiting: list[Future[OpenedSource]] = []
    try:
        with asking(len(files)) as ask:
            waiting += [ask(open_one, file) for file in files]
            return [opened.result() for opened in waiting]
    except BaseException:
        for opened in waiting:
            if not opened.cancelled() and opened.exception() is None:
                opened.result().close()
        raise


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
        raise ValueError(f"max_shard_size: expected bytes, or a text like '5GB' or '500MB', got {size!r}")
    return nbytes


def parse_index(name: str, text: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """The ``weight_map`` and the metadata of an index, with its name in errors.

    Raises:
        FormatError: It is damaged.
    """
    try:
        return cast("tuple[dict[str, str], dict[str, str]]", named(name, _C.parse_shard_index, text))
    except FormatError as error:
        from tensorizer._format.foreign import tell_foreign  # for errors only

        tell_foreign(error, text, "JSON")
        raise


def index_bytes(files: Mapping[str, str], total_size: int, metadata: Mapping[str, Any]) -> bytes:
    """The index of shards.

    Args:
        files: From the name of each tensor to its file.
        total_size: Bytes of all tensors, shared ones counted once.
        metadata: Further texts.
    """
    content = {"metadata": {**metadata, "total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(content, indent=2, sort_keys=False, ensure_ascii=False) + "\n").encode()


# --- what a file was made from (docs/format.md, "Origin"); forms.py reads it -----------------------------------------


class FileFacts(NamedTuple):
    """One file that another one was made from."""

    nbytes: int
    mtime_ns: Optional[int]  # of a local file
    sha256: str


#: By name: the file of weights, or the index and its shards.
Origin = Mapping[str, FileFacts]


def origin_text(origin: Origin) -> str:
    """The note as it is stored."""
    return json.dumps(origin, separators=(",", ":"), ensure_ascii=False)


def facts_of(location: Any, options: CallOptions = PLAIN, source: Optional[_C.RangeSource] = None) -> FileFacts:
    """Reads all of a file.

    Args:
        location: Its path or URI.
        options: For opening a URI.
        source: The file, if it is open: what is at `location` by now may be another one, whose time then differs.
    """
    mtime_ns = _mtime_ns(location)
    with contextlib.ExitStack() as stack:
        if source is None:
            source = stack.enter_context(contextlib.closing(open_source(location, options))).source
        digest = _C.sha256_of(source).hex()
        return FileFacts(source.size() or 0, mtime_ns, digest)


def _mtime_ns(location: Any) -> Optional[int]:
    path = local_path(location)
    return None if path is None else os.stat(path).st_mtime_ns

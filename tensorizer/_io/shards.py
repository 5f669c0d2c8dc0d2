"""Files that share one set of tensors: their names, sizes and index (docs/format.md, "Shards"), and opening them.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar, Union, cast

from tensorizer import _C
from tensorizer._io.sources import (
    OpenedSource,
    close_between_reads,
    files_at_once,
    is_path,
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

# Tried in this order where a folder cannot be listed, and preferred where it can.
TRIED_NAMES = ("model.safetensors.index.json", "model.safetensors", "model.tensors.index.json", "model.tensors")
MAX_INDEX_NBYTES = 100_000_000

#: Under which name the metadata of a file say what it was made from (:mod:`tensorizer._io.forms`).
ORIGIN_KEY = "tensorizer.made_from"
# Requests that open files of one store at the same time.
_OPENED_TOGETHER = 16

# Patterns are compiled when they are first used: each takes as long as importing a small module.
# "model.safetensors.index.json", with a variant before or behind "index".
_INDEX_NAME = r"\.(safetensors|tensors)(\.[^./]+)?\.index(\.[^./]+)?\.json\Z"
_SHARD_NAME = r"\.(safetensors|tensors)\Z"
#: Endings of models in any format.
MODEL_ENDINGS = (".tensors", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
_FILE_ENDINGS = (*MODEL_ENDINGS, ".json", ".sig")  # of files, whose names no folder has
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


def open_files(file_obj: Any, stream_options: Optional[Mapping[str, Any]], choose: Choose) -> OpenedFiles:
    """Opens what ``TensorDeserializer`` was given: one file, or the shards that a folder or an index stands for.

    Args:
        file_obj: The file, folder or index.
        stream_options: Keywords for opening URIs.
        choose: Asked where a folder has several sets of weights.

    Raises:
        OSError: A file cannot be opened; :class:`StreamNotFoundError` names a shard that is missing.
        FormatError: An index that is none, or that names files it must not; several sets of weights.
        ValueError, TypeError: As :func:`tensorizer._io.sources.open_source`.
    """
    if not is_path(file_obj) or isinstance(file_obj, int):
        return open_source(file_obj, stream_options)
    folder = _ModelFolder.of(file_obj, stream_options)
    if folder is None:
        return open_source(file_obj, stream_options)
    from tensorizer._io.shared import sharing

    with sharing():
        return folder.open(choose)


class _ModelFolder(NamedTuple):
    """A folder or URI prefix, and the name in it that was asked for, if any."""

    folder: str
    name: Optional[str]
    remote: bool
    stream_options: Optional[Mapping[str, Any]]
    asked_for: Any  # as given, to be opened as a file after all

    def __repr__(self) -> str:
        """Without the options, which may hold passwords."""
        return f"_ModelFolder({shown_location(self.folder)!r}, {self.name!r})"

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
        is_bucket = scheme == "s3" and not bare.endswith("/") and not split_uri(bare).path
        if scheme not in _NO_PREFIX_SCHEMES and not behind and (is_bucket or not name.endswith(_FILE_ENDINGS)):
            # A name with another extension, or none, may be a file's; what ends with a slash is none.
            return cls(folder_uri(bare), None, True, stream_options, f"{bare}/" if is_bucket else file_obj)
        return None

    def open(self, choose: Choose) -> OpenedFiles:
        if self.name is not None:
            return self.open_shards(self.name)
        return self._open_prefix(choose) if self.remote else self._open_folder(choose)

    def _open_folder(self, choose: Choose) -> OpenedFiles:
        names = os.listdir(self.folder)
        forms = [name for name in TRIED_NAMES if name in names]
        if not forms:
            files = sorted(name for name in names if re.search(_SHARD_NAME, name))
            forms = sorted(name for name in names if re.search(_INDEX_NAME, name))
            if forms:  # other files are their shards
                stems = {form_stem(name) for name in forms}
                forms += [name for name in files if form_stem(name) in stems]
            else:
                forms = files
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
                return open_source(self.asked_for, self.stream_options)
            except OSError as error:
                if not (is_absent(error) or isinstance(error, StreamIsADirectoryError)):  # fsspec may have folders
                    raise
                first = error
        found, absent = self._probed()
        if len(found) > 1:
            for opened in found.values():
                opened.close()
            try:
                return self._open_form(self._chosen(list(found), choose))
            except FormatError:
                for index in found.values():
                    if isinstance(index, OpenedShards):
                        self._open_files_of(index).close()  # half an upload is told by the shard that is missing
                raise
        for opened in found.values():
            # A shard that is missing does not mean another form of the model.
            return self._open_files_of(opened) if isinstance(opened, OpenedShards) else opened
        denied = next((error for error in (first, *absent) if error is not None and is_denied(error)), None)
        first = first or absent[TRIED_NAMES.index("model.safetensors")]
        if denied is None:
            raise first
        told = StreamError(f"{denied}; nor could {', '.join(TRIED_NAMES)} be opened below it: {MAY_BE_FORBIDDEN}")
        told.source, told.status = getattr(denied, "source", None), getattr(denied, "status", None)
        raise told from first

    def _probed(self) -> tuple[dict[str, OpenedFiles], list[OSError]]:
        """The usual names that are there, single files open, indexes read; and the errors of those that are not.

        Raises:
            OSError: The store does not say whether one is there.
            FormatError: An index that is none.
        """
        found: dict[str, OpenedFiles] = {}
        absent: list[OSError] = []
        errors: list[Exception] = []
        for name, probe in zip(TRIED_NAMES, each_at_once(self._opened_or_error, TRIED_NAMES, self.folder)):
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
        return found, absent

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
        return open_source(self.join(name), self.stream_options)

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
        weight_map, metadata = read_checked(where, self.stream_options, parsed, MAX_INDEX_NBYTES)
        return OpenedShards(shown, weight_map, metadata, {}, where)

    def _open_files_of(self, shards: OpenedShards) -> OpenedShards:
        wanted = re.search(_INDEX_NAME, shards.name)
        assert wanted is not None
        files = list(dict.fromkeys(shards.weight_map.values()))
        for file in files:
            self._check_file_name(shards.name, file, wanted.group(1))

        def open_one(file: str) -> OpenedSource:
            try:
                return self.open_file(file)
            except FileNotFoundError as error:
                raise StreamNotFoundError(f"{shards.name}: its shard {file!r:.200} is missing ({error})") from None

        if len(files) > 1 and self.remote and _answers_together(self.folder):
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


def _answers_together(place: str) -> bool:
    """Whether several threads may ask a store, of which each answer costs a round trip."""
    if local_path(place) is not None:
        return False
    if scheme_of(place) in ("http", "https", "s3"):
        return True
    from tensorizer._io import fsspec

    return fsspec.allows_threads(place)


def _opened_together(files: Sequence[str], open_one: Callable[[str], OpenedSource]) -> list[OpenedSource]:
    """All files, in order; none of them stays open where one cannot be opened, and the first such error is raised."""
    waiting: list[Future[OpenedSource]] = []
    try:
        with _asking(len(files)) as ask:
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


def each_at_once(function: Callable[[str], Found], names: Sequence[str], place: str) -> list[Found]:
    """What a function gives for each name below a place; where every answer takes a round trip, at the same time."""
    if len(names) < 2 or not _answers_together(place):
        return list(map(function, names))
    with _asking(len(names)) as ask:
        return [answer.result() for answer in [ask(function, name) for name in names]]


@contextlib.contextmanager
def _asking(count: int) -> Iterator[Callable[..., Future[Any]]]:
    """Calls functions on threads that know what :func:`sharing` shares; after an error, none is begun."""
    import contextvars  # these are not for local files
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(count, _OPENED_TOGETHER), "tensorizer-open") as pool:
        try:
            # Contexts are for one thread each.
            yield lambda function, name: pool.submit(contextvars.copy_context().run, function, name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


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


def parse_index(name: str, text: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """The ``weight_map`` and the metadata of an index, with its name in errors.

    Raises:
        FormatError: It is none.
    """
    try:
        return cast("tuple[dict[str, str], dict[str, str]]", named(name, _C.parse_shard_index, text))
    except FormatError as error:
        from tensorizer._format.foreign import tell_foreign  # for errors only

        tell_foreign(error, text, "JSON")
        raise


def is_index_name(name: str) -> bool:
    """Whether a name is that of an index, which no file of tensors may have: it would be read as one."""
    return re.search(_INDEX_NAME, name.rpartition("/")[2]) is not None


def form_stem(name: str) -> Optional[str]:
    """What the forms of one model have in common, with its variant: ``model.fp16`` for ``model.fp16.tensors`` and
    ``model.safetensors.index.fp16.json``; ``None`` for what is neither a file of tensors nor an index."""
    found = re.search(_INDEX_NAME, name)
    if found is not None:
        return name[: found.start()] + (found[2] or found[3] or "")
    found = re.search(_SHARD_NAME, name)
    return None if found is None else name[: found.start()]


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


def facts_of(
    location: Any, stream_options: Optional[Mapping[str, Any]] = None, source: Optional[_C.RangeSource] = None
) -> FileFacts:
    """Reads all of a file.

    Args:
        location: Its path or URI.
        stream_options: Keywords for opening a URI.
        source: The file, if it is open: what is at `location` by now may be another one, whose time then differs.
    """
    mtime_ns = _mtime_ns(location)
    with contextlib.ExitStack() as stack:
        if source is None:
            source = stack.enter_context(contextlib.closing(open_source(location, stream_options))).source
        digest = _C.sha256_of(source).hex()
        return FileFacts(source.size() or 0, mtime_ns, digest)


def _mtime_ns(location: Any) -> Optional[int]:
    path = local_path(location)
    return None if path is None else os.stat(path).st_mtime_ns

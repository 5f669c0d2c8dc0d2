"""Opens folders of models, and the weights in them: local folders, prefixes of a store, repositories on the hub."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import glob
import re
import shutil
import tempfile
import urllib.parse
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer._files.contents import check_pickled, files_of_index, read_pickled
from tensorizer._io import hub_cache
from tensorizer._io.call_options import NOBODY, PLAIN, CallOptions, StreamOptions, Trust
from tensorizer._io.forms import FolderOfForms, NoteOf, choose
from tensorizer._io.http_options import HTTPOptions
from tensorizer._io.model_files import (
    FORMATS,
    MODEL_ENDINGS,
    absence,
    each_at_once,
    find_model,
    find_pickled,
    form_stem,
    is_index_name,
    is_tensors_name,
    is_weight,
    usual_names,
)
from tensorizer._io.shards import parse_index
from tensorizer._io.sources import json_content, open_source, read_checked
from tensorizer._io.uri import folder_uri, local_path, scheme_of, split_query
from tensorizer._load.digests import AUTO, Verification
from tensorizer._load.open_file import OpenFile, ReadOptions, file_of, open_file
from tensorizer._load.open_index import note_of
from tensorizer._system.devices import target_device
from tensorizer._system.redaction import shown_location, shown_uri
from tensorizer.errors import (
    MAY_BE_FORBIDDEN,
    AuthenticationError,
    FormatError,
    StreamError,
    StreamNotFoundError,
    is_absent,
    is_denied,
)

#: The list of files that ``save_pretrained`` writes into a prefix, because a loader cannot list a prefix.
MANIFEST = "tensorizer_files.json"

# The files that tell which kind of object a folder holds.
_DESCRIPTIONS = ("config.json", "adapter_config.json", "model_index.json", "modules.json", "generation_config.json")

# Files beside a model that do not belong to it, even if they are small.
_OF_DATA_SETS = (
    *(".parquet", ".arrow", ".jsonl", ".ndjson", ".csv", ".tsv", ".npy", ".npz", ".db", ".sqlite", ".lmdb", ".log"),
    *(".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".wav", ".flac", ".mp3", ".mp4", ".png", ".jpg"),
)
_OF_TOKENIZERS = ("additional_chat_templates",)  # a folder

_HOST = torch.device("cpu")

_PART = r"[A-Za-z0-9][\w.-]*"
_REPO_ID = re.compile(rf"{_PART}(?:/{_PART})?\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_URI = re.compile(rf"hf://(?:models/)?((?!(?:datasets|spaces|buckets)/){_PART}/{_PART})(?:@([^/]+))?(?:/(.*))?\Z")


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The options of a load: the arguments of ``from_pretrained``, except the class and the source.

    Attributes:
        call: The key, the keys that may authenticate the weights, and keywords for opening URIs.
    """

    revision: Optional[str] = None
    subfolder: str = ""
    cache: bool = True
    local_files_only: bool = False
    token: Any = dataclasses.field(default=None, repr=False)
    call: CallOptions = PLAIN
    variant: Optional[str] = None
    dtype: Union[torch.dtype, str, None] = "auto"
    old_name_of_dtype: bool = False  # whether the caller wrote torch_dtype=
    device: torch.device = _HOST  # used without a device map
    device_map: Any = None
    quantization_config: Any = None
    config: Any = None
    strict: bool = True
    verify: Verification = AUTO
    allow_pickle: bool = False
    mmap: Optional[bool] = None
    model_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def of_base_model(self) -> LoadOptions:
        """The options for the base model in another folder, without those that are about the files of this folder."""
        of_model = ("dtype", "device", "device_map", "quantization_config", "model_kwargs")
        of_hub = ("cache", "local_files_only", "token", "allow_pickle")
        call = CallOptions(progress=self.call.progress, trust=Trust.of(None, None), shared=self.call.shared)
        return LoadOptions(call=call, **{name: getattr(self, name) for name in (*of_model, *of_hub)})


def is_small_file(name: str, folders: Collection[str]) -> bool:
    """Whether a file of a repository belongs to the model and holds no weights. Data sets and git's files do not.

    Args:
        name: Name of the file, with ``/`` for folders.
        folders: The folders that belong to the model, with all their content.
    """
    if is_weight(name) or any(part.startswith(".") for part in name.split("/")):
        return False
    if "/" not in name:
        return not name.endswith(_OF_DATA_SETS)
    return name.startswith(
        tuple(f"{folder.strip('/')}/" for folder in (*folders, *_OF_TOKENIZERS) if folder.strip("/"))
    )


class ModelFolder:
    """One folder of a model.

    Attributes:
        label: The source that the caller named, without secrets. It becomes ``model.config.name_or_path``.
        call: The options for opening the result of :meth:`weight`, without the key.
    """

    label: str
    call: CallOptions = PLAIN
    has_revision = False  # whether it is one revision of a repository
    file: Optional[str] = None  # the file of weights that the caller named
    _below = ""  # the subfolder of the folder that was opened, and a slash

    @property
    def inside(self) -> str:
        """The subfolder of the folder that was opened, with a slash at its end; empty for the folder itself."""
        return self._below

    @property
    def doubt(self) -> str:
        """A text to add to messages about missing files: why they may exist after all."""
        return ""

    def has(self, name: str) -> bool:
        """Whether a file of that name exists (with ``/`` for folders)."""
        return self._has(self._below + name)

    def fetch(self, *names: str) -> Path:
        """A local folder with all of the small files `names` that exist, under their names."""
        return self._fetch([self._below + name for name in names]) / self._below

    def fetch_all(self, folders: Optional[Collection[str]] = None) -> Path:
        """A local folder with every small file of the model; a local model is returned with all its files.

        Args:
            folders: The folders that belong to the model, as for :func:`is_small_file`; ``None`` for all.

        Raises:
            FileNotFoundError: The files cannot be listed.
        """
        names = [name for name in self._names() if name.startswith(self._below)]
        inside = {*folders} if folders is not None else {name[len(self._below) :].partition("/")[0] for name in names}
        chosen = [name for name in names if is_small_file(name[len(self._below) :], inside)]
        return self._fetch(chosen) / self._below

    def weight(self, name: str) -> Any:
        """The path or URI of a file of weights, or of the index of several, for the engine to open."""
        return self._weight(self._below + name)

    def those_of(self, names: Sequence[str]) -> list[str]:
        """The `names` that exist."""
        return [name for name in names if self.has(name)]

    def listing(self) -> Optional[list[str]]:
        """The names of all files in the folder; ``None`` if they cannot be listed."""
        return None

    def forms(self, note_of: NoteOf) -> FolderOfForms:
        """Decides whether several files of weights in the folder are one model."""
        return FolderOfForms(self.label, self.weight, note_of, self.call)

    def _has(self, name: str) -> bool:
        raise NotImplementedError

    def _fetch(self, names: Sequence[str]) -> Path:
        raise NotImplementedError

    def _names(self) -> Collection[str]:
        raise NotImplementedError

    def _weight(self, name: str) -> Any:
        raise NotImplementedError

    def below(self, subfolder: str) -> ModelFolder:
        """The subfolder of that name. Closing this folder closes it.

        Raises:
            ValueError: The name leads out of this folder.
        """
        if subfolder in ("", "."):
            return self
        subfolder = subfolder.strip("/")
        if not _is_plain(subfolder):
            raise ValueError(f"{self.label}: {subfolder!r:.200} is not a folder below it")
        folder = copy.copy(self)
        folder._below, folder.file = f"{self._below}{subfolder}/", None
        return folder

    def read_json(self, name: str, kind: type = dict) -> Any:
        """The content of a small JSON file, a `kind`; ``None`` if it does not exist. Raises as :func:`json_content`."""
        if not self.has(name):
            return None
        return json_content(f"{self.label}: {name}", (self.fetch(name) / name).read_bytes(), kind)

    def close(self) -> None:
        """Removes the temporary files of this load."""


class LocalFolder(ModelFolder):
    """A local folder."""

    def __init__(self, folder: Path) -> None:
        self.label, self._folder = str(folder), folder

    def _has(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def _fetch(self, names: Sequence[str]) -> Path:
        return self._folder

    def _names(self) -> Collection[str]:
        return ()  # all of them are here

    def listing(self) -> Optional[list[str]]:
        return [path.name for path in (self._folder / self._below).iterdir() if path.is_file()]

    def _weight(self, name: str) -> Any:
        return str(self._folder / name)


class RemoteFolder(ModelFolder):
    """A prefix of a store. Since it cannot be listed, names are tried. Small files go to a private temporary folder.

    Args:
        prefix: URI of the folder.
        call: The options for opening its files.
        label: Name of the folder in messages; ``None`` takes the URI without secrets.
        names: The names of its files, if they are known.
    """

    def __init__(
        self,
        prefix: str,
        call: CallOptions,
        label: Optional[str] = None,
        names: Optional[Collection[str]] = None,
    ) -> None:
        self._prefix = folder_uri(prefix)
        self._quotes = scheme_of(prefix) in ("http", "https")
        self.label = shown_uri(self._prefix) if label is None else label
        self.call, self._listing, self.has_revision = call, names, names is not None
        self._known: dict[str, bool] = {}
        self._denied: list[str] = []  # names for which the store answered 403
        self._folder = Path(tempfile.mkdtemp(prefix="tensorizer-"))

    def _has(self, name: str) -> bool:
        if self._listing is not None:
            return name in self._listing
        if name not in self._known:
            self._known[name] = self._opens(name) if name.endswith(MODEL_ENDINGS) else self._copy(name)
        return self._known[name]

    def those_of(self, names: Sequence[str]) -> list[str]:
        return [name for name, is_there in zip(names, each_at_once(self.has, names, self._prefix)) if is_there]

    def _opens(self, name: str) -> bool:
        error = absence(self._weight(name), self.call)
        if error is not None and is_denied(error):
            self._denied.append(name)
        return error is None

    @property
    def doubt(self) -> str:
        return f"; {MAY_BE_FORBIDDEN} ({', '.join(self._denied[:5])})" if self._denied else ""

    def _weight(self, name: str) -> Any:
        as_given = name == self.file or not self._quotes
        return f"{self._prefix}/{name if as_given else urllib.parse.quote(name)}"

    def _copy(self, name: str) -> bool:
        if not _is_plain(name):
            raise ValueError(f"{self.label}: {name!r:.200} is not a file of the folder")
        try:
            content = read_checked(self._weight(name), self.call, bytes)
        except OSError as error:
            if not is_absent(error):
                raise
            if is_denied(error):  # which may mean so
                self._denied.append(name)
            return False
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return True

    def _fetch(self, names: Sequence[str]) -> Path:
        for name in names:
            if self._has(name) and not (self._folder / name).exists() and not self._copy(name):
                raise StreamNotFoundError(f"{self.label}: {name!r:.200} is listed, and is not there")
        return self._folder

    def _names(self) -> Collection[str]:
        if self._listing is not None:
            return self._listing
        listed = self.read_json(MANIFEST, list)
        if listed is None:
            raise StreamNotFoundError(
                f"{self.label}: expected {MANIFEST}, the list of the folder's files that save_pretrained writes"
            )
        for name in listed:
            if not _is_plain(name):
                raise ValueError(f"{self.label}: {MANIFEST} names {name!r:.200}, which is not a file of the folder")
        return [self._below + name for name in listed]

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _is_plain(name: Any) -> bool:
    parts = name.split("/") if isinstance(name, str) else [""]
    return not {"", ".", ".."} & set(parts) and "\\" not in name and ":" not in name


def is_repo_id(text: str) -> bool:
    """Whether a text can be the id of a repository: ``org/name``, or a name alone, as the oldest ones have."""
    return _REPO_ID.match(text) is not None and ".." not in text and "--" not in text


def parse_uri(uri: str) -> tuple[str, Optional[str], str]:
    """Repository, revision and subfolder of ``hf://org/name[@revision][/subfolder]``.

    Raises:
        ValueError: The URI has another form, or names a repository of data sets or spaces.
    """
    match = _URI.match(uri)
    if match is None:
        raise ValueError(
            f"expected a model repository, hf://org/name[@revision][/subfolder], got {shown_uri(uri)}; of data sets, "
            "spaces and buckets of the hub only single files can be opened (TensorDeserializer, load_file)"
        )
    revision = match[2]
    return match[1], None if revision is None else revision.replace("%2F", "/"), (match[3] or "").strip("/")


def _open_repo(repo: str, revision: Optional[str], options: LoadOptions) -> ModelFolder:
    """Opens a repository at one commit.

    With ``cache``, files come through the cache of ``huggingface_hub``. Otherwise they are read over HTTPS, and weights
    are never written to the disk.

    Raises:
        FileNotFoundError: The repository or revision does not exist, or is not in the cache.
        StreamError: The hub cannot be reached, and the cache does not have the files.
        ValueError: The text cannot be a revision.
        ImportError: The package ``huggingface_hub`` is not installed.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined,unused-ignore]

    shown = repo if revision is None else f"{repo}@{revision}"
    if revision is not None and not _is_plain(revision):  # the cache has a file of that name
        raise ValueError(f"{repo}: expected the name of a branch or tag as revision, got {revision!r}")
    offline = options.local_files_only or hub_cache.is_offline()
    if offline and not options.cache:
        raise ValueError(f"{repo}: cache=False reads from the hub, and local_files_only or HF_HUB_OFFLINE forbids that")
    below = options.subfolder.strip("/")
    described = [f"{below}/{name}" if below else name for name in _DESCRIPTIONS]
    try:
        if options.cache:  # notes the commit of a branch, so that all files come from that commit
            if offline:
                return _cached(repo, revision, shown)
            folder = _download(repo, revision, options.token, described)
            revision = folder.name
        info = huggingface_hub.HfApi(token=options.token).model_info(repo, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise FileNotFoundError(f"{shown}: {str(error).strip().splitlines()[0]}") from None
    except Exception as error:
        if not options.cache or not hub_cache.is_down(error):
            raise
        found = _cached(repo, revision, shown, error)
        hub_cache.warn_of(repo, error, 6)
        return found
    names = {sibling.rfilename for sibling in info.siblings or ()}
    if options.cache:
        return _CachedRepo(repo, folder, names, options.token)
    if not info.sha:
        raise StreamError(f"{shown}: the hub does not say which commit that is")
    prefix = huggingface_hub.hf_hub_url(repo, "x", revision=info.sha)[: -len("/x")]
    headers = build_hf_headers(token=options.token)  # they are sent only to the host of the hub
    call = options.call._replace(stream=StreamOptions(http_options=HTTPOptions(headers=headers)))
    return RemoteFolder(prefix, call, repo, names)


def _cached(repo: str, revision: Optional[str], shown: str, error: Optional[Exception] = None) -> ModelFolder:
    """The files of a commit that are in the cache; `error` is the reason why the hub was not asked."""
    folder = hub_cache.snapshot(repo, revision)
    if folder is None:
        if error is None:
            raise FileNotFoundError(f"{shown}: not in the cache, and the hub may not be asked")
        raise StreamError(f"{shown}: not in the cache, and the hub cannot be reached: {error}") from error
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return _CachedRepo(repo, folder, names, None)


def _download(repo: str, revision: Optional[str], token: Any, names: Iterable[str]) -> Path:
    """The folder of a commit in the cache, with these files; several are downloaded at the same time."""
    import huggingface_hub

    patterns = [glob.escape(name) for name in names]
    return Path(huggingface_hub.snapshot_download(repo, revision=revision, token=token, allow_patterns=patterns))


class _CachedRepo(ModelFolder):
    """The files of one commit, in the cache of ``huggingface_hub`` or downloaded into it on first use."""

    has_revision = True

    def __init__(self, repo: str, folder: Path, names: Collection[str], token: Any) -> None:
        self.label = self._repo = repo
        self._folder, self._listing, self._token = folder, names, token

    def _has(self, name: str) -> bool:
        return name in self._listing

    def _fetch(self, names: Sequence[str]) -> Path:
        absent = [name for name in names if name in self._listing and not (self._folder / name).exists()]
        if absent:
            _download(self.label, self._folder.name, self._token, absent)
        return self._folder

    def _names(self) -> Collection[str]:
        return self._listing

    def listing(self) -> Optional[list[str]]:
        inside = [name[len(self._below) :] for name in self._listing if name.startswith(self._below)]
        return [name for name in inside if "/" not in name]

    def forms(self, note_of: NoteOf) -> FolderOfForms:
        return _FormsInRepo(self, note_of)

    def path_of(self, name: str, fetch: bool = True) -> Path:
        """The path of a file in the cache; `fetch` downloads it if it is missing."""
        name = self._below + name
        return (self._fetch([name]) if fetch else self._folder) / name

    def stated(self, name: str) -> Any:
        """The hub's answer to a HEAD request: the ``size`` of a file, and its ``etag``, the SHA-256 of a large file."""
        import huggingface_hub

        url = huggingface_hub.hf_hub_url(self._repo, self._below + name, revision=self._folder.name)
        return huggingface_hub.get_hf_file_metadata(url, token=self._token)

    def _weight(self, name: str) -> Any:
        self._fetch([name, f"{name}.sig"])  # the load looks for a signature beside the weights
        if name.endswith(".json"):  # an index: all its shards are needed
            index = self._folder / name
            shards, _ = parse_index(str(index), index.read_bytes())
            below = name.rpartition("/")[0]
            files = [f"{below}/{file}" if below else file for file in sorted({*shards.values()})]
            self._fetch([*files, *(f"{file}.sig" for file in files)])
        return str(self._folder / name)


class _FormsInRepo(FolderOfForms):
    """Compares files without downloading them, if the hub or the cache knows their SHA-256."""

    def __init__(self, repo: _CachedRepo, note_of: NoteOf) -> None:
        super().__init__(repo.label, self._located, note_of)
        self._repo = repo

    def _located(self, name: str) -> Any:
        if ".tensors" in name:  # its metadata may name the file that it was converted from
            return self._repo.weight(name)
        return str(self._repo.path_of(name, fetch=is_index_name(name)))

    def size_and_time(self, name: str) -> tuple[Optional[int], Optional[int]]:
        path = self._repo.path_of(name, fetch=False)
        return path.stat().st_size if path.exists() else self._repo.stated(name).size, None

    def sha256(self, name: str, made: str) -> str:
        path = self._repo.path_of(name, fetch=False)
        # In the cache, a large file is a link to a file whose name is its SHA-256; the hub sends that as the ETag.
        stated = str(path.resolve().name if path.exists() else self._repo.stated(name).etag)
        if _SHA256.match(stated):
            return stated
        self._repo.path_of(name)
        return super().sha256(name, made)


def _names_weights(name: str) -> bool:
    return is_tensors_name(name) or is_index_name(name)


@contextlib.contextmanager
def open_folder(source: Any, options: LoadOptions) -> Iterator[ModelFolder]:
    """Opens the folder that the caller named, or the folder of the file that the caller named.

    The source is a path, a URI, ``hf://org/name[@revision]`` or a hub id.

    Raises:
        FileNotFoundError: The folder or repository does not exist.
        ValueError: The source is of another kind, or has a revision but is not on the hub.
    """
    folder: ModelFolder
    revision, inside = options.revision, ""
    local = local_path(source)
    if local is not None:
        path = Path(local)
        if path.is_dir():
            folder = LocalFolder(path)
        elif _names_weights(path.name) and path.is_file():
            folder = LocalFolder(path.parent)
            folder.file = path.name
        elif isinstance(source, str) and not path.exists() and is_repo_id(source):
            folder = _open_repo(source, revision, options)
        else:
            found = "a file" if path.exists() else "nothing"
            wanted = "a folder, a .tensors or .safetensors file or index, a URI or the id of a hub repository"
            raise FileNotFoundError(f"{shown_location(source)}: expected {wanted}, got {found}")
    elif scheme_of(source) == "hf":
        repo, named, inside = parse_uri(source)
        if named and revision and named != revision:
            raise ValueError(f"{shown_location(source)}: the URI names revision {named!r}, the argument {revision!r}")
        below = "/".join(filter(None, (inside, options.subfolder.strip("/"))))
        folder = _open_repo(repo, named or revision, dataclasses.replace(options, subfolder=below))
    elif _names_weights(source) and not split_query(source)[1]:
        prefix, _, name = source.rpartition("/")
        folder = RemoteFolder(prefix, options.call)
        folder.file = name
    else:
        folder = RemoteFolder(source, options.call)
    try:
        if revision is not None and not folder.has_revision:
            raise ValueError(f"revision: only repositories of the hub have one, got {revision!r} for {folder.label}")
        yield folder.below(inside)
    except FileNotFoundError as error:
        if not folder.doubt:
            raise
        raise StreamNotFoundError(f"{error}{folder.doubt}") from error
    finally:
        folder.close()


# --- the weights in a folder ------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """A file of tensors, or the index of several.

    Attributes:
        source: The path or URI for the engine; for pickled weights, the local paths of all files.
        pickled: Whether torch has to read them.
    """

    source: Any
    pickled: bool
    folder: ModelFolder
    options: LoadOptions

    def __repr__(self) -> str:
        return f"Weights({self.label!r})"

    @property
    def label(self) -> str:
        """The name of the file, without the secrets of its URI."""
        return shown_location(self.source[0] if self.pickled else self.source)

    @property
    def _mmap(self) -> Optional[bool]:
        """The caller's ``mmap``. Files whose data are checked are read, because mapped memory may change afterwards."""
        verify = self.options.verify
        checked = (verify is not AUTO and verify.reads) or bool(self.options.call.trust.public_keys)
        return False if self.options.mmap is None and checked else self.options.mmap

    def open(
        self,
        device: Any = "cpu",
        dtype: Optional[torch.dtype] = None,
        filter_func: Any = None,
    ) -> OpenFile:
        """Opens the file and reads only its index."""
        inside, verify = self.folder.inside, self.options.verify
        how = ReadOptions(target_device(device), dtype, self._mmap).verifying(
            verify.inside(inside) if inside else verify
        )
        call = self.options.call._replace(stream=self.folder.call.stream)
        if self.source.endswith(FORMATS):
            return file_of(open_source(self.source, call), call, how, filter_func)
        return open_file(self.source, call, how, filter_func)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Loads all tensors into host memory, with their stored dtypes."""
        if self.pickled:
            return read_pickled(self.source)[0]
        with self.open() as file:
            return file.as_state_dict(file.read_whole())


def find_weights(folder: ModelFolder, stem: str, options: LoadOptions, any_name: bool = False) -> Weights:
    """The weights under the usual names: ``.tensors`` or ``.safetensors``, else ``.bin`` if that is allowed.

    Args:
        folder: The folder.
        stem: ``model``, ``diffusion_pytorch_model`` or ``adapter_model``.
        options: The options of the load, of which ``variant`` and ``allow_pickle`` are used.
        any_name: Accepts any file name if the folder can be listed and has only one model, as ``load_file`` does.

    Raises:
        FileNotFoundError: There are no weights; the message lists the names that were tried.
        ValueError: There are only pickled weights, and they are not allowed.
        FormatError: There are several files of weights that are not known to be one model.
        AuthenticationError: There are only pickled weights, which cannot be authenticated as the caller requires.
    """
    if folder.file is not None:  # whether it is there shows when it is opened: that takes two round trips of a store
        return Weights(folder.weight(folder.file), False, folder, options)
    # If a model has both forms, this package prefers .tensors; the libraries themselves read .safetensors.
    listing = folder.listing() if any_name else None
    found = find_model(folder.those_of, stem, options.variant, listing)[::-1]
    if len({form_stem(name) for name in found}) > 1 and listing is not None:
        raise FormatError(f"{folder.label}: expected one index or one model file, got {', '.join(found)[:300]}")
    if len(found) > 1:
        note = functools.partial(note_of, options.call._replace(stream=folder.call.stream))
        found = [choose(found, folder.forms(note))]
    if found:
        return Weights(folder.weight(found[0]), False, folder, options)
    name = find_pickled(folder.those_of, stem, options.variant)
    if name is None:
        tried = ", ".join(reversed(usual_names(stem, options.variant)))
        raise FileNotFoundError(f"{folder.label}: expected {tried}, got none of them")
    if not options.allow_pickle:
        raise ValueError(
            f"{folder.label}: only {name} holds the weights, a pickle; allow_pickle=True reads it (weights only, "
            "nothing in it is run)"
        )
    if options.call.trust != NOBODY:
        raise AuthenticationError(
            f"{folder.label}: not authenticated: {name} is a pickle, which holds neither a tag nor a signature"
        )
    if options.mmap:
        raise ValueError(f"{folder.label}: mmap: {name} is a pickle, which cannot be mapped")
    files = _pickled_files(folder, name)
    check_pickled(files, options.verify.inside(folder.inside))
    return Weights(files, True, folder, options)


def _pickled_files(folder: ModelFolder, name: str) -> list[str]:
    path = str(folder.weight(name))
    if "://" in path:
        where = "which is read from local files and the hub's cache alone"
        raise ValueError(f"{folder.label}: {name} is a pickle, {where}")
    return files_of_index(path) if name.endswith(".json") else [path]

"""Repositories of the Hugging Face hub: the revision is resolved once, then every file is of that commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Optional

from tensorizer._io.whole_file import WholeFile
from tensorizer._system.redaction import shown_uri
from tensorizer.integrations._hf.place import Place, RemotePlace, is_weight

__all__ = ["CachedRepo", "is_repo_id", "open_repo", "parse_uri"]

_PART = r"[A-Za-z0-9][\w.-]*"
_REPO_ID = re.compile(rf"{_PART}(?:/{_PART})?\Z")
_URI = re.compile(rf"hf://(?:models/)?((?!(?:datasets|spaces)/){_PART}/{_PART})(?:@([^/]+))?(?:/(.*))?\Z")


def is_repo_id(text: str) -> bool:
    """Whether a text can be ``org/name`` or the name of one of the oldest repositories."""
    return _REPO_ID.match(text) is not None and ".." not in text and "--" not in text


def parse_uri(uri: str) -> tuple[str, Optional[str], str]:
    """Repository, revision and subfolder of ``hf://org/name[@revision][/subfolder]``.

    Raises:
        ValueError: Another form, or a repository that holds no models.
    """
    match = _URI.match(uri)
    if match is None:
        raise ValueError(f"wanted hf://org/name[@revision][/subfolder], found {shown_uri(uri)}")
    revision = match[2]
    return match[1], None if revision is None else revision.replace("%2F", "/"), (match[3] or "").strip("/")


def open_repo(
    repo: str, revision: Optional[str], subfolder: str, cache: bool, local_files_only: bool, token: Any
) -> Place:
    """The place of a repository at one commit.

    Args:
        repo: ``org/name``.
        revision: Branch, tag or commit; ``None`` is the main branch.
        subfolder: Folder inside.
        cache: Files come through the cache of ``huggingface_hub``; otherwise they are read over HTTPS, and no file of
            weights touches the disk.
        local_files_only: Nothing is asked of the hub, as with ``HF_HUB_OFFLINE``.
        token: As ``huggingface_hub`` takes it; ``None``: what is logged in.

    Raises:
        FileNotFoundError: No such repository or revision, or not in the cache.
        ImportError: The package ``huggingface_hub`` is not installed.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if local_files_only or constants.HF_HUB_OFFLINE:
        return _cached(huggingface_hub, repo, revision, cache).below(subfolder)
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = huggingface_hub.HfApi(token=token).model_info(repo, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        shown = repo if revision is None else f"{repo}@{revision}"
        raise FileNotFoundError(f"{shown}: {str(error).strip().splitlines()[0]}") from None
    if cache and info.sha is not None:
        _note_revision(repo, revision or constants.DEFAULT_REVISION, info.sha)
    names = {sibling.rfilename for sibling in info.siblings or ()}
    place: Place
    if cache:
        place = CachedRepo(repo, info.sha, names, token)
    else:
        place = _StreamedRepo(repo, info.sha, names, token)
    return place.below(subfolder)


def _note_revision(repo: str, revision: str, commit: str) -> None:
    """Leaves in the cache which commit a branch was, as the hub's library does: offline it is found by that."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if revision == commit:
        return
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"), "refs")
    path = folder / revision
    if folder.resolve() not in path.resolve().parents:
        raise ValueError(f"{repo}: wanted the name of a branch or tag as revision, found {revision!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with WholeFile(str(path)) as file:
        file.append(commit.encode())


def _cached(huggingface_hub: Any, repo: str, revision: Optional[str], cache: bool) -> Place:
    """A revision that is in the cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not cache:
        raise ValueError(f"{repo}: cache=False reads from the hub, and local_files_only or HF_HUB_OFFLINE forbids that")
    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        shown = repo if revision is None else f"{repo}@{revision}"
        raise FileNotFoundError(f"{shown}: not in the cache, and the hub may not be asked") from None
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return CachedRepo(repo, folder.name, names, None, folder)


class CachedRepo(Place):
    """Files of one commit, in the cache of ``huggingface_hub`` or fetched into it when they are asked for."""

    has_revision = True

    def __init__(
        self, repo: str, commit: Optional[str], names: set[str], token: Any, folder: Optional[Path] = None
    ) -> None:
        self.label = repo
        self._commit, self._names, self._token = commit, names, token
        self._offline_folder = folder

    def has(self, name: str) -> bool:
        return name in self._names

    def _path(self, name: str) -> Path:
        if self._offline_folder is not None:
            return self._offline_folder / name
        import huggingface_hub

        return Path(huggingface_hub.hf_hub_download(self.label, name, revision=self._commit, token=self._token))

    def fetch(self, *names: str) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        # Where none of them exists: the folder in which they would be, never the working directory.
        cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=self.label, repo_type="model"))
        root = self._offline_folder or cached / "snapshots" / str(self._commit)
        for name in names:
            if name in self._names:
                root = self._path(name).parents[name.count("/")]
        return root

    def fetch_all(self) -> Path:
        return self.fetch(*sorted(name for name in self._names if not is_weight(name)))

    def weight(self, name: str) -> Any:
        path = self._path(name)
        if self.has(f"{name}.sig"):
            self._path(f"{name}.sig")  # looked for beside the weights
        if name.endswith(".json"):  # an index: its shards are cached one by one, and all have to be there
            shards = (self.read_json(name) or {}).get("weight_map")
            for shard in sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else ():
                folder = name.rpartition("/")[0]
                self.weight(f"{folder}/{shard}" if folder else shard)
        return str(path)


class _StreamedRepo(RemotePlace):
    """Files of one commit, read over HTTPS with ranges; the token goes to the host of the hub alone."""

    has_revision = True

    def __init__(self, repo: str, commit: Optional[str], names: set[str], token: Any) -> None:
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined,unused-ignore]

        from tensorizer.stream_io import HTTPOptions

        prefix = huggingface_hub.hf_hub_url(repo, "x", revision=commit)[: -len("/x")]
        headers = build_hf_headers(token=token)
        super().__init__(prefix, {"http_options": HTTPOptions(headers=headers)}, repo)
        self._names = names

    def has(self, name: str) -> bool:
        return name in self._names

    def fetch(self, *names: str) -> Path:
        for name in names:
            if name in self._names and not (self._mirror() / name).exists():
                self._copy(name)
        return self._mirror()

    def fetch_all(self) -> Path:
        return self.fetch(*(name for name in self._names if not is_weight(name)))

"""Folders of models wherever they are: a local one, a prefix of a store, a revision of a hub repository."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from tensorizer import stream_io
from tensorizer._system.redaction import shown_uri
from tensorizer.errors import StreamNotFoundError

__all__ = ["MANIFEST", "LocalPlace", "Place", "RemotePlace", "is_weight"]

#: The list of files that ``save_pretrained`` leaves where a loader cannot know their names: prefixes have no listing.
MANIFEST = "tensorizer_files.json"

_WEIGHTS = (".tensors", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


def is_weight(name: str) -> bool:
    """Whether a file holds weights, in whatever format."""
    return name.endswith(_WEIGHTS)


class Place:
    """One folder of a model.

    Attributes:
        label: What the caller named, without secrets; becomes ``model.config.name_or_path``.
        stream_options: Keywords for opening what :meth:`weight` gives.
    """

    label: str
    stream_options: Optional[Mapping[str, Any]] = None
    has_revision = False  # whether it is one revision of a repository
    file: Optional[str] = None  # the file of weights that the caller named

    def has(self, name: str) -> bool:
        """Whether there is a file of that name (with ``/`` for folders inside)."""
        raise NotImplementedError

    def fetch(self, *names: str) -> Path:
        """A local folder with those of the small files `names` that exist, under their names."""
        raise NotImplementedError

    def fetch_one(self, name: str) -> Path:
        """A local folder with the small file `name`.

        Raises:
            FileNotFoundError: There is none.
        """
        if not self.has(name):
            raise FileNotFoundError(f"{self.label}: wanted {name}, found none")
        return self.fetch(name)

    def fetch_all(self) -> Path:
        """A local folder with every file that holds no weights.

        Raises:
            FileNotFoundError: The files cannot be listed.
        """
        raise NotImplementedError

    def weight(self, name: str) -> Any:
        """What the engine opens: the path or URI of a file of weights, or of an index of some."""
        raise NotImplementedError

    def below(self, subfolder: str) -> Place:
        """The place of a subfolder.

        Raises:
            ValueError: It is not below this place.
        """
        if subfolder in ("", "."):
            return self
        subfolder = subfolder.strip("/")
        if not _is_plain(subfolder):
            raise ValueError(f"{self.label}: {subfolder!r:.200} is not a folder below it")
        return _Below(self, subfolder)

    def read_json(self, name: str, kind: type = dict) -> Any:
        """The content of a small file, a `kind`; ``None`` where there is none.

        Raises:
            ValueError: It is no JSON, or of another kind.
        """
        if not self.has(name):
            return None
        path = self.fetch(name) / name
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.label}: {name} is not JSON: {error}") from None
        if not isinstance(content, kind):
            found = type(content).__name__
            raise ValueError(f"{self.label}: {name}: wanted a {kind.__name__} as its content, found a {found}")
        return content

    def close(self) -> None:
        """Removes what was made for this load."""


class _Below(Place):
    def __init__(self, parent: Place, subfolder: str) -> None:
        self._parent, self._subfolder = parent, subfolder
        self.label, self.stream_options = parent.label, parent.stream_options
        self.has_revision = parent.has_revision

    def has(self, name: str) -> bool:
        return self._parent.has(f"{self._subfolder}/{name}")

    def fetch(self, *names: str) -> Path:
        return self._parent.fetch(*(f"{self._subfolder}/{name}" for name in names)) / self._subfolder

    def fetch_all(self) -> Path:
        return self._parent.fetch_all() / self._subfolder

    def weight(self, name: str) -> Any:
        return self._parent.weight(f"{self._subfolder}/{name}")

    def close(self) -> None:
        self._parent.close()


class LocalPlace(Place):
    """A folder of this machine."""

    def __init__(self, folder: Path, label: Optional[str] = None) -> None:
        self.folder = folder
        self.label = str(folder) if label is None else label

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def fetch(self, *names: str) -> Path:
        return self.folder

    def fetch_all(self) -> Path:
        return self.folder

    def weight(self, name: str) -> Any:
        return str(self.folder / name)


class RemotePlace(Place):
    """A prefix of a store, which cannot be listed: names are tried. Small files go to a private temporary folder."""

    def __init__(self, prefix: str, stream_options: Optional[Mapping[str, Any]], label: Optional[str] = None) -> None:
        self._prefix = prefix.rstrip("/")
        self.label = shown_uri(self._prefix) if label is None else label
        self.stream_options = stream_options
        self._folder: Optional[Path] = None
        self._known: dict[str, bool] = {}

    def _mirror(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="tensorizer-"))
        return self._folder

    def weight(self, name: str) -> Any:
        return f"{self._prefix}/{name}"

    def has(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = self._is_there(name) if is_weight(name) else self._copy(name)
        return self._known[name]

    def _is_there(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError), self._open(name) as stream:
            return bool(stream.read(1))
        return False

    def _open(self, name: str) -> Any:
        return stream_io.open_stream(self.weight(name), "rb", **dict(self.stream_options or {}))

    def _copy(self, name: str) -> bool:
        if not _is_plain(name):
            raise ValueError(f"{self.label}: {name!r:.200} is not a file of the folder")
        try:
            with self._open(name) as stream:
                content = stream.read()
        except FileNotFoundError:
            return False
        path = self._mirror() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return True

    def fetch(self, *names: str) -> Path:
        for name in names:
            self.has(name)
        return self._mirror()

    def fetch_all(self) -> Path:
        names = self.read_json(MANIFEST, list)
        if names is None:
            raise StreamNotFoundError(
                f"{self.label}: wanted {MANIFEST}, which save_pretrained writes and which lists the files of the folder"
            )
        for name in names:
            if not _is_plain(name):
                raise ValueError(f"{self.label}: {MANIFEST} names {name!r:.200}, which is not a file of the folder")
        return self.fetch(*(name for name in names if not is_weight(name)))

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _is_plain(name: Any) -> bool:
    parts = name.split("/") if isinstance(name, str) else [""]
    return not {"", ".", ".."} & set(parts) and "\\" not in name and ":" not in name

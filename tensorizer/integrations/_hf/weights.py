"""The weights of one model: which file or index of a folder, and what it gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from tensorizer._files.pickled import read_pickled
from tensorizer._load.authenticity import Trust
from tensorizer._system.redaction import shown_location
from tensorizer.deserializer import TensorDeserializer
from tensorizer.errors import AuthenticationError
from tensorizer.integrations._hf.options import LoadOptions
from tensorizer.integrations._hf.place import LocalPlace, Place
from tensorizer.torch import load_file

__all__ = ["Weights", "find_weights"]

_PICKLED_STEMS = {"model": "pytorch_model"}  # the others are called the same in every format


class Weights(NamedTuple):
    """A file of tensors, or the index of several.

    Attributes:
        source: What the engine opens; for pickled weights the local paths of all files.
        pickled: Whether torch has to read them.
    """

    source: Any
    pickled: bool
    place: Place
    options: LoadOptions

    @property
    def label(self) -> str:
        """The file, without the secrets of its URI."""
        return shown_location(self.source[0] if self.pickled else self.source)

    @property
    def _mmap(self) -> Optional[bool]:
        """What was asked for. A model whose data are to be checked is read: a mapping may change afterwards."""
        checked = self.options.verify or self.options.public_key is not None
        return False if self.options.mmap is None and checked else self.options.mmap

    def open(
        self, device: Any = "cpu", dtype: Optional[torch.dtype] = None, filter_func: Any = None
    ) -> TensorDeserializer:
        """The file, with nothing read but its index."""
        return TensorDeserializer(
            self.source,
            device,
            filter_func,
            dtype,
            lazy_load=True,
            verify_hash=self.options.verify or None,
            mmap=self._mmap,
            encryption=self.options.encryption,
            stream_options=self.place.stream_options,
            public_key=self.options.public_key,
            require_authenticated=self.options.require_authenticated,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors in host memory, with the dtypes that are stored."""
        if self.pickled:
            return read_pickled(self.source)[0]
        return load_file(
            self.source,
            verify=self.options.verify,
            encryption=self.options.encryption,
            mmap=self._mmap,
            stream_options=self.place.stream_options,
            public_key=self.options.public_key,
            require_authenticated=self.options.require_authenticated,
        )

    @property
    def encrypted(self) -> bool:
        if self.pickled:
            return False
        with self.open() as file:
            return bool(file._container.index.encrypted)


def find_weights(place: Place, stem: str, options: LoadOptions) -> Weights:
    """The weights under the usual names: ``.tensors``, else ``.safetensors``, else ``.bin`` if that is allowed.

    Args:
        place: The folder.
        stem: ``model``, ``diffusion_pytorch_model`` or ``adapter_model``.
        options: Of the load; ``variant`` and ``allow_pickle`` are used.

    Raises:
        FileNotFoundError: There are none; the message says what was looked for.
        ValueError: Only pickled ones, and they are not allowed.
        AuthenticationError: Only pickled ones, and somebody has to vouch for them.
    """
    if place.file is not None:
        if not place.has(place.file):
            raise FileNotFoundError(f"{place.label}: wanted {place.file}, found none")
        return Weights(place.weight(place.file), False, place, options)
    tried = []
    for extension in ("tensors", "safetensors"):
        for name in _names(stem, extension, options.variant):
            if place.has(name):
                _refuse_two_forms(place, name, extension)
                return Weights(place.weight(name), False, place, options)
            tried.append(name)
    for name in _names(_PICKLED_STEMS.get(stem, stem), "bin", options.variant):
        if not place.has(name):
            continue
        if not options.allow_pickle:
            raise ValueError(
                f"{place.label}: only {name} holds the weights, a pickle; allow_pickle=True reads it (weights only, "
                "nothing in it is run)"
            )
        if options.public_key is not None or Trust.of(None, None, options.require_authenticated).required:
            raise AuthenticationError(
                f"{place.label}: not authenticated: {name} is a pickle, for which nothing vouches"
            )
        if options.mmap:
            raise ValueError(f"{place.label}: mmap: {name} is a pickle, which cannot be mapped")
        return Weights(tuple(_pickled_files(place, name)), True, place, options)
    raise FileNotFoundError(f"{place.label}: wanted {', '.join(tried)}, found none of them")


def _refuse_two_forms(place: Place, name: str, extension: str) -> None:
    """Refuses to guess between a file and shards, where the folder is here and asking costs nothing."""
    if isinstance(place, LocalPlace) and name.endswith(f".{extension}") and place.has(f"{name}.index.json"):
        raise ValueError(
            f"{place.label}: found both {name} and {name}.index.json, two forms of one model: remove the other one"
        )


def _names(stem: str, extension: str, variant: Optional[str]) -> Iterator[str]:
    if variant is None:
        yield f"{stem}.{extension}"
        yield f"{stem}.{extension}.index.json"
        return
    yield f"{stem}.{variant}.{extension}"
    yield f"{stem}.{extension}.index.{variant}.json"
    yield f"{stem}.{variant}.{extension}.index.json"
    yield f"{stem}.{extension}.{variant}.index.json"


def _pickled_files(place: Place, name: str) -> Iterator[str]:
    path = str(place.weight(name))
    if "://" in path:
        raise ValueError(f"{place.label}: {name} is a pickle, which is read from local files and the hub's cache alone")
    if not name.endswith(".json"):
        yield path
        return
    weight_map = json.loads(Path(path).read_bytes())["weight_map"]
    for shard in sorted(set(weight_map.values())):
        if "/" in shard or "\\" in shard or ".." in shard:
            raise ValueError(f"{path}: wanted the name of a file in its folder, found {shard!r:.200}")
        yield str(place.weight(shard))

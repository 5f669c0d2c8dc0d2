"""Finds the weights of one model, a file or an index in a folder, and opens them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch

from tensorizer._files.contents import check_pickled, files_of_index, read_pickled
from tensorizer._io.call_options import NOBODY
from tensorizer._io.forms import choose
from tensorizer._io.model_files import find_model, find_pickled, form_stem, usual_names
from tensorizer._load.arguments import target_device
from tensorizer._load.open_file import OpenFile, open_file
from tensorizer._load.open_index import note_of
from tensorizer._load.reader import ReadOptions
from tensorizer._system.redaction import shown_location
from tensorizer.errors import AuthenticationError, FormatError
from tensorizer.integrations._hf.folders import LoadOptions, ModelFolder


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
        checked = self.options.verify.reads or bool(self.options.call.trust.public_keys)
        return False if self.options.mmap is None and checked else self.options.mmap

    def open(
        self,
        device: Any = "cpu",
        dtype: Optional[torch.dtype] = None,
        filter_func: Any = None,
    ) -> OpenFile:
        """Opens the file and reads only its index."""
        verify = self.options.verify.inside(self.folder.inside)
        how = ReadOptions(target_device(device), dtype, self._mmap).verifying(verify)
        return open_file(self.source, self.options.call._replace(stream=self.folder.call.stream), how, filter_func)

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
    if folder.file is not None:
        if not folder.has(folder.file):
            raise FileNotFoundError(f"{folder.label}: expected {folder.file}, got none")
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

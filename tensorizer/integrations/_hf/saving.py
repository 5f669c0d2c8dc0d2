"""Writes the same files as the libraries' own ``save_pretrained``, but lets this package write the weights."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch

from tensorizer._files.contents import (
    Contents,
    check_state_dict,
    contents_of_file,
    module_contents,
    state_dict_contents,
)
from tensorizer._files.copy import remove_files
from tensorizer._files.write import WriteOptions, format_of, write_contents
from tensorizer._io.call_options import CallOptions
from tensorizer._io.forms import origin_in
from tensorizer._io.model_files import is_quantised_by_torchao, is_weight, other_format_beside, other_forms
from tensorizer._io.shards import ORIGIN_KEY, origin_text
from tensorizer._io.sinks import WholeFile
from tensorizer._io.uri import folder_uri, local_path
from tensorizer._load.compare import shown
from tensorizer._load.open_file import open_whole
from tensorizer._progress import ProgressArgument
from tensorizer._save.compiled import unwrapped
from tensorizer._save.records import walk_module
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import counted
from tensorizer.errors import UnsupportedContentError
from tensorizer.integrations._hf.folders import MANIFEST
from tensorizer.integrations._hf.models import is_of
from tensorizer.integrations._hf.objects import stem_of

logger = logging.getLogger("tensorizer.integrations.huggingface")


class SavedFolder(contextlib.AbstractContextManager["SavedFolder"]):
    """The target folder or prefix. Small files are written to a temporary folder first and copied last.

    Args:
        target: A path or URI.
        options: Options for writing files of weights.
        call: Options for opening any file.
        metadata: Metadata for the files of weights, beside our own.
        variant: A word in their names.
        as_library: Whether models of transformers get the names of the library's own files.
        is_copy: Whether a library has just written the same weights to the local folder. The metadata then say so.
    """

    def __init__(
        self,
        target: Any,
        options: WriteOptions,
        call: CallOptions,
        metadata: Mapping[str, str],
        variant: Optional[str],
        as_library: bool,
        is_copy: bool = False,
    ) -> None:
        path = local_path(target)
        self.remote = path is None
        self._root = folder_uri(target) if path is None else path
        self._options, self._call = options, call
        self._metadata, self._variant, self.as_library = metadata, variant, as_library
        self._is_copy = is_copy and not self.remote
        self.format = options.format
        self._temporary = tempfile.TemporaryDirectory(prefix="tensorizer-")
        self.staging = Path(self._temporary.name)
        self._weights: list[str] = []

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def join(self, name: str) -> str:
        return f"{self._root}/{name}" if self.remote else os.path.join(self._root, *name.split("/"))

    def write_state(
        self, state: Mapping[str, torch.Tensor], subfolder: str, stem: str, more: Mapping[str, str]
    ) -> None:
        self._write(state_dict_contents(check_state_dict(state), self._texts(more)), subfolder, stem)

    def write_model(self, model: Any, subfolder: str, stem: str, more: Mapping[str, str]) -> None:
        """Writes the state dict of a model; as a module, for ``load_into_module``, if it has only module tensors."""
        state = _state_of(model)
        listed = {shown(item.name) for item in walk_module(model, False)}
        if self._options.max_shard_size is not None or listed != set(state):
            self.write_state(state, subfolder, stem, more)
        else:
            self._write(module_contents(model, self._texts(more), False), subfolder, stem)

    def write_file(self, source: Path, subfolder: str, stem: str) -> None:
        """Writes the content of a file that a library has written, in the format of this save."""
        with open_whole(source, CallOptions()) as file:
            self._write(contents_of_file(file, verify=False), subfolder, stem)

    def _texts(self, more: Mapping[str, str]) -> dict[str, str]:
        return {"format": "pt", **more, **self._metadata}

    def _write(self, contents: Contents, subfolder: str, stem: str) -> None:
        stem = f"{stem}.{self._variant}" if self._variant else stem
        name = f"{stem}.{self.format}"
        name = f"{subfolder}/{name}" if subfolder else name
        self._weights.append(name)
        path = self.join(name)
        if not self.remote:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        beside = other_format_beside(path, self._call)
        if beside and self._is_copy:
            note = origin_text(origin_in(os.path.dirname(path), beside[0]))
            contents = contents._replace(metadata={**(contents.metadata or {}), ORIGIN_KEY: note})
        write_contents(contents, path, self._options, self._call)
        if beside and not self._is_copy:
            logger.warning(
                "%s: %s is written beside %s, which is not changed: loads of the folder raise an error that names both "
                "until one of them is removed",
                shown_location(self._root),
                name,
                ", ".join(beside),
            )
        if self._options.max_shard_size is None:
            # Removes shards of an earlier save if the model is one file now; a sharded save removes them itself.
            remove_files(other_forms(path, [path], self._call), self._call)

    def finish(self) -> None:
        """Writes the small files."""
        names = sorted(path.relative_to(self.staging).as_posix() for path in _files(self.staging))
        if any("/" in name for name in (*names, *self._weights)):
            text = json.dumps(sorted({*names, *self._weights}), indent=2) + "\n"
            (self.staging / MANIFEST).write_text(text, encoding="utf-8")
            names.append(MANIFEST)
        for name in names:
            if not self.remote:
                os.makedirs(os.path.dirname(self.join(name)), exist_ok=True)
            with WholeFile(self.join(name), self._call) as file:
                file.append((self.staging / name).read_bytes())


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def save_folder(
    obj: Any,
    folder: Any,
    *,
    tokenizer: Any = None,
    metadata: Optional[Mapping[str, str]] = None,
    format: str = "tensors",
    ties: str = "once",
    encryption: Any = None,
    max_shard_size: Union[str, int, None] = None,
    variant: Optional[str] = None,
    names: str = "model",
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
    is_copy: bool = False,
    is_plain: bool = False,
) -> None:
    """Implements ``save_pretrained``; `is_copy` as for :class:`SavedFolder`.

    With `is_plain`, the object is a module without a library: only its weights and the tokenizer are written.
    """
    if names not in ("model", "library"):
        raise ValueError(f"names: expected 'model' or 'library', got {names!r}")
    options = WriteOptions(format=format_of("", format), ties=ties, max_shard_size=max_shard_size)
    call = CallOptions.to_write(encryption, stream_options, progress)
    with SavedFolder(folder, options, call, dict(metadata or {}), variant, names == "library", is_copy) as where:
        if is_plain:
            _save_module(obj, tokenizer, where)
        else:
            _save_object(obj, tokenizer, where)


def _save_module(module: torch.nn.Module, tokenizer: Any, where: SavedFolder) -> None:
    where.write_model(unwrapped(module), "", "model", {})
    if tokenizer is not None:
        tokenizer.save_pretrained(str(where.staging))
    where.finish()


def _save_object(obj: Any, tokenizer: Any, where: SavedFolder) -> None:
    """Writes a model, adapter, pipeline or sentence transformer.

    Raises:
        TypeError: The object is of another kind.
        UnsupportedContentError: The tensors do not contain the layout of the weights (torchao).
    """
    if isinstance(obj, torch.nn.Module):
        obj = unwrapped(obj)
    if is_of("sentence_transformers", obj):
        _save_sentence_transformer(obj, where)
    elif is_of("peft", obj):
        _save_adapters(obj, where)
    elif hasattr(obj, "components") and hasattr(obj, "save_config"):
        _save_pipeline(obj, where)
    elif isinstance(obj, torch.nn.Module) and hasattr(obj, "config"):
        _save_model(obj, where, "")
    else:
        raise TypeError(
            "expected a model of transformers or diffusers, a PeftModel, a pipeline or a SentenceTransformer, "
            f"got {type(obj).__name__}"
        )
    if tokenizer is not None:
        tokenizer.save_pretrained(str(where.staging))
    where.finish()


def _save_model(model: Any, where: SavedFolder, subfolder: str) -> None:
    folder = where.staging / subfolder
    folder.mkdir(parents=True, exist_ok=True)
    more = {"architecture": type(model).__name__, "names": "model"}
    if hasattr(model, "save_config"):  # diffusers
        model.save_config(folder)
    else:
        import transformers

        more["transformers_version"] = transformers.__version__
        _check_quantiser(model)
        _config_to_save(model).save_pretrained(folder)
        if hasattr(model, "can_generate") and model.can_generate():
            model.generation_config.save_pretrained(folder)
        if where.as_library:
            _write_as_the_library(model, where, subfolder)
            return
    where.write_model(model, subfolder, stem_of(model), more)


def _write_as_the_library(model: Any, where: SavedFolder, subfolder: str) -> None:
    """Lets the library write, and converts its file: only the library knows the names that all its releases accept."""
    with tempfile.TemporaryDirectory(prefix="tensorizer-") as folder:
        model.save_pretrained(folder, max_shard_size="1000TB")
        where.write_file(Path(folder, "model.safetensors"), subfolder, "model")


def _state_of(model: Any) -> dict[str, torch.Tensor]:
    """The state dict without the tensors that its class leaves out and without values that are not tensors."""
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {n: t for n, t in model.state_dict().items() if n not in left_out and isinstance(t, torch.Tensor)}
    without = [name for name, tensor in state.items() if tensor.is_meta]
    if without:
        raise ValueError(
            f"{counted(len(without), 'tensor')} of {type(model).__name__} without data here: {', '.join(without[:5])}"
        )
    return state


def _config_to_save(model: Any) -> Any:
    """The configuration as the library writes it, with the class and the dtype of the model."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    dtype = str(model.dtype).replace("torch.", "")
    setattr(config, "dtype" if "dtype" in config.to_dict() else "torch_dtype", dtype)
    return config


def _check_quantiser(model: Any) -> None:
    if is_quantised_by_torchao(model.config):
        raise UnsupportedContentError(
            "torchao keeps the layout of its tensors in the metadata of .safetensors files; save this model with its "
            "own save_pretrained"
        )


def _save_adapters(model: Any, where: SavedFolder) -> None:
    from peft import get_peft_model_state_dict

    names = list(model.peft_config)
    for name in names:
        subfolder = "" if name == "default" else name
        folder = where.staging / subfolder
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(model.peft_config[name])
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(getattr(model, "config", None), "name_or_path", None)
        config.save_pretrained(str(folder))
        state = get_peft_model_state_dict(model, adapter_name=name)
        where.write_state(state, subfolder, "adapter_model", {"peft_type": str(config.peft_type)})


def _save_pipeline(pipeline: Any, where: SavedFolder) -> None:
    pipeline.save_config(where.staging)
    for name, component in pipeline.components.items():
        if component is None:
            continue
        if isinstance(component, torch.nn.Module) and hasattr(component, "config"):
            _save_model(unwrapped(component), where, name)
        elif hasattr(component, "save_pretrained"):
            component.save_pretrained(where.staging / name)


def _save_sentence_transformer(model: Any, where: SavedFolder) -> None:
    if where.format != "safetensors":
        raise UnsupportedContentError(
            f"a SentenceTransformer reads its weights from .safetensors files only, expected format='safetensors', "
            f"got {where.format!r}"
        )
    model.save_pretrained(str(where.staging), create_model_card=False, safe_serialization=True)
    for path in sorted(_files(where.staging)):
        if path.suffix == ".safetensors":
            subfolder = path.parent.relative_to(where.staging).as_posix()
            where.write_file(path, "" if subfolder == "." else subfolder, path.stem)
            path.unlink()
    left = [path.name for path in _files(where.staging) if is_weight(path.name)]
    if left:
        raise UnsupportedContentError(f"weights in a form that is not converted: {', '.join(left)}")

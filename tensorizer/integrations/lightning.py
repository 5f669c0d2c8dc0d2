"""Lightning: checkpoints of a ``Trainer`` or ``Fabric`` as ``.tensors`` files.

Install ``lightning`` or ``lightning-fabric``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Container, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Optional, Union, cast

import torch

from tensorizer._encryption import DecryptionParams, EncryptionParams
from tensorizer._files.contents import not_storable
from tensorizer._files.copy import remove_files
from tensorizer._io.call_options import CallOptions
from tensorizer._io.uri import check_is_path, scheme_of
from tensorizer._save.records import place_of
from tensorizer._signing import PublicKeyArgument
from tensorizer._system import locks
from tensorizer._system.devices import empty, one_device
from tensorizer._system.redaction import shown_location
from tensorizer.deserializer import TensorDeserializer
from tensorizer.distributed._checkpoint.arrays import array_of, bytes_of, is_array_of_numbers, tensor_of
from tensorizer.distributed._checkpoint.json_values import (
    NotSimple,
    Place,
    encoded,
    from_json,
    load_harmless,
    load_vetted,
    torch_saved,
)
from tensorizer.errors import AuthenticationError, FormatError, named
from tensorizer.serializer import TensorSerializer
from tensorizer.stream_io import open_stream

try:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO  # only the package lightning-fabric is installed

__all__ = ["TensorizerCheckpointIO", "load_from_checkpoint"]

_KEY = "lightning.checkpoint"
_ZIP = b"PK\x03\x04"  # the first bytes of files of torch.save

logger = logging.getLogger(__name__)

# Classes of Lightning that a checkpoint may contain.
_MADE = ("LightningModule", "LightningDataModule")

MapLocation = Union[str, torch.device, Mapping[str, Any], Callable[[Any, str], Any], None]


class TensorizerCheckpointIO(CheckpointIO):  # type: ignore[misc]  # mypy is not shown lightning
    """Keeps the checkpoints of ``Trainer(plugins=[…])`` and ``Fabric(plugins=[…])`` in one ``.tensors`` file each.

    Tensors and NumPy arrays of numbers are records of the file, under their paths in the checkpoint, such as
    ``state_dict.layer.weight``. Tied weights are stored once, and are one tensor after loading. Numbers, texts, bytes,
    and lists, tuples and dicts of them are JSON in its metadata. Other objects are
    stored as ``torch.save`` stores them, and read with ``torch.load(weights_only=True)`` unless the caller trusts the
    file. A file appears when it is complete.
    ``load_from_checkpoint`` of a ``LightningModule`` reads with ``torch.load``, which does not know these files: use
    :func:`load_from_checkpoint` of this module.

    Lightning never calls this class under strategies whose ranks write shards (FSDP, model parallel). With them, put
    :func:`tensorizer.distributed.dcp_default` around ``trainer.fit``, or around ``fabric.save`` and ``fabric.load``.

    Args:
        async_save: Saves in the background. Tensors are copied to host memory before training continues, so they take
            no memory of the device. One save runs at a time. The next save, and :meth:`teardown`, wait for it and raise
            its error. The error is also logged, because after ``fit`` there may be no next call.
        encryption: Encrypts the files.
        decryption: The key of encrypted files.
        verify_hash: Compares the tensors of a checkpoint with their digests when it is loaded.
        public_key: Keys, one of which must have signed a checkpoint that is loaded, as for
            :class:`tensorizer.TensorDeserializer`. Loading a checkpoint of torch then raises.
        stream_options: Keywords for opening ``s3://`` URIs; ``storage_options`` of a save take precedence.

    Examples:
        >>> from tensorizer.integrations.lightning import TensorizerCheckpointIO
        >>> storage = TensorizerCheckpointIO()
        >>> storage.save_checkpoint({"epoch": 3, "state_dict": {"weight": torch.ones(4)}}, "last.ckpt")
        >>> storage.load_checkpoint("last.ckpt")["epoch"]
        3
    """

    def __init__(
        self,
        *,
        async_save: bool = False,
        encryption: Optional[EncryptionParams] = None,
        decryption: Optional[DecryptionParams] = None,
        verify_hash: bool = False,
        stream_options: Optional[Mapping[str, Any]] = None,
        public_key: PublicKeyArgument = None,
    ) -> None:
        super().__init__()
        self._public_key = public_key
        self._encryption, self._decryption = encryption, decryption
        self._verify = verify_hash
        self._stream_options = dict(stream_options or {})
        self._thread = ThreadPoolExecutor(1, "tensorizer-lightning") if async_save else None
        self._async_save = async_save
        self._pending: Optional[Future[None]] = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        locks.makers[self] = threading.Lock

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the plugin for spawned ranks, without the objects that belong to this process."""
        self._wait()
        return {**self.__dict__, "_thread": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        locks.makers[self] = threading.Lock

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Union[str, os.PathLike[str]], storage_options: Optional[Any] = None
    ) -> None:
        """Writes a checkpoint, in the background with ``async_save``.

        Args:
            checkpoint: What the trainer collected.
            path: A local path, or an ``s3://`` URI.
            storage_options: Keywords for opening the URI; they take precedence over the constructor's.

        Raises:
            OSError: It cannot be written, or the save before this one could not.
        """
        check_is_path(path)
        options = {**self._stream_options, **(storage_options or {})}
        if not self._async_save:
            self._write(*_taken_apart(checkpoint), path, options)
            return
        self._wait()
        node, tensors = _taken_apart(checkpoint)
        staged = {name: _on_host(tensor) for name, tensor in tensors.items()}
        if scheme_of(path) is None:  # callbacks link to the file before it exists
            with contextlib.suppress(OSError):  # the save raises the error
                os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with self._lock:
            if self._thread is None:  # after a teardown
                self._thread = ThreadPoolExecutor(1, "tensorizer-lightning")
            self._pending = self._thread.submit(self._write_behind, node, staged, path, options)

    def _write_behind(self, node: Any, tensors: dict[str, torch.Tensor], path: Any, options: Mapping[str, Any]) -> None:
        try:
            self._write(node, tensors, path, options)
        except BaseException as error:  # nothing waits for a save after the last teardown
            logger.error("%s was not saved: %s", shown_location(path), error)
            raise

    def _write(self, node: Any, tensors: dict[str, torch.Tensor], path: Any, options: Mapping[str, Any]) -> None:
        with TensorSerializer(
            path,
            encryption=self._encryption,
            stream_options=options or None,
            metadata={_KEY: json.dumps(node, separators=(",", ":"))},
        ) as file:
            file.write_state_dict(tensors or {"empty": torch.zeros(1)})

    def load_checkpoint(
        self,
        path: Union[str, os.PathLike[str]],
        map_location: MapLocation = None,
        weights_only: Optional[bool] = None,
    ) -> dict[str, Any]:
        """Returns the checkpoint as you passed it to :meth:`save_checkpoint`. Files of ``torch.save`` load too.

        So you can resume a run that began with Lightning's own plugin. Such files are read by ``torch.load`` with the
        `weights_only` that you pass.

        Args:
            path: Where it is.
            map_location: As for ``torch.load``; tensors are saved as if they were on the CPU. ``None`` is the CPU, from
                where Lightning's strategies move them.
            weights_only: ``False`` unpickles objects that are more than simple values: only for trusted files.

        Raises:
            FileNotFoundError: There is no such file.
            FormatError: The file is not a checkpoint of this class.
            RuntimeError: `map_location` is CUDA, and CUDA is not available. Nothing was read then.
            pickle.UnpicklingError: It holds more than simple values, and `weights_only` is not ``False``.
        """
        self._wait()
        if isinstance(map_location, (str, torch.device)):
            one_device(map_location)  # before anything is read
        options = (self._stream_options or None) if scheme_of(path) is not None else None
        where: Any = map_location
        with open_stream(path, "rb", **(options or {})) as stream:
            if stream.read(len(_ZIP)) == _ZIP:
                if self._public_key is not None:
                    raise AuthenticationError(f"{shown_location(path)}: not signed: a checkpoint of torch")
                stream.seek(0)
                found: dict[str, Any] = torch.load(cast(IO[bytes], stream), where, weights_only=weights_only)
                return found
        with TensorDeserializer(
            path,
            device="cpu",
            encryption=self._decryption,
            verify_hash=self._verify or None,
            stream_options=options,
            public_key=self._public_key,
        ) as file:
            shown = shown_location(path)
            text = file.metadata.get(_KEY)
            if text is None:
                raise FormatError(f"{shown}: expected a checkpoint of TensorizerCheckpointIO, got other tensors")
            leaves: dict[tuple[str, str], tuple[Place, list[Any]]] = {}

            def referred_to(content: Any, place: Place) -> tuple[str, str]:
                ((kind, name),) = content.items()
                name, *described = name if kind == "array" else (name,)
                if kind not in ("tensor", "array", "saved") or name not in file:
                    raise ValueError(f"expected a tensor of the file, got {content!r:.80}")
                leaves.setdefault((kind, name), (place, described))
                return kind, name

            def loaded(kind: str, name: str, place: Place, described: list[Any]) -> Any:
                tensor = file[name].detach()
                if kind == "tensor":
                    return _mapped(tensor, map_location)
                if kind == "array":
                    try:
                        return array_of(bytes_of(tensor.numpy()), *described)
                    except (ValueError, TypeError) as error:
                        raise FormatError(f"{shown}: tensor {name!r:.80}: {error}") from None
                if tensor.dtype != torch.uint8:
                    raise FormatError(f"{shown}: tensor {name!r:.80}: expected bytes, got {tensor.dtype}")
                data = io.BytesIO(tensor.numpy().tobytes())
                if weights_only is False:
                    return torch.load(data, map_location=where, weights_only=False)
                value = load_vetted(".".join(map(str, place)), data, "weights_only=False")
                return load_harmless(torch_saved(value), where)

            # Decoded twice: errors in the text are errors of the file, but errors of leaves are not.
            named(shown, from_json, text, referred_to)
            values = {(kind, name): loaded(kind, name, *about) for (kind, name), about in leaves.items()}
            result: dict[str, Any] = named(shown, from_json, text, lambda *leaf: values[referred_to(*leaf)])
        return result

    def remove_checkpoint(self, path: Union[str, os.PathLike[str]]) -> None:
        """Deletes a checkpoint. A missing one is no error."""
        self._wait()
        check_is_path(path)
        with contextlib.suppress(FileNotFoundError):
            remove_files([os.fspath(path)], CallOptions.to_write(stream_options=self._stream_options))

    def teardown(self) -> None:
        """Waits for a save in the background, and raises its error."""
        self._leave_to_parent()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        self._wait()

    def _leave_to_parent(self) -> None:
        """Drops thread and save in a forked child: only the parent can wait for them."""
        if self._process != os.getpid():
            self._process, self._thread, self._pending = os.getpid(), None, None

    def _wait(self) -> None:
        self._leave_to_parent()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def load_from_checkpoint(
    module_class: Any,
    path: Union[str, os.PathLike[str]],
    *,
    map_location: MapLocation = None,
    strict: Optional[bool] = None,
    weights_only: Optional[bool] = None,
    decryption: Optional[DecryptionParams] = None,
    verify_hash: bool = False,
    public_key: PublicKeyArgument = None,
    stream_options: Optional[Mapping[str, Any]] = None,
    **kwargs: Any,
) -> Any:
    """Makes a ``LightningModule`` from a checkpoint of :class:`TensorizerCheckpointIO`, with its hyperparameters.

    It does what ``module_class.load_from_checkpoint(path)`` does for files of ``torch.save``, and reads these as well.
    A ``LightningDataModule`` works too.

    Args:
        module_class: The class to make.
        path: A local path or URI.
        map_location: As for :meth:`TensorizerCheckpointIO.load_checkpoint`. Default: the CPU.
        strict: Whether the names in the checkpoint must be those of the module. Default: as the module says
            (``strict_loading``), which is ``True`` unless you set it.
        weights_only: ``False`` unpickles objects that are more than simple values: only for trusted files.
        decryption: The key of an encrypted file.
        verify_hash: Compares the tensors with their digests.
        public_key: Keys, one of which must have signed the file, as for :class:`tensorizer.TensorDeserializer`.
        stream_options: Keywords for opening ``s3://`` URIs.
        **kwargs: Arguments of the class; they take precedence over the stored hyperparameters.

    Returns:
        The module, on the device of its tensors. It is in training mode, as Lightning leaves it.

    Raises:
        FileNotFoundError: There is no such file.
        FormatError: The file is not a checkpoint of :class:`TensorizerCheckpointIO`.
        RuntimeError: With `strict`, names or shapes of the module and of the checkpoint differ.
        pickle.UnpicklingError: As for :meth:`TensorizerCheckpointIO.load_checkpoint`.

    Examples:
        >>> from lightning import LightningModule
        >>> from tensorizer.integrations.lightning import TensorizerCheckpointIO, load_from_checkpoint
        >>> class Module(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 2)
        >>> checkpoint = {"state_dict": Module().state_dict(), "pytorch-lightning_version": "2.0.0"}
        >>> TensorizerCheckpointIO().save_checkpoint(checkpoint, "last.ckpt")
        >>> model = load_from_checkpoint(Module, "last.ckpt")
    """
    reader = TensorizerCheckpointIO(
        decryption=decryption, verify_hash=verify_hash, public_key=public_key, stream_options=stream_options
    )
    # From the package of the class: lightning, or pytorch_lightning.
    names = [base.__module__ for base in module_class.__mro__ if base.__name__ in _MADE]
    if not names:
        raise TypeError(f"module_class: expected a LightningModule or LightningDataModule, got {module_class!r}")
    saving = importlib.import_module(f"{names[0].rpartition('.')[0]}.saving")
    checkpoint = saving._pl_migrate_checkpoint(reader.load_checkpoint(path, map_location, weights_only))
    checkpoint.setdefault(module_class.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    if "LightningModule" not in {base.__name__ for base in module_class.__mro__}:
        return saving._load_state(module_class, checkpoint, **kwargs)
    model = saving._load_state(module_class, checkpoint, strict=strict, **kwargs)
    tensors = (tensor for tensor in checkpoint["state_dict"].values() if isinstance(tensor, torch.Tensor))
    first = next(tensors, None)
    return model if first is None else model.to(first.device)


def _taken_apart(checkpoint: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The JSON text of a checkpoint, and the tensors that it refers to, by their paths.

    A tensor or array that occurs in several places is one record, under its first path. So are tied weights, which are
    several tensors over the same memory in a state dict.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[Hashable, Any] = {}  # the node of each object, by its id, and of the memory of each tensor

    def leaf(value: Any, place_of_value: Place) -> Any:
        if id(value) in names:
            return names[id(value)]
        name = _unused_name(place_of_value, tensors)
        if isinstance(value, torch.Tensor) and not not_storable({name: value}):
            place = place_of(value) or id(value)
            if place not in names:
                names[place] = {"tensor": name}
                tensors[name] = value.detach()
            names[id(value)] = names[place]
            return names[place]
        if is_array_of_numbers(value):
            names[id(value)] = {"array": [name, value.dtype.str, list(value.shape)]}
            tensors[name] = tensor_of(value)
            return names[id(value)]
        try:
            content = torch_saved(value)
        except Exception as error:  # objects of other programs may raise anything when they are pickled
            raise NotSimple(f"a {type(value).__name__} cannot be stored: {error}") from error
        tensors[name] = torch.frombuffer(bytearray(content.getbuffer()), dtype=torch.uint8)
        return {"saved": name}

    try:
        return encoded(checkpoint, leaf), tensors
    except NotSimple as error:
        raise TypeError(f"checkpoint{error}") from error


def _unused_name(place: Place, used: Container[str]) -> str:
    """The steps of a path joined by dots, as in names of modules, and a number if that name is taken."""
    # A key of a dict may be too long for a name in a file, or not be Unicode.
    path = ".".join(map(str, place))[:1000].encode("utf-8", "replace").decode() or "checkpoint"
    numbered = (f"{path}~{n}" for n in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if name not in used)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A private copy in host memory, which is pinned for tensors of a GPU."""
    host = empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _mapped(tensor: torch.Tensor, map_location: MapLocation) -> torch.Tensor:
    if map_location is None:
        return tensor
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get("cpu", "cpu"))
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)
    return tensor.to(map_location)

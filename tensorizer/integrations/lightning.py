"""Lightning: checkpoints of a ``Trainer`` or ``Fabric`` as ``.tensors`` files, in one piece or in shards."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional, Union

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tensorizer._format.payloads import stored_dtype
from tensorizer._io.uri import scheme_of
from tensorizer.deserializer import TensorDeserializer
from tensorizer.distributed import TensorizerReader, TensorizerWriter, dcp_default
from tensorizer.distributed._checkpoint.folder import Folder
from tensorizer.distributed._checkpoint.values import decoded, encoded, load_vetted, saved
from tensorizer.encryption import DecryptionParams, EncryptionParams
from tensorizer.errors import FormatError
from tensorizer.serializer import TensorSerializer

__all__ = ["TensorizerCheckpointIO", "TensorizerFSDPStrategy", "TensorizerModelParallelStrategy"]

_KEY = "lightning.checkpoint"

MapLocation = Union[str, torch.device, Mapping[str, Any], Callable[[Any, str], Any], None]


class TensorizerCheckpointIO(CheckpointIO):  # type: ignore[misc]  # mypy is not shown lightning
    """Keeps the checkpoints of ``Trainer(plugins=[…])`` and ``Fabric(plugins=[…])`` in one ``.tensors`` file each.

    Tensors are records of the file, everything else is JSON in its metadata, except for objects that are made of more
    than numbers, texts, bytes, lists, tuples and dicts: those are stored as ``torch.save`` does, and read with
    ``torch.load(weights_only=True)`` unless the caller trusts the file. A file appears complete or not at all.

    Strategies that write shards themselves have no plugin for checkpoints: :class:`TensorizerFSDPStrategy` and
    :class:`TensorizerModelParallelStrategy` take their place, and for ``Fabric``
    :func:`tensorizer.distributed.dcp_default` around ``fabric.save`` and ``fabric.load``.

    Args:
        async_save: Saves in the background. Tensors are copied to host memory before training goes on, so that no
            memory of the device is taken for them. One save runs at a time: the next one waits for it, and raises its
            error, as :meth:`teardown` does.
        encryption: Encrypts the files.
        decryption: The key of encrypted files.
        verify_hash: Compares the tensors of a checkpoint with their digests when it is loaded.
        stream_options: Keywords for opening ``s3://`` URIs; ``storage_options`` of a save are put over them.
    """

    def __init__(
        self,
        *,
        async_save: bool = False,
        encryption: Optional[EncryptionParams] = None,
        decryption: Optional[DecryptionParams] = None,
        verify_hash: bool = False,
        stream_options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        super().__init__()
        self._encryption, self._decryption = encryption, decryption
        self._verify = verify_hash
        self._stream_options = dict(stream_options or {})
        self._thread = ThreadPoolExecutor(1, "tensorizer-lightning") if async_save else None
        self._async_save = async_save
        self._pending: Optional[Future[None]] = None
        self._lock = threading.Lock()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Union[str, os.PathLike[str]], storage_options: Optional[Any] = None
    ) -> None:
        """Writes a checkpoint; in the background where the constructor says so.

        Args:
            checkpoint: What the trainer collected.
            path: A local path, or an ``s3://`` URI.
            storage_options: Keywords for opening the URI, over those of the constructor.

        Raises:
            OSError: It cannot be written, or the save before this one could not.
        """
        options = {**self._stream_options, **(storage_options or {})}
        if not self._async_save:
            self._write(*_taken_apart(checkpoint), path, options)
            return
        self._wait()
        node, tensors = _taken_apart(checkpoint)
        staged = {name: _on_host(tensor) for name, tensor in tensors.items()}
        with self._lock:
            if self._thread is None:  # after a teardown
                self._thread = ThreadPoolExecutor(1, "tensorizer-lightning")
            self._pending = self._thread.submit(self._write, node, staged, path, options)

    def _write(self, node: Any, tensors: dict[str, torch.Tensor], path: Any, options: Mapping[str, Any]) -> None:
        remote = scheme_of(path) is not None
        target = path if remote else os.fspath(path)
        with TensorSerializer(
            target,
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
        """The checkpoint, as it was given to :meth:`save_checkpoint`.

        Args:
            path: Where it is.
            map_location: As for ``torch.load``; tensors are saved as if they were on the CPU. ``None`` is the CPU, from
                where Lightning's strategies move them.
            weights_only: ``False`` unpickles objects that are more than simple values: for trusted files alone.

        Raises:
            FileNotFoundError: There is none.
            FormatError: The file is not a checkpoint of this class.
            pickle.UnpicklingError: It holds more than simple values, and `weights_only` is not ``False``.
        """
        self._wait()
        options = self._stream_options or None
        with TensorDeserializer(
            os.fspath(path),
            device="cpu",
            encryption=self._decryption,
            verify_hash=self._verify,
            stream_options=options if scheme_of(path) is not None else None,
        ) as file:
            text = file.metadata.get(_KEY)
            if text is None:
                raise FormatError(
                    f"{os.fspath(path)}: wanted a checkpoint of TensorizerCheckpointIO, found other tensors"
                )
            moved: dict[str, torch.Tensor] = {}

            def leaf(content: Any) -> Any:
                name = content["tensor"] if "tensor" in content else content["saved"]
                if "tensor" in content:
                    if name not in moved:
                        moved[name] = _mapped(file[name].detach(), map_location)
                    return moved[name]
                data = io.BytesIO(file[name].detach().numpy().tobytes())
                where: Any = map_location
                if weights_only is False:
                    return torch.load(data, map_location=where, weights_only=False)
                return torch.load(saved(load_vetted(name, data)), map_location=where, weights_only=True)

            result: dict[str, Any] = decoded(json.loads(text), leaf)
        return result

    def remove_checkpoint(self, path: Union[str, os.PathLike[str]]) -> None:
        """Deletes a checkpoint; one that is not there is no error."""
        self._wait()
        folder, name = os.path.split(os.fspath(path))
        Folder.at(folder or ".", self._stream_options or None).delete([name])

    def teardown(self) -> None:
        """Waits for a save in the background, and raises its error."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _taken_apart(checkpoint: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """JSON for a checkpoint, and the tensors that it names; one tensor in several places is one."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def leaf(value: Any) -> Any:
        if id(value) in names:
            return {"tensor": names[id(value)]}
        name = str(len(tensors))
        if isinstance(value, torch.Tensor) and _is_storable(name, value):
            names[id(value)] = name
            tensors[name] = value.detach()
            return {"tensor": name}
        tensors[name] = torch.frombuffer(bytearray(saved(value).getbuffer()), dtype=torch.uint8)
        return {"saved": name}

    return encoded(checkpoint, leaf), tensors


def _is_storable(name: str, tensor: torch.Tensor) -> bool:
    if tensor.is_meta:
        return False
    try:
        stored_dtype(name, tensor)
    except (NotImplementedError, ValueError):
        return False
    return True


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned for tensors of a GPU, that nobody else changes."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
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


# The tensor of a sharded checkpoint that holds everything but tensors of model and optimizers.
_REST = "lightning"
# The file by which Lightning knows the folder of a sharded checkpoint.
_SIGN = "meta.pt"


class _ShardedCheckpoints:
    """Saves and loads of a strategy whose ranks write shards. Goes before the strategy."""

    _model_key: str  # under which the strategy looks for the model

    def __init__(
        self,
        *args: Any,
        writer: Optional[Mapping[str, Any]] = None,
        reader: Optional[Mapping[str, Any]] = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        TensorizerWriter(None, **(writer or {}))  # wrong keywords fail here
        TensorizerReader(None, **(reader or {}))
        self._writer, self._reader = dict(writer or {}), dict(reader or {})

    def _is_sharding(self) -> bool:
        raise NotImplementedError

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Union[str, os.PathLike[str]], storage_options: Optional[Any] = None
    ) -> None:
        """Writes a checkpoint; all ranks call it.

        Args:
            checkpoint: What the trainer collected.
            filepath: A local folder.
            storage_options: Has to be ``None``.

        Raises:
            TypeError: `storage_options` were given.
            torch.distributed.checkpoint.api.CheckpointException: A rank could not write; with the cause, on all ranks.
        """
        strategy: Any = self
        if storage_options is not None or not self._is_sharding():
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        path = Path(strategy.broadcast(filepath))
        first = strategy.global_rank == 0
        state = {self._model_key: checkpoint.pop("state_dict")}
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer
        rest = strategy.broadcast(saved(checkpoint).getvalue() if first else None)
        state[_REST] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        if first and path.is_file():
            path.unlink()
        state_dict_saver.save(state, storage_writer=TensorizerWriter(path, **self._writer))
        if first:
            (path / _SIGN).write_bytes(rest)

    def load_checkpoint(
        self, checkpoint_path: Union[str, os.PathLike[str]], weights_only: Optional[bool] = None
    ) -> dict[str, Any]:
        """Fills model and optimizers; checkpoints that Lightning's own strategy wrote load too.

        Args:
            checkpoint_path: Where it is.
            weights_only: ``False`` unpickles objects that are more than simple values: for trusted files alone.

        Returns:
            Everything else.

        Raises:
            ValueError: There is no checkpoint.
            pickle.UnpicklingError: It holds more than simple values, and `weights_only` is not ``False``.
        """
        strategy: Any = self
        path = Path(strategy.broadcast(checkpoint_path))
        with dcp_default(reader=self._reader):
            found: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)  # type: ignore[misc]
        reader = TensorizerReader(path, **self._reader)
        try:
            saved_as = reader.read_metadata().state_dict_metadata.get(_REST)
        except (FileNotFoundError, FormatError, NotADirectoryError):  # the strategy's own
            return found
        if not isinstance(saved_as, TensorStorageMetadata):
            return found
        # The sign is not part of the checkpoint's one step: a save that was killed may leave that of an older one.
        rest = {_REST: torch.empty(saved_as.size, dtype=torch.uint8)}
        state_dict_loader.load(rest, storage_reader=reader)
        data = io.BytesIO(rest[_REST].numpy().tobytes())
        content = torch.load(data, weights_only=False) if weights_only is False else load_vetted(_REST, data)
        return dict(content)


class TensorizerFSDPStrategy(_ShardedCheckpoints, FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` for a ``Trainer``, whose checkpoints are those of :class:`.TensorizerWriter`.

    A checkpoint is a folder with one ``.tensors`` file per rank and a marker; everything of it, optimizers and loops
    included, becomes valid with the marker, in one step. It loads with other numbers of ranks.

    Args:
        *args: As for ``FSDPStrategy``.
        writer: Keywords of :class:`tensorizer.distributed.TensorizerWriter`, such as ``encryption``.
        reader: Keywords of :class:`tensorizer.distributed.TensorizerReader`.
        **options: As for ``FSDPStrategy``; ``state_dict_type`` is ``"sharded"`` unless it is given. A ``"full"`` one is
            saved as ``FSDPStrategy`` does.
    """

    _model_key = "model"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"state_dict_type": "sharded", **options})

    def _is_sharding(self) -> bool:
        return bool(self._state_dict_type == "sharded")


class TensorizerModelParallelStrategy(_ShardedCheckpoints, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), as :class:`TensorizerFSDPStrategy`.

    Args:
        *args: As for ``ModelParallelStrategy``.
        writer: Keywords of :class:`tensorizer.distributed.TensorizerWriter`.
        reader: Keywords of :class:`tensorizer.distributed.TensorizerReader`.
        **options: As for ``ModelParallelStrategy``; ``save_distributed_checkpoint=False`` saves as that does.
    """

    _model_key = "state_dict"

    def _is_sharding(self) -> bool:
        return bool(self._save_distributed_checkpoint)

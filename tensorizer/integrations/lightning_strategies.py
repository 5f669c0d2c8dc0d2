"""Lightning's strategies whose ranks write shards, with checkpoints of ``TensorizerWriter``.

Importing this module imports ``lightning.pytorch``.
"""

from __future__ import annotations

import abc
import io
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Optional, Union

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from tensorizer._io.uri import local_path
from tensorizer._system.devices import empty
from tensorizer._system.redaction import shown_location
from tensorizer.distributed import TensorizerReader, TensorizerWriter, dcp_default
from tensorizer.distributed._checkpoint.json_values import harmless_types, load_vetted, torch_saved
from tensorizer.errors import FormatError

__all__ = ["TensorizerFSDPStrategy", "TensorizerModelParallelStrategy"]

# The tensor of a sharded checkpoint that holds everything but tensors of model and optimizers.
_REST = "lightning"
# The file by which Lightning knows the folder of a sharded checkpoint.
_META = "meta.pt"


class _WriterForLightning(TensorizerWriter):
    """Also writes Lightning's file, before the marker if there is none: complete checkpoints have one at any moment."""

    def __init__(self, path: Path, meta: bytes, **options: Any) -> None:
        super().__init__(path, **options)
        self._meta = meta

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        replaces = self._folder().exists(_META)
        if not replaces:
            self._write_meta()
        super().finish(metadata, results)
        if replaces:
            self._write_meta()

    def _write_meta(self) -> None:
        self._folder().write(_META, self._meta, fsync=self._fsync, replace=True)


class _ShardedCheckpoints(abc.ABC):
    """Saves and loads of a strategy whose ranks write shards. Goes before the strategy."""

    _model_key: str  # under which the strategy looks for the model
    _defaults: ClassVar[Mapping[str, Any]] = {}  # of the strategy's options

    def __init__(
        self,
        *args: Any,
        writer: Optional[Mapping[str, Any]] = None,
        reader: Optional[Mapping[str, Any]] = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **{**self._defaults, **options})
        TensorizerWriter(None, **(writer or {}))  # wrong keywords fail here
        TensorizerReader(None, **(reader or {}))
        self._writer, self._reader = dict(writer or {}), dict(reader or {})

    @abc.abstractmethod
    def _is_sharding(self) -> bool:
        """Whether the ranks write shards, as the strategy was told."""

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
            ValueError: `filepath` is a URI.
            torch.distributed.checkpoint.api.CheckpointException: A rank could not write; with the cause, on all ranks.
        """
        strategy: Any = self
        if storage_options is not None or not self._is_sharding():
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        path = _local_folder(strategy.broadcast(filepath))
        first = strategy.global_rank == 0
        state = {self._model_key: checkpoint.pop("state_dict")}
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{number}"] = optimizer
        rest = strategy.broadcast(torch_saved(checkpoint).getvalue() if first else None)
        state[_REST] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        if first and path.is_file():
            path.unlink()
        # In clear, so what is encrypted beside it is not in there.
        meta = rest if self._writer.get("encryption") is None else torch_saved({}).getvalue()
        state_dict_saver.save(state, storage_writer=_WriterForLightning(path, meta, **self._writer))

    def load_checkpoint(
        self, checkpoint_path: Union[str, os.PathLike[str]], weights_only: Optional[bool] = None
    ) -> dict[str, Any]:
        """Fills model and optimizers; checkpoints that Lightning's own strategy wrote load too.

        Args:
            checkpoint_path: Where it is.
            weights_only: ``False`` unpickles objects that are more than simple values: only for trusted files.

        Returns:
            Everything else.

        Raises:
            ValueError: There is no checkpoint, or `checkpoint_path` is a URI.
            pickle.UnpicklingError: It holds more than simple values, and `weights_only` is not ``False``.
        """
        strategy: Any = self
        path = _local_folder(strategy.broadcast(checkpoint_path))
        with dcp_default(reader=self._reader), harmless_types():  # before torch 2.6, None would unpickle meta.pt
            found: dict[str, Any] = super().load_checkpoint(  # type: ignore[misc]
                path, weights_only=weights_only is not False
            )
        reader = TensorizerReader(path, **self._reader)
        try:
            saved_as = reader.read_metadata().state_dict_metadata.get(_REST)
        except (FileNotFoundError, FormatError, NotADirectoryError):  # the strategy's own
            return found
        if not isinstance(saved_as, TensorStorageMetadata):
            return found
        # meta.pt is not part of the checkpoint's one step: a save that was killed may leave that of an older one.
        rest = {_REST: empty(saved_as.size, dtype=torch.uint8, device="cpu")}
        state_dict_loader.load(rest, storage_reader=reader)
        data = io.BytesIO(rest[_REST].numpy().tobytes())
        if weights_only is False:
            return dict(torch.load(data, weights_only=False))
        return dict(load_vetted("checkpoint", data, "weights_only=False"))


def _local_folder(given: Any) -> Path:
    path = local_path(given)
    if path is None:
        raise ValueError(f"checkpoints of this strategy: wanted a local folder, found {shown_location(given)}")
    return Path(path)


class TensorizerFSDPStrategy(_ShardedCheckpoints, FSDPStrategy):  # type: ignore[misc]
    """Lightning's ``FSDPStrategy`` for a ``Trainer``, whose checkpoints are those of :class:`.TensorizerWriter`.

    A checkpoint is a folder with one ``.tensors`` file per rank and a marker. All of it, optimizers and loops included,
    becomes valid with the marker, in one step. It loads with any number of ranks.

    Args:
        *args: As for ``FSDPStrategy``.
        writer: Keywords of :class:`tensorizer.distributed.TensorizerWriter`, such as ``encryption``.
        reader: Keywords of :class:`tensorizer.distributed.TensorizerReader`.
        **options: As for ``FSDPStrategy``; ``state_dict_type`` is ``"sharded"`` unless it is given. A ``"full"`` one is
            saved as ``FSDPStrategy`` does.
    """

    _model_key = "model"
    _defaults = MappingProxyType({"state_dict_type": "sharded"})

    def _is_sharding(self) -> bool:
        return bool(self._state_dict_type == "sharded")


class TensorizerModelParallelStrategy(_ShardedCheckpoints, ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism), as :class:`TensorizerFSDPStrategy`.

    ``writer`` and ``reader`` are those of :class:`TensorizerFSDPStrategy`, all other arguments those of
    ``ModelParallelStrategy``; ``save_distributed_checkpoint=False`` saves as that does.
    """

    _model_key = "state_dict"

    def _is_sharding(self) -> bool:
        return bool(self._save_distributed_checkpoint)

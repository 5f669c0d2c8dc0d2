"""accelerate: the weights of ``Accelerator.save_state`` and ``load_state`` in ``.tensors`` files.

Importing this module does not import ``accelerate``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection
from typing import Any, Optional, Union

import torch

from tensorizer._save.session import HASH_NAMES
from tensorizer.encryption import DecryptionParams, EncryptionParams
from tensorizer.errors import StreamNotFoundError
from tensorizer.signing import PublicKeyArgument
from tensorizer.torch import load_model, save_file

__all__ = ["StateHooks", "install_hooks"]

# What accelerate calls its own files of weights; a checkpoint that is written again holds one kind alone.
_ITS_FILES = ("model{}.safetensors", "pytorch_model{}.bin")


def install_hooks(
    accelerator: Any,
    *,
    encryption: Optional[EncryptionParams] = None,
    decryption: Optional[DecryptionParams] = None,
    hashes: Union[str, Collection[str], None] = HASH_NAMES,
    verify_hash: bool = False,
    public_key: PublicKeyArgument = None,
) -> StateHooks:
    """Lets ``accelerator.save_state`` write weights as ``model.tensors``, and ``load_state`` read them.

    The weights have the names of the model itself, without the wrappers of accelerate or ``torch.compile``. So a
    checkpoint of many processes loads in one process, and :func:`tensorizer.load_model` reads it. ``load_state`` reads
    straight into the parameters, so optimizers keep them. Further models are ``model_1.tensors`` and so on. Checkpoints
    without such files are loaded by accelerate itself.

    Optimizers, schedulers and random states stay accelerate's own files, which hooks cannot change. To write their
    tensors in parallel too, put ``tensorizer_saving()`` and ``tensorizer_loading()`` of
    :mod:`tensorizer.torch_compat` around the calls. With FSDP, accelerate writes shards before it calls the hooks, so
    they have no effect: use :func:`tensorizer.distributed.dcp_default`. With DeepSpeed and Megatron-LM, which write
    their own files, they have no effect either.

    Args:
        accelerator: An ``accelerate.Accelerator``.
        encryption: Encrypts the weights. Accelerate's other files are not encrypted, and the state of the optimizer
            reveals much about the weights.
        decryption: The key that belongs to it.
        hashes: Digests to store: ``"crc32"``, ``"sha256"``, both (default) or ``None``.
        verify_hash: Compares the weights with their digests when they are loaded.
        public_key: Who has to have signed weights that are loaded, as for :class:`tensorizer.TensorDeserializer`;
            loading a checkpoint without ``model.tensors`` then raises.

    Returns:
        The hooks; :meth:`StateHooks.remove` removes them.
    """
    hooks = StateHooks(accelerator, encryption, decryption, hashes, verify_hash, public_key)
    hooks._handles = (
        accelerator.register_save_state_pre_hook(hooks._save),
        accelerator.register_load_state_pre_hook(hooks._load),
    )
    return hooks


@dataclasses.dataclass(eq=False, repr=False)
class StateHooks:
    """What :func:`install_hooks` registered."""

    _accelerator: Any
    _encryption: Optional[EncryptionParams]
    _decryption: Optional[DecryptionParams]
    _hashes: Union[str, Collection[str], None]
    _verify: bool
    _public_key: PublicKeyArgument
    _handles: tuple[Any, ...] = ()

    def remove(self) -> None:
        """Removes the hooks. Accelerate writes and reads its own files again."""
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    # accelerate gives no weights, and no models to load, under FSDP, DeepSpeed and Megatron-LM

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], output_dir: Any) -> None:
        if self._writes():
            for number, (model, state) in enumerate(zip(models, weights)):
                _, prefix = self._inside(model)
                save_file(
                    {name.removeprefix(prefix): tensor for name, tensor in state.items()},
                    _path(output_dir, number),
                    ties="once",
                    encryption=self._encryption,
                    hashes=self._hashes,
                )
                _remove_its_files(output_dir, number)
        weights.clear()  # written: nothing is left for accelerate

    def _load(self, models: list[torch.nn.Module], input_dir: Any) -> None:
        paths = [_path(input_dir, number) for number in range(len(models))]
        there = [path for path in paths if os.path.exists(path)]
        if not there and self._public_key is None:
            return
        missing = sorted({*paths} - {*there})
        if missing:
            raise StreamNotFoundError(2, "accelerate has more models than this checkpoint", missing[0])
        for model, path in zip(models, paths):
            inside, _ = self._inside(model)
            load_model(
                inside,
                path,
                assign=False,
                verify=self._verify,
                encryption=self._decryption,
                public_key=self._public_key,
            )
        models.clear()

    def _writes(self) -> bool:
        """Whether this process is the one that writes weights, as accelerate decides for its own files."""
        each_node = self._accelerator.project_configuration.save_on_each_node
        who = self._accelerator.is_local_main_process if each_node else self._accelerator.is_main_process
        return bool(who)

    def _inside(self, model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
        """The model that was given to ``prepare``, and what its names begin with in the state of the wrapped one."""
        inside = self._accelerator.unwrap_model(model, keep_torch_compile=False)
        for name, module in model.named_modules(remove_duplicate=False):
            if module is inside:
                return inside, f"{name}." if name else ""
        return model, ""


def _path(folder: Any, number: int) -> str:
    return os.path.join(folder, f"model{_ending(number)}.tensors")


def _ending(number: int) -> str:
    return f"_{number}" if number else ""


def _remove_its_files(folder: Any, number: int) -> None:
    for name in _ITS_FILES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name.format(_ending(number))))

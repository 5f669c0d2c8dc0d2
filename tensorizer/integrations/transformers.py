"""Checkpoints of ``transformers.Trainer`` in ``.tensors`` files: a mixin writes and resumes them, a callback writes.

Importing this module imports ``transformers``.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch
from transformers import TrainerCallback

from tensorizer._io.call_options import CallOptions, Trust
from tensorizer._io.model_files import usual_names
from tensorizer._io.uri import name_in
from tensorizer._system.redaction import shown_location
from tensorizer.integrations._hf.folders import LoadOptions, LocalFolder, find_weights
from tensorizer.integrations._hf.models import is_of
from tensorizer.integrations._hf.objects import load_adapter_into
from tensorizer.integrations._hf.saving import save_folder
from tensorizer.integrations.huggingface import save_pretrained
from tensorizer.torch import load_model, save_model

__all__ = ["TensorsCallback", "TensorsTrainerMixin"]

logger = logging.getLogger(__name__)

_TRAINING_ARGS = "training_args.bin"


class TensorsTrainerMixin:
    """Lets a ``Trainer`` write its checkpoints as ``.tensors`` and resume from them.

    Name it before the trainer: ``class MyTrainer(TensorsTrainerMixin, Trainer): ...``. Everything else works as always:
    ``resume_from_checkpoint``, ``save_total_limit``, ``load_best_model_at_end``; checkpoints with ``.safetensors`` are
    resumed by the trainer itself. Optimizer, scheduler and random states stay the trainer's own files. With FSDP and
    DeepSpeed, which keep models in pieces, the mixin has no effect.

    Attributes:
        encryption: Encrypts the weights of checkpoints (:class:`tensorizer.EncryptionParams`). The trainer's other
            files are not encrypted, and the state of the optimizer reveals much about the weights.
        decryption: The key that belongs to it, for resuming.

    Examples:
        >>> from transformers import Trainer
        >>> from tensorizer.integrations.transformers import TensorsTrainerMixin
        >>> class TensorsTrainer(TensorsTrainerMixin, Trainer):
        ...     pass
    """

    encryption: Any = None
    decryption: Any = None

    def save_model(self, output_dir: Optional[str] = None, _internal_call: bool = False) -> None:
        """Write the model, its configuration and tokenizer; called by the trainer for each checkpoint.

        Args:
            output_dir: The folder; ``None`` is ``args.output_dir``.
            _internal_call: Whether the trainer calls; otherwise ``args.push_to_hub`` uploads the folder.
        """
        trainer: Any = self
        if _is_in_pieces(trainer):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        if not trainer.args.should_save:
            return
        folder = trainer.args.output_dir if output_dir is None else output_dir
        os.makedirs(folder, exist_ok=True)
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        tokenizer = trainer.processing_class
        if tokenizer is None:
            tokenizer = getattr(trainer.data_collator, "tokenizer", None)
        if _is_of_a_library(model):
            save_pretrained(model, folder, tokenizer=tokenizer, encryption=self.encryption)
        else:
            save_model(model, os.path.join(folder, "model.tensors"), encryption=self.encryption)
        torch.save(trainer.args, os.path.join(folder, _TRAINING_ARGS))
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Optional[torch.nn.Module] = None) -> None:
        if not self._fill(resume_from_checkpoint, model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        trainer: Any = self
        if not self._fill(trainer.state.best_model_checkpoint, None):
            super()._load_best_model()  # type: ignore[misc]

    def _fill(self, folder: str, model: Optional[torch.nn.Module]) -> bool:
        """Copies a checkpoint into the model, so that optimizers keep their tensors; ``False`` if it is not ours."""
        trainer: Any = self
        if _is_in_pieces(trainer):
            return False
        target = trainer.accelerator.unwrap_model(model or trainer.model, keep_torch_compile=False)
        checkpoint = LocalFolder(Path(folder))
        stem = "adapter_model" if is_of("peft", target) else "model"
        if not checkpoint.those_of(usual_names(stem, formats=("tensors",))):
            return False
        options = LoadOptions(call=CallOptions.to_read(self.decryption, trust=Trust.of(None, None)))
        if is_of("peft", target):
            training = target.training
            load_adapter_into(target, checkpoint, options, target.active_adapter)
            target.train(training)
        else:
            weights = find_weights(checkpoint, stem, options)
            left_out = bool(getattr(target, "_keys_to_ignore_on_save", None))
            load_model(target, weights.source, strict=not left_out, assign=False, encryption=self.decryption)
        return True


def _is_of_a_library(model: Any) -> bool:
    """Whether a model has a configuration that its library reads; anybody's module may have a ``config``, too."""
    return (
        hasattr(getattr(model, "config", None), "save_pretrained")
        or hasattr(model, "save_config")  # diffusers
        or is_of("peft", model)
        or is_of("sentence_transformers", model)
    )


def _is_in_pieces(trainer: Any) -> bool:
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


class TensorsCallback(TrainerCallback):  # type: ignore[misc]
    """Also writes the model of each checkpoint as ``.tensors``. The class of the trainer need not change.

    The trainer still resumes from its own files; :func:`.huggingface.from_pretrained` loads these. If a module has no
    configuration of a library, only ``model.tensors`` is written; :func:`tensorizer.torch.load_model` loads it.

    Args:
        target: A folder or ``s3://`` prefix, below which a checkpoint is ``checkpoint-<step>``; ``None``: the folder of
            the checkpoint itself, which ``save_total_limit`` removes with the rest.
        raise_errors: ``True`` ends the training if a save fails. By default the log says so (WARNING), and training
            continues, because the trainer has saved its own files.
        **options: Keywords for :func:`.huggingface.save_pretrained`, such as ``encryption``.

    Raises:
        TypeError: A keyword that ``save_pretrained`` does not have.

    Examples:
        >>> from tensorizer.integrations.transformers import TensorsCallback
        >>> callback = TensorsCallback()  # Trainer(..., callbacks=[callback])
    """

    def __init__(
        self,
        target: Union[str, os.PathLike[str], None] = None,
        *,
        raise_errors: bool = False,
        **options: Any,
    ) -> None:
        inspect.signature(save_pretrained).bind(None, "", tokenizer=None, **options)  # wrong keywords fail here
        self.target = target
        self.raise_errors = raise_errors
        self.options: Mapping[str, Any] = options

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Called by the trainer when a checkpoint is complete."""
        if not state.is_world_process_zero:
            return
        root = args.output_dir if self.target is None else self.target
        folder = name_in(root, f"checkpoint-{state.global_step}")
        try:
            save_folder(
                model,
                folder,
                tokenizer=others.get("processing_class"),
                # Where the trainer has just written its own file.
                is_copy=os.path.abspath(root) == os.path.abspath(args.output_dir),
                is_plain=not _is_of_a_library(model),
                **self.options,
            )
        except Exception as error:
            if self.raise_errors:
                raise
            logger.warning("%s was not saved: %s", shown_location(folder), error)

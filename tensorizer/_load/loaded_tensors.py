"""Tensors that were loaded, kept; what is missing is read when somebody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Optional, cast

import torch

from tensorizer._load.container import Container
from tensorizer.errors import CryptographyError, FormatError, HashMismatchError
from tensorizer.progress import ProgressArgument, progress_reporter

__all__ = ["LoadedTensors"]


class LoadedTensors:
    """The cache of one container. May be used from several threads: everybody gets the same tensor."""

    def __init__(self, container: Container, verify: bool, progress: ProgressArgument) -> None:
        self.kept: dict[int, torch.nn.Parameter] = {}
        self._container = container
        self._verify = verify
        self._progress = progress
        self._lock = threading.Lock()
        self._ahead = container.read_ahead()

    def must_verify(self, verify_hash: Optional[bool]) -> bool:
        """What a call's ``verify_hash`` means; ``None`` is the constructor's value."""
        return self._verify if verify_hash is None else bool(verify_hash)

    def load(self, entries: Sequence[int], verify_hash: Optional[bool] = None) -> list[torch.nn.Parameter]:
        """The parameters of `entries` (ascending), read where they are not kept, kept from then on."""
        missing = [i for i in entries if i not in self.kept]
        if missing:
            total = sum(map(self._container.reader.index.data_nbytes, missing)) if self._progress else 0
            with progress_reporter(self._progress, total, "loading") as report:
                for batch in self._container.read(missing, self.must_verify(verify_hash), report):
                    self._keep(batch.entries, cast("Sequence[torch.nn.Parameter]", batch.tensors))
        return [self.kept[i] for i in entries]

    def _keep(self, entries: Sequence[int], tensors: Sequence[torch.nn.Parameter]) -> None:
        with self._lock:
            if self.kept.keys().isdisjoint(entries):
                self.kept.update(zip(entries, tensors))
            else:  # another thread read some of them meanwhile: everybody gets the first
                for i, tensor in zip(entries, tensors):
                    self.kept.setdefault(i, tensor)

    def load_one(self, i: int) -> torch.nn.Parameter:
        """One tensor; over a network, those that a loop will ask for next come along."""
        together = [i] if self._ahead is None else self._ahead.together_with(i, self.kept)
        if len(together) > 1:
            try:
                return self.load(together)[0]
            except (FormatError, HashMismatchError, CryptographyError):
                self._ahead = None  # it may be another one that is damaged: from now on each for itself
        return self.load([i])[0]

"""Tensors that were loaded, kept; what is missing is read when somebody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Optional, cast

import torch

from tensorizer._format import dtypes
from tensorizer._format.payloads import same_bits
from tensorizer._load.container import Container
from tensorizer._load.digests import holds, listed, missing_hashes
from tensorizer.errors import CryptographyError, FormatError, HashMismatchError, VerificationError
from tensorizer.progress import ProgressArgument, progress_reporter

__all__ = ["LoadedTensors"]


class LoadedTensors:
    """The cache of one container. May be used from several threads: everybody gets the same tensor."""

    def __init__(self, container: Container, verify: bool, progress: ProgressArgument) -> None:
        self.kept: dict[int, torch.nn.Parameter] = {}  # by the entry that holds the data
        self._targets = container.targets
        self._container = container
        self._verify = verify
        self._verified: set[int] = set()  # those of `kept` that were compared with their digests
        self._progress = progress
        self._lock = threading.Lock()
        self._ahead = container.read_ahead()

    def must_verify(self, verify_hash: Optional[bool]) -> bool:
        """What a call's ``verify_hash`` means; ``None`` is the constructor's value."""
        return self._verify if verify_hash is None else bool(verify_hash)

    def load(self, entries: Sequence[int], verify_hash: Optional[bool] = None) -> list[torch.nn.Parameter]:
        """The parameters of `entries` (ascending), read where they are not kept, kept from then on.

        Names that stand for one tensor get one parameter.
        Those that are kept are verified as well where they were not verified when they were read, or where the caller
        asks for it: ``verify_hash=True``.

        Raises:
            VerificationError: A tensor, read now or before, is not what the file vouches for.
            ValueError: A tensor that is kept, and was not verified when it was read, cannot be verified any more.
        """
        if self._targets:
            wanted = [self._targets.get(i, i) for i in entries]
            self._load(sorted(set(wanted)), verify_hash)
            if wanted != list(entries) and not self._container.closed:
                self._container.read_headers([i for i in entries if i in self._targets])
            return [self.kept[i] for i in wanted]
        self._load(entries, verify_hash)
        return [self.kept[i] for i in entries]

    def _load(self, entries: Sequence[int], verify_hash: Optional[bool]) -> None:
        verify = self.must_verify(verify_hash)
        missing = [i for i in entries if i not in self.kept]
        asked_again = set(entries).difference(missing) if verify_hash else ()
        if missing:
            total = sum(map(self._container.index.data_nbytes, missing)) if self._progress else 0
            with progress_reporter(self._progress, total, "loading") as report:
                for batch in self._container.read(missing, verify, report):
                    self._keep(batch.entries, cast("Sequence[torch.nn.Parameter]", batch.tensors), verify)
        if verify:
            self._verify_kept([i for i in entries if i in asked_again or i not in self._verified])

    def _keep(self, entries: Sequence[int], tensors: Sequence[torch.nn.Parameter], verified: bool) -> None:
        with self._lock:
            if self.kept.keys().isdisjoint(entries):
                self.kept.update(zip(entries, tensors))
                mine: Sequence[int] = entries
            else:  # another thread read some of them meanwhile: everybody gets the first
                mine = [i for i, tensor in zip(entries, tensors) if self.kept.setdefault(i, tensor) is tensor]
            if verified:
                self._verified.update(mine)

    def _verify_kept(self, entries: Sequence[int]) -> None:
        """Compares tensors that were read before with what the file vouches for."""
        if not entries:
            return
        container = self._container
        converted = [i for i in entries if not self._is_as_stored(i)]
        wrong, bare = [], []
        for i in sorted(set(entries).difference(converted)):
            matches = holds(container, i, self.kept[i])
            if matches is None:
                bare.append(i)
            elif not matches:
                wrong.append(i)
        wrong += self._read_differently(converted)
        if wrong:
            raise self._mismatch(wrong)
        if bare and not container.allow_missing_hashes:
            raise missing_hashes(container.source_name, [container.names[i] for i in bare])
        self._verified.update(entries)

    def _is_as_stored(self, i: int) -> bool:
        """Whether a kept tensor has the bytes that the digests are about: not after a conversion, not without data."""
        headers, position = self._container.header(i)
        stored = dtypes.torch_dtype(headers.dtype(position).decode("utf-8", "replace"))
        return self.kept[i].dtype == stored and not self.kept[i].is_meta

    def _read_differently(self, entries: Sequence[int]) -> list[int]:
        """Reads tensors again, verified; those that differ from what is kept."""
        container = self._container
        if container.closed:  # those that were verified when they were read passed then, before the conversion
            entries = [i for i in entries if i not in self._verified]
        if not entries:
            return []
        if container.closed:
            raise ValueError(
                f"{container.source_name} is closed: {len(entries)} tensors that were converted while they were loaded "
                f"cannot be verified any more: {listed([container.names[i] for i in entries])}; give verify_hash=True "
                "to the constructor"
            )
        return [
            i
            for batch in container.read(entries, True)
            for i, tensor in zip(batch.entries, batch.tensors)
            if not same_bits(tensor, self.kept[i])
        ]

    def _mismatch(self, entries: Sequence[int]) -> HashMismatchError:
        source = self._container.source_name
        names = listed([self._container.names[i] for i in entries])
        error = HashMismatchError(f"{source}: {len(entries)} loaded tensors are not what their hashes say: {names}")
        error.source = source
        return error

    def load_one(self, i: int) -> torch.nn.Parameter:
        """One tensor; over a network, those that a loop will ask for next come along."""
        i = self._targets.get(i, i)
        if self._ahead is None and i in self.kept and (i in self._verified or not self._verify):
            return self.kept[i]
        together = [i] if self._ahead is None else self._ahead.together_with(i, self.kept)
        if len(together) > 1:
            try:
                return self.load(together)[0]
            except (FormatError, VerificationError, CryptographyError):
                self._ahead = None  # it may be another one that is damaged: from now on each for itself
        return self.load([i])[0]

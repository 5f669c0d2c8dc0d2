"""Publishing versions of weights: what :mod:`tensorizer.weight_sync` gives trainers."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from tensorizer import _C
from tensorizer._encryption import EncryptionParams
from tensorizer._format.payloads import is_copied
from tensorizer._io.s3.conditional import NotMetError, Read
from tensorizer._keys import check_encryption, signer_of
from tensorizer._save.records import Record
from tensorizer._save.session import HASH_NAMES, batches_to_copy, check_hashes, check_metadata, memory_of, on_host
from tensorizer._signing import SigningKey
from tensorizer._sync import files
from tensorizer._sync.files import FileToWrite, Written
from tensorizer._sync.forms import Form, added, form_of_tensors, state_of, sums_of, tensors_of
from tensorizer._sync.pointer import END_OF_VERSIONS, KEYS, Pointer, delta_name, files_of, read_pointer, version_of
from tensorizer._sync.stores import StoreUser, open_store
from tensorizer._system import config
from tensorizer._system.devices import empty, ordinary_tensors
from tensorizer.errors import ConflictError

logger = logging.getLogger("tensorizer.weight_sync")

# How often a publisher that comes to a place where another one publishes begins again.
_TAKEOVERS = 100


class Published(NamedTuple):
    """What :meth:`WeightPublisher.publish` has written.

    Attributes:
        version: The number of the version.
        kind: ``"anchor"`` if all tensors were written, ``"delta"`` if only the changed elements were.
        nbytes: Bytes of the files. For an anchor, this includes the delta beside it.
        changed: Elements that differ from the version before. Without a version to compare with, all elements.
        total: Elements of all tensors; tensors with several names count once.
    """

    version: int
    kind: str
    nbytes: int
    changed: int
    total: int


class _Snapshot:
    """The tensors of a version in host memory, and their sums."""

    def __init__(self, form: Form, tensors: Mapping[str, torch.Tensor]) -> None:
        self.form = form
        self.tensors: dict[str, torch.Tensor] = {}
        for batch in self._batches(tensors):
            for record, tensor in zip(batch, on_host([record.source for record in batch])):
                if not is_copied(record.source, on_device=False):
                    with ordinary_tensors():
                        tensor = empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
                self.tensors[str(record.path[0])] = tensor
        self.sums = dict(zip(form.names, sums_of(list(self.tensors.values()))))

    def _batches(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Sequence[Record]]:
        records = [Record((name,), *self.form.tensors[name], source=tensors[name]) for name in self.form.names]
        return batches_to_copy(records, to_host=True)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, Optional[_C.Delta]]]:
        """Becomes a copy of `tensors`: how many elements changed, and what of each tensor; ``None`` is all of it."""
        changed, deltas = 0, {}
        for batch in self._batches(tensors):
            names = [str(record.path[0]) for record in batch]
            now = on_host([record.source for record in batch])
            copies = [
                (memory_of(self.tensors[name]), memory_of(tensor), tensor.element_size())
                for name, tensor in zip(names, now)
            ]
            for name, (count, change, delta) in zip(names, _C.take_differences(copies)):
                changed += count
                self.sums[name] = added(self.sums[name], change)
                if count:
                    deltas[name] = delta
        return changed, deltas

    @property
    def state(self) -> str:
        return state_of(list(self.sums.values()))


class WeightPublisher(StoreUser):
    """Publishes versions of a model's weights: now and then all tensors, and in between the changed elements.

    Each location has one publisher. A folder is locked, so a second publisher raises ``ConflictError``. In S3, a newer
    publisher takes over, and the older one raises ``ConflictError`` at its next :meth:`publish`.

    A publisher keeps a copy of the tensors in host memory, and compares the next version with it. Do not change tensors
    while :meth:`publish` runs.

    Args:
        location: A folder, a ``file://`` URI or an ``s3://`` prefix. A missing folder is made.
        anchor_every: Number of versions from one anchor to the next. An anchor holds all tensors, for followers that
            join or are far behind. With the default, anchors add a fiftieth of the model to each version on average.
        keep: Number of anchors that are kept, with the deltas since the oldest of them. The default of 2 gives a
            follower the time of `anchor_every` versions for a download.
        encryption: Encrypts every file with this key.
        signing_key: Signs every file.
        stream_options: Keywords of :func:`tensorizer.stream_io.open_stream` for URIs.
        hashes: As for :class:`TensorSerializer`; SHA-256 must be among them.
        new_run: Begins a new run if the location has one already. Followers that do not pin the old run switch to it.

    Raises:
        ValueError: The location is not a folder or ``s3://`` prefix, `hashes` lacks SHA-256, or a number is below 1.
        TypeError: An argument has a wrong type.

    Examples:
        >>> import tempfile, torch
        >>> from tensorizer.weight_sync import WeightFollower, WeightPublisher
        >>> model, copy = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        >>> with tempfile.TemporaryDirectory() as folder, WeightPublisher(folder) as publisher:
        ...     print(publisher.publish(model).kind)
        ...     follower = WeightFollower(folder, copy)
        ...     with torch.no_grad():
        ...         _ = model.bias[3].fill_(1.0)
        ...     print(publisher.publish(model, metadata={"step": "1"}).changed)
        ...     print(follower.update(), follower.metadata)
        anchor
        1
        Applied(version=1, tensors=1, elements=1) {'step': '1'}
    """

    __module__ = "tensorizer.weight_sync"  # where users import it from

    def __init__(
        self,
        location: Union[str, os.PathLike[str]],
        *,
        anchor_every: int = 50,
        keep: int = 2,
        encryption: Optional[EncryptionParams] = None,
        signing_key: Optional[SigningKey] = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        hashes: Union[str, Collection[str], None] = HASH_NAMES,
        new_run: bool = False,
    ) -> None:
        self._anchor_every = config.integer("anchor_every", anchor_every, 1)
        self._keep = config.integer("keep", keep, 1)
        check_encryption(encryption)
        self._encryption = encryption
        self._signer = None if signing_key is None else signer_of(signing_key)
        self._hashes = check_hashes(hashes, encrypted=encryption is not None)
        if "sha256" not in self._hashes:
            raise ValueError(f"hashes: expected 'sha256' among them, got {sorted(self._hashes)}")
        self._new_run = bool(new_run)
        super().__init__(open_store(location, stream_options, writes=True))
        self._conflict: Optional[str] = None
        self._read: Optional[Read] = None  # the pointer as it was seen last
        self._pointer: Optional[Pointer] = None  # the same; None before the first look, and where there is none
        self._run = self._own_run = secrets.token_hex(16)
        self._leads = False  # the newest version is ours
        self._sent: Optional[bytes] = None  # a pointer that may have been written, though its write failed
        self._strays: list[str] = []  # files of ours that no pointer names
        self._snapshot: Optional[_Snapshot] = None
        self._since_anchor = 0

    def close(self) -> None:
        """Lets other publishers begin, and frees the copy of the tensors. A second call does nothing."""
        with self._lock:
            self._snapshot = None
            super().close()

    def publish(
        self,
        tensors: Union[torch.nn.Module, Mapping[str, torch.Tensor]],
        version: Optional[int] = None,
        *,
        metadata: Optional[Mapping[str, str]] = None,
    ) -> Published:
        """Publishes a version. Followers can see it when this method returns; they never see a part of it.

        If it raises, followers see the version before, and the next call writes an anchor. After a ``ConflictError``,
        every later call raises it again.

        Args:
            tensors: A module, of which the state dict is published, or a mapping from names to tensors on any device.
            version: The number, above that of the last version and below 10^12. ``None`` takes the next number; the
                first is 0.
            metadata: Texts that followers get with the version, by key.

        Raises:
            ConflictError: Another publisher writes to the location.
            ValueError: The version is not above the last one, the library itself uses a key of `metadata`, there are no
                tensors, or a tensor has no data.
            TypeError: A value is not a tensor.
            NotImplementedError: Files cannot hold a tensor, for example because it is sparse.
            OSError: The location cannot be read or written.
        """
        texts = check_metadata(metadata)
        taken = sorted(KEYS.intersection(texts))
        if taken:
            raise ValueError(f"metadata: the library uses the key {taken[0]!r} itself")
        if version is not None:
            config.integer("version", version, 0, END_OF_VERSIONS - 1)
        given = tensors_of(tensors, "tensors")
        form = form_of_tensors(given)
        with self._lock:
            self._check_open()
            if self._conflict is not None:
                raise ConflictError(self._conflict)
            try:
                return self._publish(given, form, version, texts)
            except ConflictError as error:
                self._conflict = str(error)
                raise
            except Exception:
                with contextlib.suppress(Exception):  # what came first says more
                    self._look()
                    self._delete_strays()
                raise

    def _publish(
        self, given: Mapping[str, torch.Tensor], form: Form, version: Optional[int], texts: Mapping[str, str]
    ) -> Published:
        for _ in range(_TAKEOVERS):
            self._look()
            self._delete_strays()
            last = -1 if self._pointer is None else self._pointer.version
            number = last + 1 if version is None else version
            if not last < number < END_OF_VERSIONS:
                raise ValueError(f"version: expected one above {last} and below 10^12, got {number}")
            try:
                return self._publish_as(number, given, form, texts)
            except NotMetError:
                if self._leads:
                    raise self._conflict_error() from None
                self._strays.clear()  # whoever leads deletes what no pointer names
        raise self._conflict_error()

    def _publish_as(
        self, number: int, given: Mapping[str, torch.Tensor], form: Form, texts: Mapping[str, str]
    ) -> Published:
        before, snapshot = self._pointer, self._snapshot
        total = sum(map(form.numel, form.names))
        changed, written = total, {}
        has_delta = self._leads and snapshot is not None and snapshot.form == form
        is_anchor = not has_delta or self._since_anchor + 1 >= self._anchor_every
        common = {**texts, "weight_sync": "1", "run": self._run, "version": str(number)}
        self._snapshot = None
        if has_delta:
            assert snapshot is not None
            assert before is not None
            changed, deltas = snapshot.take(given)
            base = {"base": str(before.version), "base_state": before.states[before.version]}
            sums = torch.tensor([_signed(value) for value in snapshot.sums.values()], dtype=torch.int64, device="cpu")
            delta = files.delta_to_write(
                number, form, deltas, snapshot.tensors, sums, {**common, "state": snapshot.state, **base}
            )
            written[delta.name] = self._write(delta)
            del deltas, delta
        else:
            del snapshot
            snapshot = _Snapshot(form, given)
        if is_anchor:
            anchor = files.anchor_to_write(number, form, snapshot.tensors, {**common, "state": snapshot.state})
            written[anchor.name] = self._write(anchor)
        pointer = self._next_pointer(number, is_anchor, written, snapshot.state)
        self._check_lead()
        content = self._sent = pointer.to_bytes()
        self._read = self._store.write_pointer(content, self._read)
        old = [] if before is None else before.files
        self._sent, self._pointer = None, pointer
        self._strays = [name for name in old if name not in pointer.nbytes]
        if not self._leads:
            self._leads = True
            with contextlib.suppress(OSError):
                found = sorted(self._store.names(), key=lambda name: (version_of(name) or 0, name))
                self._strays = [name for name in found if name not in pointer.nbytes]
        self._snapshot = snapshot
        self._since_anchor = 0 if is_anchor else self._since_anchor + 1
        try:
            self._delete_strays()
        except OSError as error:
            logger.warning("%s: old files stay for now: %s", self._store.name, error)
        nbytes = sum(one.nbytes for one in written.values())
        return Published(number, "anchor" if is_anchor else "delta", nbytes, changed, total)

    def _next_pointer(self, number: int, is_anchor: bool, written: Mapping[str, Written], state: str) -> Pointer:
        old = self._pointer if self._pointer is not None and self._pointer.run == self._run else None
        anchors = (() if old is None else old.anchors) + ((number,) if is_anchor else ())
        anchors = anchors[-self._keep :]
        deltas = (() if old is None else old.deltas) + ((number,) if delta_name(number) in written else ())
        deltas = tuple(version for version in deltas if version > anchors[0])
        nbytes, digests, states = {}, {}, {}
        if old is not None:
            nbytes, digests, states = dict(old.nbytes), dict(old.index_digest), dict(old.states)
        nbytes.update({name: one.nbytes for name, one in written.items()})
        digests.update({name: one.index_digest for name, one in written.items()})
        states[number] = state
        named, versions = files_of(anchors, deltas), sorted({*anchors, *deltas})
        return Pointer(
            self._run,
            number,
            anchors,
            deltas,
            {name: nbytes[name] for name in named},
            {name: digests[name] for name in named},
            {version: states[version] for version in versions},
        )

    # ---- who publishes ----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Reads the pointer.

        Raises:
            ConflictError: Another publisher has replaced ours, or holds the lock.
        """
        self._store.lock()
        read = self._store.read_pointer(self._read)
        if read is not self._read:
            ours = (self._sent, self._read and self._read.content)
            if self._leads and (read is None or read.content not in ours):
                raise self._conflict_error()
            self._leads = self._leads or (read is not None and read.content == self._sent)
            self._pointer = None if read is None else read_pointer(self._store.name, read.content)
            self._read = read
        self._sent = None
        if not self._leads:
            keeps = self._pointer is not None and not self._new_run
            self._run = self._pointer.run if keeps and self._pointer is not None else self._own_run

    def _check_lead(self) -> None:
        """Raises :class:`NotMetError` if the pointer is not the one that was seen last."""
        read = self._store.read_pointer(self._read)
        if (read and read.content) != (self._read and self._read.content):
            raise NotMetError
        self._read = read

    def _conflict_error(self) -> ConflictError:
        return self._store.error(ConflictError, "another publisher has taken over")

    # ---- files ------------------------------------------------------------------------------------------------------

    def _write(self, file: FileToWrite) -> Written:
        """Writes a file whose name nobody has taken, or a publisher that ended before a pointer named it."""
        self._check_lead()
        try:
            return self._write_once(file)
        except OSError as error:
            if not self._store.refuses_existing(error):
                raise
            self._check_lead()
            if self._leads:
                raise self._conflict_error() from error
        self._store.delete([file.name])
        return self._write_once(file)

    def _write_once(self, file: FileToWrite) -> Written:
        self._strays.append(file.name)
        try:
            return files.write_file(file, self._store, self._hashes, self._encryption, self._signer)
        except OSError as error:
            if self._store.without_conditions(error):
                return files.write_file(file, self._store, self._hashes, self._encryption, self._signer)
            if self._store.refuses_existing(error):
                self._strays.remove(file.name)  # it is somebody else's
            raise

    def _delete_strays(self) -> None:
        named = set() if self._pointer is None else set(self._pointer.files)
        self._store.delete([name for name in self._strays if name not in named])
        self._strays = []


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value

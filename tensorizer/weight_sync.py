"""New weights for live models: :class:`WeightPublisher` publishes them, :class:`WeightFollower` puts them in place.

``docs/weight-sync.md`` describes the files in the store, the costs and the limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Optional, Union

import torch

from tensorizer import _C
from tensorizer._encryption import DecryptionParams, EncryptionParams
from tensorizer._format.names import listed
from tensorizer._format.payloads import contiguous
from tensorizer._io.call_options import Trust
from tensorizer._keys import check_encryption, signer_of
from tensorizer._save.records import Record
from tensorizer._save.session import HASH_NAMES, batches_to_copy, check_hashes, check_metadata, memory_of
from tensorizer._signing import PublicKeyArgument, SigningKey
from tensorizer._sync import files
from tensorizer._sync.files import Changes, FileToWrite, Written
from tensorizer._sync.forms import Form, added, form_of_anchor, form_of_tensors, state_of, sums_of, tensors_of
from tensorizer._sync.pointer import (
    END_OF_VERSIONS,
    KEYS,
    Pointer,
    Route,
    anchor_name,
    delta_name,
    files_of,
    read_pointer,
    version_of,
)
from tensorizer._sync.stores import NotMetError, Read, open_store
from tensorizer._sync.target import Target
from tensorizer._system import config
from tensorizer._system.devices import empty, ordinary_tensors
from tensorizer.errors import (
    ConflictError,
    CryptographyError,
    FormatError,
    StateMismatchError,
    StreamNotFoundError,
    VerificationError,
    VersionNotFoundError,
)

__all__ = ["WeightFollower", "WeightPublisher"]

logger = logging.getLogger("tensorizer.weight_sync")

Location = Union[str, "os.PathLike[str]"]

# How often a publisher that comes to a place where another one publishes begins again.
_TAKEOVERS = 100

# What is wrong with a file, so that another way is tried.
_DAMAGE = (FormatError, VerificationError, CryptographyError, StreamNotFoundError)


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


class Applied(NamedTuple):
    """What :meth:`WeightFollower.apply` has written.

    Attributes:
        version: The version that the target holds now; ``None`` if it is between two versions.
        tensors: Tensors that were written; those with several names count once.
        elements: Elements that were written.
    """

    version: Optional[int]
    tensors: int
    elements: int


# --- publishing -------------------------------------------------------------------------------------------------------


class _Snapshot:
    """The tensors of a version in host memory, and their sums."""

    def __init__(self, form: Form, tensors: Mapping[str, torch.Tensor]) -> None:
        self.form = form
        self.tensors: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in form.tensors.items():
            with ordinary_tensors():
                copy = empty(shape, dtype=dtype, device="cpu")
                copy.copy_(tensors[name])
            self.tensors[name] = copy
        self.sums = dict(zip(form.names, sums_of(list(self.tensors.values()))))

    def take(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, Optional[_C.Delta]]]:
        """Becomes a copy of `tensors`: how many elements changed, and what of each tensor; ``None`` is all of it."""
        changed, deltas = 0, {}
        records = [Record((name,), *self.form.tensors[name], source=tensors[name]) for name in self.form.names]
        for batch in batches_to_copy(records):
            names = [str(record.path[0]) for record in batch]
            now = [contiguous(record.source, on_device=False) for record in batch]
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


class WeightPublisher(contextlib.AbstractContextManager["WeightPublisher"]):
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

    def __init__(
        self,
        location: Location,
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
        self._store = open_store(location, stream_options, writes=True)
        self._lock = threading.RLock()
        self._conflict: Optional[str] = None
        self._closed = False
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
            self._closed, self._snapshot = True, None
            self._store.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} can be neither copied nor pickled")

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
            if self._closed:
                raise ValueError("the publisher is closed")
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
        error = ConflictError(f"{self._store.name}: another publisher has taken over")
        error.source = self._store.name
        return error

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


# --- following --------------------------------------------------------------------------------------------------------


class _At(NamedTuple):
    """The version that a target held last as a whole."""

    run: str
    version: int
    state: str


@dataclasses.dataclass
class _Staged:
    """What was fetched."""

    at: _At
    form: Form
    changes: Changes
    sums: Mapping[str, int]
    metadata: Mapping[str, str]
    by_anchor: bool
    compared: bool = False  # the target was found to be what the changes are for


class WeightFollower(contextlib.AbstractContextManager["WeightFollower"]):
    """Keeps the tensors of a model at the newest version that a :class:`WeightPublisher` has published.

    The constructor loads the newest version. Then :meth:`fetch` downloads and checks a newer version without touching
    the tensors, and :meth:`apply` writes it in place. Every tensor keeps its ``data_ptr``. A version is written
    completely or not at all.

    Several threads may use one follower; their calls wait for each other, except for :attr:`version`,
    :attr:`metadata` and :attr:`changed`.

    Args:
        location: The location of the publisher: a folder, a ``file://`` or ``s3://`` URI, or an ``http(s)://`` URL that
            serves it.
        target: A module or a mapping of names to tensors. With ``None``, the follower keeps a copy in host memory,
            :attr:`tensors`.
        version: The version to load; ``None`` is the newest.
        strict: Raises if the target lacks names of the version. ``False`` skips these names.
        stream_options: Keywords of :func:`tensorizer.stream_io.open_stream` for URIs.
        encryption: The key of encrypted files.
        public_key: Accepts only files that one of these keys has signed.
        run: Follows only this run, 32 hexadecimal digits. ``None`` switches when a new run replaces the old one.
        timeout: Seconds to wait for the first version; ``None`` does not wait.

    Attributes:
        tensors: The tensors by name; without a `target`, the follower's own copy.

    Raises:
        StreamNotFoundError: Nothing was published there.
        VersionNotFoundError: `version` is not in the store; a ``LookupError``.
        LoadError: The target lacks a name, or a tensor has another shape or dtype, or no data. No tensor was read.
        FormatError, VerificationError, CryptographyError: The files are damaged. The content of `target` is then
            undefined.
        ValueError: The location is not a folder or a URI of these schemes.
        TypeError: An argument has a wrong type.
        OSError: The location cannot be read.

    Examples:
        >>> from tensorizer.weight_sync import WeightFollower, WeightPublisher
        >>> with WeightPublisher("weights") as publisher:
        ...     _ = publisher.publish({"weight": torch.ones(4)})
        >>> with WeightFollower("weights", None) as follower:
        ...     print(follower.version, follower.tensors["weight"])
        0 tensor([1., 1., 1., 1.])
    """

    def __init__(
        self,
        location: Location,
        target: Union[torch.nn.Module, Mapping[str, torch.Tensor], None],
        *,
        version: Optional[int] = None,
        strict: bool = True,
        stream_options: Optional[Mapping[str, Any]] = None,
        encryption: Optional[DecryptionParams] = None,
        public_key: PublicKeyArgument = None,
        run: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> None:
        if version is not None:
            config.integer("version", version, 0, END_OF_VERSIONS - 1)
        self._pinned = None if run is None else config.text("run", run)
        patience = 0.0 if timeout is None else config.seconds("timeout", timeout)
        self._store = open_store(location, stream_options, writes=False)
        self._access = self._store.read_options.reading(encryption, Trust.of(public_key, None))
        self._target = Target(target, bool(strict))
        self._lock = threading.RLock()
        self._closed = False
        self._read: Optional[Read] = None
        self._pointer: Optional[Pointer] = None  # the newest that was accepted
        self._highest: dict[str, int] = {}  # version that the target held, by run
        self._at: Optional[_At] = None
        self._form: Optional[Form] = None
        self._sums: Mapping[str, int] = {}
        self._staged: Optional[_Staged] = None
        self._torn = False  # a write was begun
        self._differs = False  # the target is not what its version says
        self._metadata: Mapping[str, str] = {}
        self._changed: tuple[str, ...] = ()
        self._begin(self._first_pointer(patience), version)

    # ---- what users ask ---------------------------------------------------------------------------------------------

    @property
    def version(self) -> Optional[int]:
        """The version that the target holds; ``None`` while it is between two versions, or if its tensors differ."""
        return None if self._at is None or self._torn or self._differs else self._at.version

    @property
    def metadata(self) -> dict[str, str]:
        """The texts that were published with the version; a copy."""
        return dict(self._metadata)

    @property
    def changed(self) -> tuple[str, ...]:
        """All names of the tensors that the last :meth:`apply` wrote; after the constructor, all names."""
        return self._changed

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The target's tensors by name; without a target, the copy in host memory. Tied names have one tensor."""
        return dict(self._target.tensors)

    def latest(self) -> int:
        """The newest version that the store has. This takes one small request.

        Raises:
            OSError: The location cannot be read.
        """
        with self._lock:
            return self._look().version

    def wait(self, timeout: float, poll: float = 1.0) -> bool:
        """Waits until the store has a newer version than the target, or a version of a new run.

        Args:
            timeout: Seconds to wait at most.
            poll: Seconds between two requests.

        Returns:
            Whether the store has such a version.
        """
        deadline = time.monotonic() + config.seconds("timeout", timeout)
        interval = config.seconds("poll", poll, above_zero=True)
        while True:
            with self._lock:
                pointer = self._look()
                at = self._at if self.version is not None else None
            if at is None or pointer.run != at.run or pointer.version > at.version:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(interval, left))

    def fetch(self, version: Optional[int] = None) -> bool:
        """Downloads and checks a version. The target is not touched before :meth:`apply`.

        Args:
            version: The version; ``None`` is the newest. It may be older than the target's.

        Returns:
            Whether a version is ready to be applied: this one, or one that an earlier call has fetched.

        Raises:
            VersionNotFoundError: The store does not have the version, or has deleted it; a ``LookupError``.
            LoadError: The tensors in the store now have other names, shapes or dtypes.
            FormatError, VerificationError, CryptographyError: A file that the version needs is damaged.
            OSError: The location cannot be read.
        """
        if version is not None:
            config.integer("version", version, 0, END_OF_VERSIONS - 1)
        with self._lock:
            pointer = self._look()
            goal = pointer.version if version is None else version
            if self.version == goal and self._at is not None and self._at.run == pointer.run:
                if version is not None:
                    self._staged = None
                return self._staged is not None
            staged = self._staged
            if staged is not None and (staged.at.run, staged.at.version) == (pointer.run, goal):
                return True
            self._staged = self._follow(pointer, version)
            return True

    def apply(self) -> Applied:
        """Writes the fetched version over the target, in place. It compares the old elements before the first write.

        If it is interrupted (for example by Ctrl-C), :attr:`version` is ``None``, and the next call completes it.
        Autograd does not notice the writes: afterwards, do not use graphs that were recorded before.

        Returns:
            The number of tensors and elements that were written; 0 if nothing was fetched.

        Raises:
            StateMismatchError: Something else has changed tensors of the target; the message names them. Nothing was
                written, :attr:`version` is ``None``, and the next :meth:`update` repairs the target with whole tensors.
        """
        with self._lock:
            self._check_open()
            staged = self._staged
            if staged is None:
                self._changed = ()
                return Applied(self.version, 0, 0)
            self._compare(staged)
            self._torn = True
            self._target.take_form(staged.form, self._store.name)
            self._target.write(staged.changes)
            return self._hold(staged)

    def update(self) -> Applied:
        """:meth:`fetch`, then :meth:`apply`."""
        with self._lock:
            self.fetch()
            return self.apply()

    def verify(self) -> bool:
        """Reads the whole target and compares it with the version that it should hold.

        Returns:
            ``True``.

        Raises:
            StateMismatchError: Tensors differ; the message names them. The next :meth:`update` repairs them.
        """
        with self._lock:
            self._check_open()
            if self.version is None:
                raise StateMismatchError(f"{self._store.name}: the target is between two versions: call update()")
            wrong = list(dict.fromkeys(name for name, value in self._target.sums() if value != self._sums[name]))
            if wrong:
                raise self._mismatch(wrong, self._at)
            return True

    def close(self) -> None:
        """Frees a fetched version that was not applied. The target stays as it is. A second call does nothing."""
        with self._lock:
            self._closed, self._staged = True, None
            self._store.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} can be neither copied nor pickled")

    # ---- the pointer ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the follower is closed")

    def _first_pointer(self, patience: float) -> Pointer:
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(StreamNotFoundError):
                return self._look()
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(0.2, left))
        what = "version" if self._pinned is None else f"version of run {self._pinned}"
        error = StreamNotFoundError(f"{self._store.name}: no {what} was published there")
        error.source = self._store.name
        raise error

    def _look(self) -> Pointer:
        """The newest pointer that counts.

        Raises:
            StreamNotFoundError: There is none.
        """
        self._check_open()
        read = self._store.read_pointer(self._read)
        if read is not None and read is not self._read:
            pointer = read_pointer(self._store.name, read.content)
            self._read = read
            if self._accepts(pointer):
                self._pointer = pointer
        if self._pointer is None or read is None:
            error = StreamNotFoundError(f"{self._store.name}: no version is there")
            error.source = self._store.name
            raise error
        return self._pointer

    def _accepts(self, pointer: Pointer) -> bool:
        name, highest = self._store.name, self._highest.get(pointer.run, -1)
        if self._pinned is not None and pointer.run != self._pinned:
            logger.warning("%s: ignored: expected run %s, got run %s", name, self._pinned, pointer.run)
            return False
        if pointer.version < highest:
            logger.warning(
                "%s: ignored: version %d of run %s is older than %d, which this follower had",
                name, pointer.version, pointer.run, highest,
            )  # fmt: skip
            return False
        if self._at is not None and pointer.run != self._at.run:
            logger.warning("%s: run %s is replaced by run %s", name, self._at.run, pointer.run)
        return True

    # ---- fetching ---------------------------------------------------------------------------------------------------

    def _follow(self, pointer: Pointer, version: Optional[int]) -> _Staged:
        """What leads to a version, from a pointer or, if files are deleted meanwhile, from a newer one."""
        while True:
            try:
                return self._fetched(pointer, pointer.version if version is None else version)
            except StreamNotFoundError:
                newer = self._look()
                if newer is pointer:
                    raise
                pointer = newer

    def _fetched(self, pointer: Pointer, goal: int) -> _Staged:
        self._check_has(pointer, goal)
        failure: Optional[Exception] = None
        for route in pointer.routes(goal, self._start_in(pointer)):
            try:
                return self._by(route, pointer, goal)
            except StreamNotFoundError as error:
                if self._look() is not pointer:
                    raise
                failure = failure or error
            except _DAMAGE as error:
                failure = failure or error
            logger.warning("%s: version %d: this way is closed: %s", self._store.name, goal, failure)
        raise failure or self._no_version(goal)

    def _check_has(self, pointer: Pointer, goal: int) -> None:
        if goal not in pointer.states:
            raise self._no_version(goal)

    def _no_version(self, goal: int) -> VersionNotFoundError:
        error = VersionNotFoundError(f"{self._store.name}: there is no version {goal}")
        error.source = self._store.name
        return error

    def _start_in(self, pointer: Pointer) -> Optional[int]:
        """The version from which deltas of a pointer lead on; ``None`` where none do."""
        at = self._at
        if at is None or self._differs or at.run != pointer.run or pointer.states.get(at.version) != at.state:
            return None
        if self._torn and (self._staged is None or self._staged.by_anchor):
            return None
        return at.version

    def _by(self, route: Route, pointer: Pointer, goal: int) -> _Staged:
        at = _At(pointer.run, goal, pointer.states[goal])
        if route.anchor is None:
            assert self._form is not None
            assert self._at is not None
            form, base, whole, metadata = self._form, self._at.version, None, self._metadata
        else:
            base = route.anchor
            with files.checked_file(anchor_name(base), base, pointer, self._store, self._access) as file:
                form = form_of_anchor(file)
                self._target.check_form(form, file.source_name)
                numbers = {str(name): i for i, name in enumerate(file.names)}
                tensors = file.read([numbers[name] for name in form.names], verify=True)
                whole, metadata = dict(zip(form.names, tensors)), files.user_metadata(file)
        deltas = self._deltas(route, base, form, pointer)
        changes = files.merged(deltas, form, whole)
        if deltas:
            sums, metadata = dict(zip(form.names, deltas[-1].sums)), deltas[-1].metadata
        else:
            assert whole is not None
            sums = dict(zip(form.names, sums_of([whole[name] for name in form.names])))
            if state_of(list(sums.values())) != at.state:
                raise FormatError(f"{self._store.name}: {anchor_name(base)}: its tensors are not those of its state")
        return _Staged(at, form, changes, sums, metadata, route.anchor is not None, compared=self._torn)

    def _deltas(self, route: Route, base: int, form: Form, pointer: Pointer) -> list[files.ReadDelta]:
        deltas = []
        for version in route.deltas:
            deltas.append(files.read_delta(version, base, form, pointer, self._store, self._access))
            base = version
        return deltas

    # ---- the target -------------------------------------------------------------------------------------------------

    def _begin(self, pointer: Pointer, version: Optional[int]) -> None:
        """Brings the target to a version, from what it holds if that is one."""
        while True:
            try:
                if version is not None:
                    self._check_has(pointer, version)
                if self._resumes(pointer):
                    goal = pointer.version if version is None else version
                    if self._at is not None and goal != self._at.version:
                        self._staged = self._follow(pointer, version)
                        self.apply()
                else:
                    self._load(pointer, version)
                break
            except StreamNotFoundError:
                newer = self._look()
                if newer is pointer:
                    raise
                pointer = newer
        self._changed = self._target.names_of(self._target.firsts)

    def _resumes(self, pointer: Pointer) -> bool:
        """Whether the target holds a version that the pointer names."""
        if self._target.owns:
            return False
        for anchor in reversed(pointer.anchors):
            try:
                form, _ = files.read_anchor_form(anchor, pointer, self._store, self._access)
                break
            except _DAMAGE as error:
                if isinstance(error, StreamNotFoundError) and self._look() is not pointer:
                    raise
        else:
            return False
        self._target.take_form(form, self._store.name)
        if not self._target.is_whole or not set(form.ties) <= self._target.tensors.keys():
            return False
        found = self._target.sums()
        sums = dict(found)
        if any(sums[name] != value for name, value in found):  # ties that differ
            return False
        state = state_of([sums[name] for name in form.names])
        version = max((v for v, known in pointer.states.items() if known == state), default=None)
        if version is None:
            return False
        self._form, self._sums = form, sums
        self._note(_At(pointer.run, version, state), self._metadata_of(version, pointer))
        return True

    def _metadata_of(self, version: int, pointer: Pointer) -> Mapping[str, str]:
        name = delta_name(version) if version in pointer.deltas else anchor_name(version)
        try:
            with files.checked_file(name, version, pointer, self._store, self._access) as file:
                return files.user_metadata(file)
        except _DAMAGE:
            return {}

    def _load(self, pointer: Pointer, version: Optional[int]) -> None:
        """Reads a version straight into the target: an anchor, then deltas. ``None`` is the newest that is sound."""
        goals = sorted(pointer.states, reverse=True) if version is None else [version]
        failure: Optional[Exception] = None
        for goal in goals:
            for route in pointer.routes(goal, None):
                try:
                    self._load_by(route, pointer, goal)
                    return
                except StreamNotFoundError as error:
                    if self._look() is not pointer:
                        raise
                    failure = failure or error
                except _DAMAGE as error:
                    failure = failure or error
                logger.warning("%s: version %d: this way is closed: %s", self._store.name, goal, failure)
        raise failure or self._no_version(goals[0])

    def _load_by(self, route: Route, pointer: Pointer, goal: int) -> None:
        base = route.anchor
        assert base is not None
        with files.checked_file(anchor_name(base), base, pointer, self._store, self._access) as file:
            form = form_of_anchor(file)
            metadata: Mapping[str, str] = files.user_metadata(file)
            self._target.take_form(form, file.source_name)
            self._target.fill(file)
        found = self._target.sums()
        sums = dict(found)
        at = _At(pointer.run, base, pointer.states[base])
        expected = sums
        if not self._target.is_whole or state_of([sums[name] for name in form.names]) != at.state:
            expected = self._sums_beside(base, form, pointer) or ({} if self._target.is_whole else sums)
        wrong = list(dict.fromkeys(name for name, value in found if value != expected.get(name)))
        if wrong:
            raise self._mismatch(wrong, at)
        self._form, self._sums = form, expected
        deltas = self._deltas(route, base, form, pointer)
        if deltas:
            at = _At(pointer.run, goal, pointer.states[goal])
            changes = files.merged(deltas, form)
            self._staged = _Staged(
                at, form, changes, dict(zip(form.names, deltas[-1].sums)), deltas[-1].metadata, by_anchor=True
            )
            self._compare(self._staged)
            self._target.write(changes)
            self._sums, metadata, self._staged = self._staged.sums, deltas[-1].metadata, None
        self._note(at, metadata)

    def _sums_beside(self, base: int, form: Form, pointer: Pointer) -> Optional[dict[str, int]]:
        """The sums of an anchor's version, of the delta beside it."""
        if base not in pointer.deltas:
            return None
        with files.checked_file(delta_name(base), base, pointer, self._store, self._access) as file:
            numbers = {name: i for i, name in enumerate(file.names)}
            (sums,) = file.read([numbers["sums"]], verify=True)
        return dict(zip(form.names, (value & (1 << 64) - 1 for value in sums.tolist())))

    def _compare(self, staged: _Staged) -> None:
        """Raises :class:`StateMismatchError` if the target is not what the changes are for."""
        if not staged.compared and (not staged.by_anchor or staged.changes.pairs):
            wrong = self._target.differing(staged.changes, self._sums, staged.sums)
            if wrong:
                raise self._mismatch(wrong, staged.at)
        staged.compared = True

    def _mismatch(self, names: Sequence[str], at: Optional[_At]) -> StateMismatchError:
        self._differs, self._staged = True, None
        version = "its version" if at is None else f"version {at.version}"
        error = StateMismatchError(
            f"{self._store.name}: {version}: tensors are not what was published, or were changed: {listed(list(names))}"
        )
        error.source = self._store.name
        return error

    def _hold(self, staged: _Staged) -> Applied:
        """Notes that the target holds what was staged."""
        here = set(self._target.firsts)
        changes = staged.changes
        names = [
            name for name in staged.form.names if name in here and (name in changes.pairs or name in changes.whole)
        ]
        elements = sum(changes.pairs[n].delta.changed if n in changes.pairs else staged.form.numel(n) for n in names)
        self._form, self._sums, self._staged = staged.form, staged.sums, None
        self._changed = self._target.names_of(names)
        self._note(staged.at, staged.metadata)
        return Applied(staged.at.version, len(names), elements)

    def _note(self, at: _At, metadata: Mapping[str, str]) -> None:
        self._at, self._metadata = at, metadata
        self._torn = self._differs = False
        self._highest[at.run] = max(at.version, self._highest.get(at.run, -1))

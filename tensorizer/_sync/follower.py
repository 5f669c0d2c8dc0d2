"""Following published weights: what :mod:`tensorizer.weight_sync` gives servers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar, Union

import torch

from tensorizer._encryption import DecryptionParams
from tensorizer._format.names import listed
from tensorizer._io.call_options import Trust
from tensorizer._io.s3.conditional import Read
from tensorizer._signing import PublicKeyArgument
from tensorizer._sync import files
from tensorizer._sync.files import Changes
from tensorizer._sync.forms import Form, form_of_anchor, state_of, sums_of
from tensorizer._sync.pointer import END_OF_VERSIONS, Pointer, Route, anchor_name, delta_name, read_pointer
from tensorizer._sync.stores import StoreUser, open_store
from tensorizer._sync.target import Target
from tensorizer._system import config
from tensorizer.errors import (
    CryptographyError,
    FormatError,
    StateMismatchError,
    StreamNotFoundError,
    VerificationError,
    VersionNotFoundError,
)

logger = logging.getLogger("tensorizer.weight_sync")

_Result = TypeVar("_Result")

# What is wrong with a file, so that another way is tried.
_DAMAGE = (FormatError, VerificationError, CryptographyError, StreamNotFoundError)


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


class WeightFollower(StoreUser):
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

    __module__ = "tensorizer.weight_sync"  # where users import it from

    def __init__(
        self,
        location: Union[str, os.PathLike[str]],
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
        super().__init__(open_store(location, stream_options, writes=False))
        self._access = self._store.read_options.reading(encryption, Trust.of(public_key, None))
        self._target = Target(target, bool(strict))
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
                raise self._store.error(StateMismatchError, "the target is between two versions: call update()")
            wrong = list(dict.fromkeys(name for name, value in self._target.sums() if value != self._sums[name]))
            if wrong:
                raise self._mismatch(wrong, self._at)
            return True

    def close(self) -> None:
        """Frees a fetched version that was not applied. The target stays as it is. A second call does nothing."""
        with self._lock:
            self._staged = None
            super().close()

    # ---- the pointer ------------------------------------------------------------------------------------------------

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
        raise self._store.error(StreamNotFoundError, f"no {what} was published there")

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
            raise self._store.error(StreamNotFoundError, "no version is there")
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
        """What leads to a version."""

        def fetched(pointer: Pointer) -> _Staged:
            goal = pointer.version if version is None else version
            self._check_has(pointer, goal)
            return self._by_soundest(self._by, pointer, [goal], self._start_in(pointer))

        return self._while_files_go(fetched, pointer)

    def _while_files_go(self, work: Callable[[Pointer], _Result], pointer: Pointer) -> _Result:
        """Does `work` with a pointer or, if files of it are deleted meanwhile, with a newer one."""
        while True:
            try:
                return work(pointer)
            except StreamNotFoundError:
                newer = self._look()
                if newer is pointer:
                    raise
                pointer = newer

    def _by_soundest(
        self,
        go: Callable[[Route, Pointer, int], _Result],
        pointer: Pointer,
        goals: Sequence[int],
        start: Optional[int],
    ) -> _Result:
        """Goes to the first of some versions, by the first way whose files are all sound."""
        failure: Optional[Exception] = None
        for goal in goals:
            for route in pointer.routes(goal, start):
                try:
                    return go(route, pointer, goal)
                except StreamNotFoundError as error:
                    if self._look() is not pointer:
                        raise
                    failure = failure or error
                except _DAMAGE as error:
                    failure = failure or error
                logger.warning("%s: version %d: this way is closed: %s", self._store.name, goal, failure)
        raise failure or self._no_version(goals[0])

    def _check_has(self, pointer: Pointer, goal: int) -> None:
        if goal not in pointer.states:
            raise self._no_version(goal)

    def _no_version(self, goal: int) -> VersionNotFoundError:
        return self._store.error(VersionNotFoundError, f"there is no version {goal}")

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
                raise self._store.error(FormatError, f"{anchor_name(base)}: its tensors are not those of its state")
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

        def begin(pointer: Pointer) -> None:
            if version is not None:
                self._check_has(pointer, version)
            if not self._resumes(pointer):
                goals = sorted(pointer.states, reverse=True) if version is None else [version]
                self._by_soundest(self._load_by, pointer, goals, None)
            elif self._at is not None and self._at.version != (pointer.version if version is None else version):
                self._staged = self._follow(pointer, version)
                self.apply()

        self._while_files_go(begin, pointer)
        self._changed = self._target.names_of(self._target.firsts)

    def _resumes(self, pointer: Pointer) -> bool:
        """Whether the target holds a version that the pointer names."""
        if self._target.owns:
            return False
        for anchor in reversed(pointer.anchors):
            try:
                with files.checked_file(anchor_name(anchor), anchor, pointer, self._store, self._access) as file:
                    form = form_of_anchor(file)
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

    def _load_by(self, route: Route, pointer: Pointer, goal: int) -> None:
        """Reads a version straight into the target: an anchor, then deltas."""
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
        text = f"{version}: tensors are not what was published, or were changed: {listed(list(names))}"
        return self._store.error(StateMismatchError, text)

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

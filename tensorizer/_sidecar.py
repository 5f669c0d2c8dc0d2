"""Runs one ``torch.save`` or ``torch.load`` under torch_compat, which keeps the storages in a sidecar file.

A *session* belongs to one call. The pickler asks it for a persistent id of each storage; the unpickler passes such ids
to it and gets the storages. The save marks the two files as a pair: it writes the name of the sidecar, the sizes of the
storages and a random number behind the pickle, where every unpickler has stopped reading, and the same number into the
eight reserved bytes of the sidecar's prologue, which every reader skips.
"""

from __future__ import annotations

import io
import os
import pickle
import types
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Callable, Optional

import torch

from tensorizer import _pairs
from tensorizer._pairs import PairNote, Target
from tensorizer._system.devices import empty
from tensorizer._system.redaction import shown_location
from tensorizer._system.sizes import counted
from tensorizer.errors import FormatError

# A persistent id: (marker, version, kind, index in the sidecar, dtype of a typed storage or None).
_MARKER = "TensorizerPickler"
_VERSION = 0
_KIND = "storage"


# --- saving --------------------------------------------------------------------------------------------------------


def default_save(file_obj: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
    """Writes the storages as a list, which every release can read."""
    from tensorizer import serialization

    with serialization.TensorSerializer(file_obj, **kwargs) as serializer:
        serializer.write_state_dict(tensors)


def _storage_with_data(obj: Any) -> Optional[torch.UntypedStorage]:
    storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
    if not isinstance(storage, torch.UntypedStorage):
        return None
    if storage.device.type == "meta" or storage.nbytes() == 0 or storage.data_ptr() == 0:
        return None
    return storage


class _Found(Exception):
    pass


class _StorageFinder(pickle.Pickler):
    """Raises at the first storage with data that it pickles."""

    def persistent_id(self, obj: Any) -> Optional[str]:
        if _storage_with_data(obj) is not None:
            raise _Found
        return "" if torch.is_storage(obj) or isinstance(obj, torch.storage.TypedStorage) else None


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return memoryview(data).nbytes


def has_tensor_data(obj: Any) -> bool:
    """Whether pickling the object would store bytes of tensors. False if the object cannot be pickled."""
    try:
        _StorageFinder(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    except _Found:
        return True
    except Exception:  # the caller's own pickler raises the error
        return False
    return False


class SaveSession:
    """One ``torch.save``: collects the storages it meets and writes them once the pickle is complete."""

    def __init__(
        self,
        location: Any,
        save: Callable[..., Any],
        kwargs: dict[str, Any],
        target: Target,
        *,
        is_default: bool = False,
        is_fixed: bool = False,
    ) -> None:
        self.before_writing: Callable[[], None] = lambda: None  # may raise
        self.storages: list[torch.Tensor] = []  # also keeps them alive, so that no other storage gets the same address
        self._indices: dict[tuple[str, int, int], int] = {}
        self._location, self._save, self._kwargs, self._target = location, save, kwargs, target
        self._is_default, self._is_fixed = is_default, is_fixed
        self._path = _pairs.path_of(location)
        self._pair_id = _pairs.new_pair_id() if self._path is not None and save is default_save else 0

    def persistent_id(self, obj: Any) -> Optional[tuple[Any, ...]]:
        """The id of a storage with data; ``None`` means that torch pickles the object."""
        storage = _storage_with_data(obj)
        if storage is None:
            return None
        dtype = obj.dtype if isinstance(obj, torch.storage.TypedStorage) else None
        return (_MARKER, _VERSION, _KIND, self._index_of(storage), dtype)

    def _index_of(self, storage: torch.UntypedStorage) -> int:
        key = (str(storage.device), storage.data_ptr(), storage.nbytes())
        index = self._indices.setdefault(key, len(self.storages))
        if index == len(self.storages):
            # device and dtype are explicit: the caller may have set defaults
            self.storages.append(empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return index

    def finish(self, pickle_file: Any) -> None:
        """Writes the sidecar, then the note about it behind the pickle."""
        if not self.storages:
            return
        sizes = tuple(tensor.numel() for tensor in self.storages)
        self.before_writing()
        if self._path is not None and self._pair_id:
            self._spare_older(self._path)
        self._save(self._location, self.storages, self._kwargs)
        is_stamped = bool(self._pair_id) and _pairs.stamp(self._location, self._pair_id)
        # In torch's zip format the pickle is a separate record, built in memory. In the older format other pickles
        # follow in the same file, and nothing may stand between them.
        if isinstance(pickle_file, io.BytesIO) and pickle_file is not self._target.f:
            pickle_file.write(PairNote(self._pair_id if is_stamped else 0, sizes, self._name).to_bytes())

    def _spare_older(self, path: str) -> None:
        """Keeps the sidecar that this save would replace, if another object needs it."""
        if not self._is_fixed:
            _pairs.keep_if_needed(path, self._target, is_default=self._is_default)
        elif self._target.names(_pairs.stamp_of(path)):
            raise ValueError(
                f"{path} has the tensors of an object that is in {self._target.path} already, which would be lost: "
                "give tensorizer_saving a function that names a location for each object, or a list"
            )

    def facts(self, obj: Any) -> Any:
        """Adds the note to the facts that torch's older format stores before the object; returns others unchanged."""
        return PairNote(self._pair_id, None, self._name).in_facts(obj) if _pairs.is_facts(obj) else obj

    @property
    def _name(self) -> str:
        return "" if self._path is None else os.path.basename(self._path)


def _asked_first(ours: Callable[[Any], Any], torchs: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks ours first and torch's if ours returns ``None``. Torch calls it with (id) if it is an
    attribute of an object, else with (self, id)."""

    def ask(*args: Any) -> Any:
        answer = ours(args[-1])
        return torchs(*args) if answer is None else answer

    return ask


def pickle_for_saving(session: SaveSession) -> Any:
    """A ``pickle_module`` for ``torch.save`` whose pickler asks the session first."""

    class Pickler(pickle.Pickler):
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(file, *args, **kwargs)
            self._pickle_file = file

        def __init_subclass__(cls) -> None:  # torch defines the method in a subclass ...
            super().__init_subclass__()
            if "persistent_id" in cls.__dict__:
                torchs = cls.__dict__["persistent_id"]
                setattr(cls, "persistent_id", _asked_first(session.persistent_id, torchs))  # noqa: B010

        def __setattr__(self, name: str, value: Any) -> None:  # ... or, before 2.4, sets it on the object
            super().__setattr__(name, _asked_first(session.persistent_id, value) if name == "persistent_id" else value)

        def dump(self, obj: Any) -> None:
            super().dump(obj)
            session.finish(self._pickle_file)

    def dump(obj: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        pickle.dump(session.facts(obj), file, *args, **kwargs)

    return _ModuleForSaving(**{**vars(pickle), "Pickler": Pickler, "dump": dump})


class _ModuleForSaving(types.SimpleNamespace):
    pass


def sends_tensors_to_sidecar(pickle_module: Any) -> bool:
    """Whether :func:`pickle_for_saving` made the module."""
    return isinstance(pickle_module, _ModuleForSaving)


# --- loading -------------------------------------------------------------------------------------------------------


def default_load(file_obj: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Loads the storages that :func:`default_save` wrote."""
    from tensorizer import serialization

    if kwargs.get("dtype") not in (None, torch.uint8):
        raise ValueError(
            f"tensorizer_loading: dtype={kwargs['dtype']} cannot be applied to whole storages; convert the tensors "
            "after torch.load"
        )
    with serialization.TensorDeserializer(file_obj, **kwargs) as deserializer:
        tensors: Any = deserializer.tree(default=[])
    is_list = isinstance(tensors, list) and all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    if not is_list or any(tensor.dtype != torch.uint8 or tensor.dim() != 1 for tensor in tensors):
        raise FormatError(
            f"{shown_location(file_obj)}: expected a list of storages written under tensorizer_saving, got others"
        )
    return tensors  # type: ignore[no-any-return]


def _default_tag() -> str:
    """The default device of tensors, which ``map_location`` is told as the place from which they were saved."""
    from tensorizer.utils import get_device

    return f"cuda:{torch.cuda.current_device()}" if get_device().type == "cuda" else "cpu"


def load_device(map_location: Any) -> Optional[torch.device]:
    """The device that ``map_location`` asks for; ``None`` if it names no device.

    If it is a function, it gets storages on the CPU, as from torch, and moves them itself.
    """
    if map_location is None:
        return None
    if isinstance(map_location, torch.device):
        return map_location
    if isinstance(map_location, (str, bytes)):
        return torch.device(os.fsdecode(map_location))
    if isinstance(map_location, dict):
        tag = _default_tag()
        return torch.device(map_location.get(tag, tag))
    return torch.device("cpu")


class LoadSession:
    """One ``torch.load``: loads the sidecar at the first reference to it and hands out its storages."""

    def __init__(
        self,
        location: Any,
        load: Callable[[Any, dict[str, Any]], Any],
        kwargs: dict[str, Any],
        map_location: Any,
        target: Target,
        *,
        is_default: bool = False,
        is_fixed: bool = False,
    ) -> None:
        self.note: Optional[PairNote] = None  # the unpickler fills it in
        self._location, self._load, self._kwargs, self._map_location = location, load, kwargs, map_location
        self._target, self._is_default, self._is_fixed = target, is_default, is_fixed
        self._storages: Optional[list[torch.UntypedStorage]] = None
        self._sizes: list[int] = []  # sizes of the storages when they were handed out

    def persistent_load(self, pid: Any) -> Optional[torch.storage.TypedStorage]:
        """The storage that a persistent id stands for; ``None`` means that torch resolves the id."""
        if not (isinstance(pid, tuple) and len(pid) >= 3 and pid[0] == _MARKER):
            return None
        version, kind = pid[1], pid[2]
        if not isinstance(version, int) or version > _VERSION or kind != _KIND:
            raise pickle.UnpicklingError(
                f"expected a storage reference of version {_VERSION}, got version {version!r} of kind {kind!r}: "
                "saved by a newer release of tensorizer?"
            )
        index, dtype = (pid[3], pid[4]) if len(pid) >= 5 else (None, None)
        if not isinstance(index, int) or not (dtype is None or isinstance(dtype, torch.dtype)):
            raise pickle.UnpicklingError(f"malformed storage reference {pid!r}")
        if self._storages is None:
            self._storages = self._load_storages()
            self._sizes = [storage.nbytes() for storage in self._storages]
        if not 0 <= index < len(self._storages):
            raise self._mismatch(f"expected storage {index}, got {counted(len(self._storages), 'storage')}")
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=self._storages[index], dtype=torch.uint8 if dtype is None else dtype, _internal=True
        )

    def check_unpickled(self) -> None:
        """Refuses storages that were too short: torch lengthened them, with whatever was in memory."""
        for index, (storage, nbytes) in enumerate(zip(self._storages or (), self._sizes)):
            if storage.nbytes() > nbytes:
                raise self._mismatch(f"storage {index}: expected {storage.nbytes()} bytes, got {nbytes}")

    def explained(self, error: Exception) -> Exception:
        """The error to raise for a failed load; it names the sidecar if torch could not lengthen a storage."""
        return self._mismatch("a storage is too short for its tensor") if "not resizable" in str(error) else error

    def _mismatch(self, problem: str) -> FormatError:
        return FormatError(f"{shown_location(self._location)} does not belong to this file: {problem}")

    def _load_storages(self) -> list[torch.UntypedStorage]:
        if not self._is_fixed:
            self._location = _pairs.find(self._location, self.note, self._target)
        if self._load is not default_load:
            tensors: Iterable[torch.Tensor] = self._load(self._location, self._kwargs)
            storages = [tensor.untyped_storage() for tensor in tensors]
            self._check_sizes(storages, exact=False)
            return storages
        path = _pairs.path_of(self._location)
        if self._is_default and path is not None and not os.path.lexists(path):
            raise _pairs.missing(path, self.note, self._target)
        self._check_stamp()
        kwargs = self._kwargs
        move: Optional[Callable[[Any, str], Any]] = None
        if kwargs.get("device") is None and self._map_location is not None:
            kwargs = {**kwargs, "device": load_device(self._map_location)}
            move = self._map_location if callable(self._map_location) else None
        storages = [tensor.untyped_storage() for tensor in self._load(self._location, kwargs)]
        self._check_sizes(storages, exact=True)
        return storages if move is None else _moved(storages, move)

    def _check_stamp(self) -> None:
        wanted = self.note.pair_id if self.note else 0
        found = _pairs.stamp_of(self._location) if wanted else 0
        if found not in (0, wanted):
            raise self._mismatch(
                f"it was written with another one (expected pair number {wanted:016x}, got {found:016x}); "
                f"{_pairs.PATTERNS}"
            )

    def _check_sizes(self, storages: list[torch.UntypedStorage], exact: bool) -> None:
        if self.note is None or self.note.sizes is None:
            return
        wanted, found = self.note.sizes, [storage.nbytes() for storage in storages]
        problem = None
        if len(found) != len(wanted):
            problem = f"expected {counted(len(wanted), 'storage')}, got {len(found)}"
        for index, (want, have) in enumerate(zip(wanted, found)):
            if problem is None and (have != want if exact else have < want):
                problem = f"storage {index}: expected {want} bytes, got {have}"
        if problem:
            raise self._mismatch(problem)


def _moved(storages: list[torch.UntypedStorage], move: Callable[[Any, str], Any]) -> list[torch.UntypedStorage]:
    tag = _default_tag()
    moved = []
    for storage in storages:
        result = move(storage, tag)
        if result is None:
            result = torch.serialization.default_restore_location(storage, tag)  # type: ignore[no-untyped-call]
        moved.append(result._untyped_storage if isinstance(result, torch.storage.TypedStorage) else result)
    return moved


current_load: ContextVar[Optional[LoadSession]] = ContextVar("tensorizer_current_load", default=None)


def _session_first(session: Optional[LoadSession], torchs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return torchs if session is None else _asked_first(session.persistent_load, torchs)


def _take_note(session: Optional[LoadSession], file: Any) -> None:
    if session is not None and isinstance(file, io.BytesIO):
        session.note = PairNote.behind_pickle(file.getbuffer())


def _with_note_taken(session: Optional[LoadSession], obj: Any) -> Any:
    """Returns the unpickled object. In torch's older format, it takes the note from one of the first pickles."""
    if session is not None and session.note is None:
        session.note = PairNote.from_facts(obj)
    return obj


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, **kwargs: Any) -> None:
        super().__init__(file, **kwargs)
        self._session = current_load.get()
        _take_note(self._session, file)

    def __setattr__(self, name: str, value: Any) -> None:  # torch sets persistent_load on the object
        super().__setattr__(name, _session_first(self._session, value) if name == "persistent_load" else value)

    def load(self) -> Any:
        return _with_note_taken(self._session, super().load())


def _load_one(file: Any, **kwargs: Any) -> Any:
    return _Unpickler(file, **kwargs).load()


#: A ``pickle_module`` for ``torch.load`` whose unpickler asks the current session first.
PICKLE_FOR_LOADING: Any = types.SimpleNamespace(**{**vars(pickle), "Unpickler": _Unpickler, "load": _load_one})


class _StorageWord(str):
    """The marker of our ids, for torch's restricted unpickler, which admits only ids that begin with "storage"."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == _KIND or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class SafeUnpickler(torch._weights_only_unpickler.Unpickler):
    """Torch's unpickler for ``weights_only=True``, which also accepts the ids of sidecar storages.

    It replaces torch's while a loading block is active anywhere in the process; without a session it does the same as
    torch's. Torch alone decides which objects may be unpickled: an id gives a storage of raw bytes or an error.
    """

    def __init__(self, file: Any, **kwargs: Any) -> None:
        super().__init__(file, **kwargs)
        self._session = current_load.get()
        _take_note(self._session, file)

    def load(self) -> Any:
        return _with_note_taken(self._session, super().load())  # type: ignore[no-untyped-call]

    @property
    def persistent_load(self) -> Any:
        return self.__dict__.get("_persistent_load") or super().persistent_load

    @persistent_load.setter
    def persistent_load(self, value: Any) -> None:
        self.__dict__["_persistent_load"] = _session_first(self._session, value)

    def pop_mark(self) -> list[Any]:
        items: list[Any] = super().pop_mark()  # type: ignore[no-untyped-call]
        if self._session is not None and len(items) == 5 and items[0] == _MARKER and items[2] == _KIND:
            items[0] = _StorageWord(_MARKER)
        return items

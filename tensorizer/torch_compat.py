"""``torch.save`` and ``torch.load`` with the tensors in a ``.tensors`` file beside the ``.pt`` file.

Inside :func:`tensorizer_saving` and :func:`tensorizer_loading`, torch still writes and reads the pickled structure.
Every storage that has data goes to a second file, the *sidecar*. Arbitrary objects, shared storages, views, strides and
``requires_grad`` survive as with plain torch. ``docs/training.md`` is the guide, ``docs/format.md``
("Sidecars of torch.save") says what the two files hold.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, BinaryIO, Callable, NamedTuple, Optional, Union

import torch

from tensorizer import _pairs
from tensorizer._io.uri import check_is_path, identity_of
from tensorizer._pairs import Target
from tensorizer._sidecar import (
    PICKLE_FOR_LOADING,
    LoadSession,
    SafeUnpickler,
    SaveSession,
    current_load,
    default_load,
    default_save,
    has_tensor_data,
    pickle_for_saving,
    sends_tensors_to_sidecar,
)
from tensorizer._system.config import env_text
from tensorizer._system.patches import Activity, Block, CountedPatch, in_this_task
from tensorizer._system.redaction import shown_location

__all__ = ("tensorizer_saving", "tensorizer_loading")  # noqa: RUF022 - the order that callers know

logger = logging.getLogger(__name__)

_FileLike = Union[str, "os.PathLike[str]", BinaryIO]
_Location = Union[str, bytes, int, "os.PathLike[str]", BinaryIO]
_Locator = Callable[[Any], Optional[_Location]]
SaveFunc = Callable[[Any, list[torch.Tensor], dict[str, Any]], Any]
LoadFunc = Callable[[Any, dict[str, Any]], Iterable[torch.Tensor]]
LocationSpec = Union[_Location, _Locator, "Sequence[Union[_Location, _Locator, None]]", None]

# The original functions, which the wrappers call even if other code replaces them later.
_torch_save = torch.save
_torch_load = torch.load
_LOAD_WRAPPER_DEFAULT_MODULE: Any = inspect.signature(_torch_load).parameters["pickle_module"].default


class _Context(NamedTuple):
    """The arguments of one active ``tensorizer_saving`` or ``tensorizer_loading`` block."""

    locations: _Locations
    function: Optional[Callable[..., Any]]
    suppress_weights_only: bool
    kwargs: dict[str, Any]

    @property
    def protection(self) -> Optional[str]:
        """The option that plain torch cannot satisfy; ``None`` if plain torch may save."""
        wanted = [name for name in ("encryption", "signing_key") if self.kwargs.get(name) is not None]
        return f"{wanted[0]}=" if wanted else None

    def __repr__(self) -> str:
        """Leaves out the keywords, which may hold keys."""
        return f"_Context(function={self.function!r}, kwargs of {sorted(self.kwargs)})"


_saving: ContextVar[Optional[_Context]] = ContextVar("tensorizer_saving", default=None)
_loading: ContextVar[Optional[_Context]] = ContextVar("tensorizer_loading", default=None)


# --- the location of the sidecar -----------------------------------------------------------------------------------


def _is_stream(value: object) -> bool:
    return hasattr(value, "read") or hasattr(value, "write")


_NO_NAME = "io.BytesIO has no name to derive the place of a .tensors file from"


def _default_location(f: Any) -> Optional[_Location]:
    """The name of ``f`` and ``.tensors``; ``None`` (plain torch) for a buffer in memory."""
    if isinstance(f, io.BytesIO):
        return None
    name = f if isinstance(f, (str, bytes, os.PathLike)) else getattr(f, "name", None)
    if not isinstance(name, (str, bytes, os.PathLike)):
        raise TypeError(
            f"cannot derive the place of a .tensors file from {type(f).__name__} without a file name: "
            "give file_obj to tensorizer_saving or tensorizer_loading"
        )
    check_is_path(name)
    location = os.fsdecode(name) + ".tensors"
    # torch does not expand a ~ at the start of a name, so the sidecar goes to the same folder.
    return os.path.join(os.curdir, location) if location.startswith("~") else location


class _Locations:
    """Finds the location of the sidecar, once for each call of torch.save or torch.load."""

    def __init__(self, spec: LocationSpec) -> None:
        self._many: Optional[Iterator[Any]] = None
        self._count = 0
        if isinstance(spec, (list, tuple)):
            self._many, self._count = iter(spec), len(spec)
        self._one = spec
        self._places: set[object] = set()
        self.is_used = False

    def next_location(self, f: Any, check_plain: Callable[[str], None] = lambda why: None) -> Optional[_Location]:
        """The sidecar of the file ``f``; ``None`` means plain torch, which `check_plain` may refuse."""
        location = self._location(f)
        if location is None and isinstance(f, io.BytesIO) and not callable(self._one):
            check_plain(_NO_NAME)
            logger.warning(
                "%s: using plain torch serialization; "
                "give file_obj to tensorizer_saving and tensorizer_loading to keep tensors apart",
                _NO_NAME,
            )
        elif location is None:
            check_plain("file_obj asks for plain torch")
        return location

    def _location(self, f: Any) -> Optional[_Location]:
        spec: Any = self._one
        if self._many is not None:
            try:
                spec = next(self._many)
            except StopIteration:
                raise ValueError(f"all {self._count} locations of this block have been used already") from None
        if spec is None:
            return _default_location(f)
        if callable(spec) and not _is_stream(spec):
            location: Optional[_Location] = spec(f)
            return location
        return spec  # type: ignore[no-any-return]

    @property
    def kind(self) -> dict[str, bool]:
        """Whether the location is derived from the name of the file, and whether all files share one location."""
        is_fixed = self._many is None and self._one is not None and (not callable(self._one) or _is_stream(self._one))
        return {"is_default": self._one is None, "is_fixed": is_fixed}

    def refuse_second_object(self, target: Target, location: _Location) -> None:
        """Refuses a second object in one file if no pair number can tell the sidecars of the objects apart."""
        if _is_stream(location) or not target.is_open:
            return
        place = (target.path or id(target.f), identity_of(location))
        if place in self._places and target.is_appended_to():
            raise ValueError(
                f"{shown_location(location)} already holds the tensors of an earlier object in the same open file, "
                "which would be lost: give tensorizer_saving a list of locations, or use a file for each torch.save"
            )
        self._places.add(place)

    def refuse_second_use(self) -> None:
        """Refuses a second torch.save to a fixed location, which holds the tensors of one save."""
        if self.kind["is_fixed"] and self.is_used:
            raise ValueError(
                "the fixed location given to tensorizer_saving already holds the tensors of an earlier torch.save in "
                "this block, which would be lost: give a function that names a location for each file, or a list"
            )


# --- the functions that replace torch's ----------------------------------------------------------------------------


def _require_standard_pickle(pickle_module: Any) -> None:
    if pickle_module is not None and pickle_module is not pickle:
        name = getattr(pickle_module, "__name__", type(pickle_module).__name__)
        raise ValueError(f"pickle_module: expected the standard pickle module within torch_compat, got {name}")


# Active blocks with encryption= or signing_key=, of the whole process.
_protected_blocks: set[object] = set()


def _check_plain(obj: Any, f: Any, why: Optional[str] = None) -> None:
    """Refuses plain ``torch.save`` for tensors that the block is to encrypt or sign."""
    context = _saving.get()
    if not (_protected_blocks if context is None else context.protection):
        return
    if isinstance(f, io.BytesIO) and isinstance(obj, (torch.UntypedStorage, torch.storage.TypedStorage)):
        return  # the pickle module stores a tensor in this way, without torch.save
    if not has_tensor_data(obj):
        return
    if context is None:
        raise RuntimeError(
            "torch.save in a thread or task without a tensorizer_saving block, while one with encryption= or "
            "signing_key= is active elsewhere in the process, would store tensors without either: put a block around "
            "this call, too; tensorizer_saving(lambda f: None) is one for plain torch.save"
        )
    if why is None:
        why = (
            "the call went around the block, by a reference to torch.save that is older (import the library that has "
            "it inside a block) or from a task that outlives it"
        )
    raise ValueError(f"torch.save would ignore {context.protection} of tensorizer_saving: {why}")


def _refusing(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps one of the two functions that write files of ``torch.save``, so that it checks older references, too."""

    @wraps(save)
    def checked(obj: Any, f: Any, pickle_module: Any, *args: Any, **kwargs: Any) -> Any:
        if not sends_tensors_to_sidecar(pickle_module):
            _check_plain(obj, f)
        return save(obj, f, pickle_module, *args, **kwargs)

    return checked


@cache
def _refuse_plain_saves() -> None:
    """Installs the wrappers for good: tasks that were made in a block may outlive it and still count as inside."""
    for name in ("_save", "_legacy_save"):
        setattr(torch.serialization, name, _refusing(getattr(torch.serialization, name)))


@wraps(_torch_save)
def _save_wrapper(obj: Any, f: Any, pickle_module: Any = pickle, *args: Any, **kwargs: Any) -> None:
    context = _saving.get()
    if context is None:
        _check_plain(obj, f)  # raises before a file is replaced
        return _torch_save(obj, f, pickle_module, *args, **kwargs)
    _require_standard_pickle(pickle_module)
    save = default_save
    if context.function is None:
        context.locations.refuse_second_use()
    else:
        save = context.function
    location = context.locations.next_location(f, lambda why: _check_plain(obj, f, why))
    if location is None:
        return _torch_save(obj, f, pickle, *args, **kwargs)
    target = Target.of(f)
    if save is not default_save or _pairs.path_of(location) is None or target.path is None:
        context.locations.refuse_second_object(target, location)
    session = SaveSession(location, save, context.kwargs, target, **context.locations.kind)
    if context.function is None:  # objects may save others while they are pickled
        session.before_writing = context.locations.refuse_second_use
    _torch_save(obj, f, pickle_for_saving(session), *args, **kwargs)
    if session.storages:
        context.locations.is_used = True
    return None


def _is_restricted(weights_only: Optional[bool], pickle_module: Any) -> bool:
    """Whether torch.load will use its own unpickler, which runs no code of the file, instead of `pickle_module`."""
    if _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        return True
    default = getattr(torch.serialization, "_default_to_weights_only", None)  # torch 2.6 and later
    if weights_only is None and default is not None and not _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        weights_only = default(pickle_module)
    return bool(weights_only)


def _is_set(variable: str) -> bool:
    return (env_text(variable) or "").lower() in ("1", "y", "yes", "true")


@wraps(_torch_load)
def _load_wrapper(
    f: Any,
    map_location: Any = None,
    pickle_module: Any = _LOAD_WRAPPER_DEFAULT_MODULE,
    *args: Any,
    weights_only: Optional[bool] = None,
    **kwargs: Any,
) -> Any:
    context = _loading.get()
    if context is not None and context.suppress_weights_only:
        weights_only = False
    if weights_only is not None:  # torch up to 2.3 does not accept None
        kwargs["weights_only"] = weights_only
    if context is None:
        return _torch_load(f, map_location, pickle_module, *args, **kwargs)
    _require_standard_pickle(pickle_module)
    location = context.locations.next_location(f)
    load = default_load if context.function is None else context.function
    session = None
    if location is not None:
        kind = context.locations.kind
        session = LoadSession(location, load, context.kwargs, map_location, Target.of(f), **kind)
    token = current_load.set(session)  # also if it is None, because this call may be nested in another load
    try:
        if session is None:
            return _torch_load(f, map_location, pickle_module, *args, **kwargs)
        module = pickle_module if _is_restricted(weights_only, pickle_module) else PICKLE_FOR_LOADING
        try:
            loaded = _torch_load(f, map_location, module, *args, **kwargs)
        except (RuntimeError, pickle.UnpicklingError) as error:  # torch 2.1 derives one from the other for weights_only
            found = session.explained(error)
            if found is error:
                raise
            raise found from error
        session.check_unpickled()
        return loaded
    finally:
        current_load.reset(token)


def _with_none_for_weights_only(signature: inspect.Signature) -> inspect.Signature:
    parameters = [
        parameter.replace(default=None) if parameter.name == "weights_only" else parameter
        for parameter in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


_save_wrapper.__signature__ = inspect.signature(_torch_save)  # type: ignore[attr-defined]
_load_wrapper.__signature__ = _with_none_for_weights_only(  # type: ignore[attr-defined]
    inspect.signature(_torch_load)
)


_patched_save = CountedPatch(lambda: [(torch, "save", _save_wrapper)])
_patched_load = CountedPatch(
    lambda: [(torch, "load", _load_wrapper), (torch._weights_only_unpickler, "Unpickler", SafeUnpickler)]
)


# --- public --------------------------------------------------------------------------------------------------------


@contextmanager
def _saving_anywhere(context: _Context) -> Iterator[None]:
    """Registers a block for the whole process."""
    with _patched_save:
        if not context.protection:
            yield
            return
        _refuse_plain_saves()
        block = object()
        _protected_blocks.add(block)
        try:
            yield
        finally:
            _protected_blocks.discard(block)


def tensorizer_saving(file_obj: LocationSpec = None, *, save_func: Optional[SaveFunc] = None, **kwargs: Any) -> Block:
    """While active, ``torch.save`` writes the tensors to a separate ``.tensors`` file.

    Works as a context manager and as a decorator, also of coroutine functions and generators, and applies only to the
    current thread and task. Blocks nest; the innermost one's arguments apply. References to ``torch.save`` taken before
    the block (``from torch import save``) are not affected: import the library that takes them inside a block.

    With ``encryption`` or ``signing_key``, ``torch.save`` raises where it would store tensors without it: for
    ``io.BytesIO`` without `file_obj`, through older references, and in every thread and task that has no block of its
    own while this one is active. The block does not reach processes that you start inside it.

    Args:
        file_obj: Where the tensors go. ``None``: the name of the file given to ``torch.save`` with ``.tensors``
            appended (``io.BytesIO`` has no name: plain ``torch.save``, with a warning in the log). Anything that
            :class:`~tensorizer.TensorSerializer` accepts, ``~`` for the home folder included (``torch.save`` itself
            takes ``~`` for a folder of that name): for the first ``torch.save`` in the block; a second
            raises, because it would overwrite the first. A function: called with the file given to ``torch.save``,
            returns any of these, or ``None`` for plain ``torch.save``. A list or tuple of these: one for each
            ``torch.save``, in order.
        save_func: ``save_func(file_obj, tensors, kwargs)`` replaces writing and closing. ``tensors`` is a list of
            one-dimensional ``uint8`` tensors, one for each distinct storage, sharing its memory on its device; it may
            be kept and handed to another thread. Called in the calling thread, at the end of pickling.
        **kwargs: For :class:`~tensorizer.TensorSerializer` (``encryption``, ``limit_cpu_concurrency``, ...).

    Raises:
        ValueError: At the call of ``torch.save``: a ``pickle_module`` other than ``pickle``, a fixed location used
            twice, a list of locations used up, or no location for tensors that must be encrypted or signed.
        RuntimeError: At the call of ``torch.save`` in another thread, which has no block, while this one has
            ``encryption`` or ``signing_key``.
        TypeError: At the call of ``torch.save``: its file has no name to derive a location from, or an unknown keyword.

    Examples:
        >>> from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving
        >>> with tensorizer_saving():
        ...     torch.save({"weight": torch.ones(4), "step": 7}, "checkpoint.pt")
    """

    def begin() -> Activity:
        context = _Context(_Locations(file_obj), save_func, False, kwargs)
        return Activity(lambda: _saving_anywhere(context), lambda: in_this_task(_saving, context))

    return Block(begin)


def tensorizer_loading(
    file_obj: LocationSpec = None,
    *,
    load_func: Optional[LoadFunc] = None,
    suppress_weights_only: bool = False,
    **kwargs: Any,
) -> Block:
    """While active, ``torch.load`` reads files that were saved under :func:`tensorizer_saving`.

    Files of plain ``torch.save`` load as always: the ``.tensors`` file is opened at the first reference to it. All
    of it is loaded. Works as a context manager and as a decorator; scope and nesting as for :func:`tensorizer_saving`.

    The device is ``device``, otherwise ``map_location`` of ``torch.load``, otherwise CUDA if available. (The files do
    not record the device of a tensor. If ``map_location`` is a dictionary or function, it sees that default as the
    original location.)

    ``weights_only`` means what it means to torch, and so does its default: since 2.6, torch refuses objects that it
    does not know. With ``weights_only=False``, ``torch.load`` unpickles, which may execute code: load only files that
    you trust.

    Args:
        file_obj: Where the tensors are, as for :func:`tensorizer_saving`; one fixed location may be loaded many times.
        load_func: ``load_func(file_obj, kwargs)`` replaces loading: returns or yields, in order, tensors whose
            storages hold the bytes.
        suppress_weights_only: Uses ``weights_only=False``, even if callers in the block pass something else.
        **kwargs: For :class:`~tensorizer.TensorDeserializer` (``device``, ``num_readers``, ``encryption``,
            ``verify_hash``, ...), except ``dtype``.

    Raises:
        FormatError: At the call of ``torch.load``: the ``.tensors`` file does not belong to the other one.
        ValueError: At the call of ``torch.load``: a ``pickle_module`` other than ``pickle``, or ``dtype`` among the
            keywords (the file holds the bytes of whole storages, not numbers).

    Examples:
        >>> from tensorizer.torch_compat import tensorizer_loading, tensorizer_saving
        >>> with tensorizer_saving():
        ...     torch.save({"weight": torch.ones(4), "step": 7}, "checkpoint.pt")
        >>> with tensorizer_loading(device="cpu"):
        ...     print(torch.load("checkpoint.pt")["step"])
        7
    """

    def begin() -> Activity:
        context = _Context(_Locations(file_obj), load_func, suppress_weights_only, kwargs)
        return Activity(lambda: _patched_load, lambda: in_this_task(_loading, context))

    return Block(begin)

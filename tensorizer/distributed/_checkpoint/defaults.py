"""Makes code that names no storage use ours: :func:`dcp_default`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from tensorizer._io.call_options import CallOptions
from tensorizer._system.patches import Activity, Block, CountedPatch
from tensorizer._system.redaction import shown_location
from tensorizer.distributed._checkpoint.folder import MARKER, Folder, PathLike, marker_name
from tensorizer.distributed._checkpoint.reader import TensorizerReader
from tensorizer.distributed._checkpoint.writer import TensorizerWriter

try:  # the modules in which torch looks up its classes
    from torch.distributed.checkpoint import _storage_utils, format_utils, state_dict_saver
except ImportError as error:
    raise ImportError(f"dcp_default: expected torch 2.3 or later, got torch {torch.__version__}") from error

# Keywords of the writers and readers of all active blocks, in the order of the blocks.
_options: dict[object, tuple[dict[str, Any], dict[str, Any]]] = {}


def dcp_default(*, writer: Optional[dict[str, Any]] = None, reader: Optional[dict[str, Any]] = None) -> Block:
    """Inside the block, code that uses torch's default or file storage gets this package's writer and reader.

    Use it for ``dcp.save(state, checkpoint_id=…)`` and for libraries that use ``FileSystemWriter`` themselves
    (accelerate, Lightning). Folders of torch's writers still load. ``s3://`` works in place of a path. If blocks are
    nested, the options of the innermost one apply. The block applies to all threads of the process, and to background
    saves (``dcp.async_save``, by threads and by a process) that begin inside it and end later. It is also a decorator,
    of coroutine functions and generators too.

    With ``encryption`` for the writer, torch's own writers raise inside the block.

    Args:
        writer: Keywords of :class:`TensorizerWriter`.
        reader: Keywords of :class:`TensorizerReader`.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> from tensorizer.distributed import dcp_default
        >>> with dcp_default():
        ...     _ = dcp.save({"weight": torch.ones(4)}, checkpoint_id="run", no_dist=True)
    """
    # These calls raise for wrong keywords.
    TensorizerWriter(None, **(writer or {}))
    TensorizerReader(None, **(reader or {}))
    options = (dict(writer or {}), dict(reader or {}))
    return Block(lambda: Activity(lambda: _with_options(*options), contextlib.nullcontext))


@contextlib.contextmanager
def _with_options(writer: dict[str, Any], reader: dict[str, Any]) -> Iterator[None]:
    block = object()
    with _patched_classes:
        _options[block] = (writer, reader)
        try:
            yield
        finally:
            del _options[block]


def _innermost() -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of the innermost active block; empty if no block is active."""
    return ([({}, {}), *_options.values()])[-1]


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """The places in which torch looks up its classes, with our replacements."""
    modules = (dcp, _storage_utils, format_utils)
    places: list[tuple[Any, str]] = [(module, prefix) for module in modules for prefix in ("FileSystem", "Fsspec")]
    with contextlib.suppress(ImportError):  # fsspec is not installed
        places.append((_fsspec_module(), "Fsspec"))
    checked: set[Any] = set()
    for module, prefix in places:
        for kind, ours, make in (("Writer", TensorizerWriter, _writer), ("Reader", TensorizerReader, _reader)):
            original = getattr(module, prefix + kind, None)
            if original is not None:
                yield module, prefix + kind, _instead_of(original, ours, make)
                if make is _writer and original not in checked:
                    checked.add(original)
                    yield original, "__init__", _never_in_clear(original)
    for name in ("_ProcessBasedAsyncCheckpointExecutor", "_ThreadBasedAsyncCheckpointExecutor"):  # torch 2.5 and later
        executor = getattr(state_dict_saver, name, None)
        if executor is not None:
            yield state_dict_saver, name, _with_writer(executor)


def _with_writer(executor: Any) -> type:
    """Wraps a function that saves in the background, so that it uses the writer of this block.

    A thread may begin after the block, and a new process knows no block.
    """

    class WithWriter(executor):  # type: ignore[misc]
        def execute_save(self, *args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **kwargs: Any) -> Any:
            if storage_writer is None and checkpoint_id is not None:
                storage_writer = _storage_utils._storage_setup(None, checkpoint_id, reader=False)
            return super().execute_save(*args, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **kwargs)

    return WithWriter


_patched_classes = CountedPatch(_replacements)


def _fsspec_module() -> Any:
    """Torch's module with its storage on fsspec. Torch 2.15 renamed it and warns of the old name, with underscore."""
    name = "torch.distributed.checkpoint.fsspec_filesystem"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")


class _StandIn(type(dcp.FileSystemWriter)):  # type: ignore[misc]  # of whose kind the class of readers is too
    """The metaclass of a class that replaces one of torch: calling it makes an object of ours.

    In all else it behaves as torch's class: objects of torch's class and of ours are its instances, and a class that is
    derived from it is derived from torch's. It does not inherit from torch's class itself: our writer would then count
    as a stager, as every ``FileSystemWriter`` does.
    """

    def __new__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        theirs = tuple(_replaced_by(base) if type(base) is cls else base for base in bases)
        if theirs == bases:
            return super().__new__(cls, name, bases, namespace, **kwargs)
        kind, _, kwargs = types.prepare_class(name, theirs, kwargs)
        return kind(name, theirs, namespace, **kwargs)

    def __call__(cls, path: PathLike, *args: Any, **kwargs: Any) -> Any:
        ours = _own(cls, "make")(path, kwargs) if _is_for_ours(path) else None
        return _replaced_by(cls)(path, *args, **kwargs) if ours is None else ours

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (_replaced_by(cls), _own(cls, "ours")))

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return subclass is cls or issubclass(subclass, (_replaced_by(cls), _own(cls, "ours")))

    def __getattribute__(cls, name: str) -> Any:
        return _own(cls, name) if name == "validate_checkpoint_id" else getattr(_replaced_by(cls), name)


def _own(stand_in: type, name: str) -> Any:
    return type.__getattribute__(stand_in, name)


def _replaced_by(stand_in: type) -> Any:
    return _own(stand_in, "replaced")


def _is_for_ours(path: PathLike) -> bool:
    """Whether a block is active and our class accepts the path.

    A module that was imported inside a block keeps the replaced classes after it.
    """
    return bool(_options) and TensorizerWriter.validate_checkpoint_id(path)


def _instead_of(replaced: Any, ours: type, make: Callable[[PathLike, dict[str, Any]], Any]) -> type:
    """A class that replaces one of torch: calling it returns the object of `make` if that accepts the path, else
    torch's."""

    def validate_checkpoint_id(checkpoint_id: PathLike) -> bool:
        return _is_for_ours(checkpoint_id) or bool(replaced.validate_checkpoint_id(checkpoint_id))

    storage = StorageWriter if issubclass(ours, StorageWriter) else StorageReader
    own = {"replaced": replaced, "ours": ours, "make": staticmethod(make)}
    own["validate_checkpoint_id"] = staticmethod(validate_checkpoint_id)
    stand_in: type = _StandIn(replaced.__name__, (storage,), own)
    return stand_in


def _never_in_clear(original: Any) -> Callable[..., None]:
    """A constructor of torch's writer that raises while a block encrypts.

    It is called through an older reference to the class, for a path that our writer does not accept, and by derived
    classes.
    """
    init = original.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if _innermost()[0].get("encryption") is not None:
            path = args[0] if args else kwargs.get("path")
            raise ValueError(
                f"{type(self).__name__} for {shown_location(path)}: torch's own writer would ignore encryption= of "
                "dcp_default; expected a local folder or s3://, and code that looks the class up inside the block"
            )
        init(self, *args, **kwargs)

    return checked


def _writer(path: PathLike, arguments: dict[str, Any]) -> TensorizerWriter:
    """Makes our writer from the arguments of torch's. Arguments that only tune torch's writer are ignored."""
    names = {"sync_files": "fsync", "overwrite": "overwrite"}
    understood = {ours: bool(arguments[theirs]) for theirs, ours in names.items() if theirs in arguments}
    return TensorizerWriter(path, **{**understood, **_innermost()[0]})


def _reader(path: PathLike, arguments: dict[str, Any]) -> Optional[TensorizerReader]:
    options = _innermost()[1]
    return None if _is_foreign(path, options.get("stream_options")) else TensorizerReader(path, **options)


def _is_foreign(path: PathLike, stream_options: Any) -> bool:
    """Whether the folder has a marker of another writer."""
    folder = Folder.at(path, CallOptions.to_read(stream_options=stream_options))
    for name in (MARKER, marker_name(0)):
        try:
            opened = folder.open(name)
        except OSError as error:
            if not folder.is_absent(error):
                raise
            continue
        with contextlib.closing(opened):
            return bool(opened.source.size()) and opened.source.read(0, 1) != b"{"
    return False

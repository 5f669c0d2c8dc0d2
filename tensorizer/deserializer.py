"""Reading ``.tensors`` files: :class:`TensorDeserializer`."""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import threading
import types
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any, Optional, Union, cast

import numpy as np
import torch

from tensorizer import _C, module_tree
from tensorizer._crypto.keys import check_decryption, key_ring
from tensorizer._format import dtypes
from tensorizer._format.entries import FileFeatureFlags, FilterFuncType, HashType, TensorEntry, TensorHash, TensorType
from tensorizer._format.payloads import contiguous
from tensorizer._io.sources import OpenedSource, open_source
from tensorizer._load.reader import LoadedBatch, ReadAhead, TensorReader
from tensorizer._system.devices import DeviceArgument, DeviceChooser, target_device
from tensorizer.errors import CryptographyError, FormatError, HashMismatchError
from tensorizer.progress import ProgressArgument, progress_reporter

__all__ = ["TensorDeserializer"]

logger = logging.getLogger("tensorizer.serialization")

Name = Union[str, "tuple[Union[str, int], ...]"]
Key = Union[str, int]

# Magic to metadata length (docs/format.md, "Prologue").
_PROLOGUE_NBYTES = 73
# Bytes that a generator reads ahead of its consumer.
_READ_AHEAD_NBYTES = 64 << 20

# Where every request costs a round trip.
_NETWORK_SOURCES = (_C.HttpSource, _C.RedisSource, _C.PyRangeSource)

# The record header of a tensor that was read: where it is kept, and its position there.
_BatchHeaders = tuple[Sequence[int], _C.LoadedHeaders]  # entries in ascending order, and their headers


class TensorDeserializer(
    Mapping[Key, Any],
    contextlib.AbstractContextManager["TensorDeserializer"],
):
    """A ``.tensors`` file as a read-only mapping from names to parameters.

    The keys are the names on the top level of what was written; nested state dicts give nested mappings. Values are
    :class:`torch.nn.Parameter` objects on the target device, contiguous, with ``requires_grad`` for floating-point and
    complex dtypes. They stay valid after :meth:`close` and after this object is gone.

    Args:
        file_obj: What to read: a local path (``str``, ``bytes``, ``PathLike``), a descriptor, an ``http(s)://``,
            ``s3://`` or ``redis://`` URI, or an open binary file object, read from its current position on. Objects are
            closed by this one, descriptors are not.
        device: Target device; ``None`` is CUDA where available, else the CPU (surrounding CPU contexts do not count). A
            mapping from (prefixes of) names to devices, like a ``device_map``, or a callable that is given each name,
            spreads one file over several devices.
        filter_func: Loads only the tensors whose name it accepts; the others do not exist for this object. It gets a
            ``str`` for names on a flat top level, else the full path as a tuple.
        dtype: Converts ``float16``, ``bfloat16``, ``float32`` and ``float64`` tensors to this dtype. Integers, bool,
            complex, float8 and packed types stay as stored: converting them destroys quantized weights.
        lazy_load: Reads tensors when they are first asked for, instead of all of them now.
        plaid_mode: Accepted, without effect.
        plaid_mode_buffers: Accepted, without effect.
        num_readers: Upper bound for reading threads; ``None`` uses as many as are useful.
        verify_hash: Compares the stored hashes with the data; ``None`` means ``False``.
        encryption: The key of an encrypted file.
        mmap: Makes tensors copy-on-write views of a local file instead of reading it. They keep the mapping alive.
            Tensors of older files that are not aligned are copied.
        progress: ``True`` shows a bar; a callable is told about bytes done (docs/quickstart.md).
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream` where it opens a URI.

    Raises:
        ValueError: Not a ``.tensors`` file, an unknown version, a damaged index (:class:`FormatError` and subclasses);
            a text file; ``num_readers`` below 1; ``mmap`` with a source that cannot be mapped.
        TypeError: An argument of the wrong type.
        OSError: The source cannot be opened or read (:class:`StreamError`).
        CryptographyError: The file is encrypted and there is no key, or the other way round, or the key is wrong.
        HashMismatchError: Data disagree with their stored hash.
        RuntimeError: CUDA was asked for and is not available.

    Source: docs/format.md for the bytes, docs/errors.md for the errors.
    """

    def __init__(
        self,
        file_obj: Any,
        device: DeviceArgument = None,
        filter_func: Optional[FilterFuncType] = None,
        dtype: Optional[torch.dtype] = None,
        *,
        lazy_load: bool = False,
        plaid_mode: Optional[bool] = None,
        plaid_mode_buffers: Optional[int] = None,
        num_readers: Optional[int] = None,
        verify_hash: Optional[bool] = False,
        encryption: Any = None,
        mmap: bool = False,
        progress: ProgressArgument = False,
        stream_options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        self._closed = True  # until there is something to close
        self._selection: Sequence[int] = ()
        self.total_tensor_bytes = 0
        self._device = target_device(device)
        check_decryption(encryption)
        self._verify_hash = bool(verify_hash)
        self._progress = progress
        self._lock = threading.RLock()
        self._cache: dict[int, torch.nn.Parameter] = {}
        self._headers: dict[int, _BatchHeaders] = {}
        self._cursor = 0  # position in the selection; moved by the read_* generators alone

        opened = open_source(file_obj, stream_options)
        self._opened: Optional[OpenedSource] = opened
        self._stream = opened.stream
        self._closed = False
        try:
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"dtype: wanted a torch.dtype, found {type(dtype).__name__}")
            self._open(opened, filter_func, dtype, _check_num_readers(num_readers), encryption, mmap)
            if not lazy_load:
                self._load(self._selection)
                self.close()
        except BaseException:
            self.close()
            raise

    def _open(
        self,
        opened: OpenedSource,
        filter_func: Optional[FilterFuncType],
        dtype: Optional[torch.dtype],
        max_workers: int,
        encryption: Any,
        mmap: bool,
    ) -> None:
        index = _C.open_index(opened.source, opened.start, encryption is not None)
        self._index = index
        self._names: list[Name] = index.names()
        if filter_func is None:
            self._selection = range(len(self._names))
        else:
            self._selection = [i for i, name in enumerate(self._names) if filter_func(name)]
        self._root = _build_tree(self._names, self._selection)
        self._reader: Optional[TensorReader] = TensorReader(
            opened.source,
            index,
            device=self._device if isinstance(self._device, torch.device) else self._device_of,
            dtype=dtype,
            max_workers=max_workers,
            keys=key_ring(encryption) if index.encrypted else None,
            mapping=_map_source(opened.source) if mmap else None,
        )
        self._dtype = dtype
        self._mapped = mmap
        self._ahead = ReadAhead(index, self._selection) if isinstance(opened.source, _NETWORK_SOURCES) else None
        self.total_file_bytes: int = index.tensor_size
        self.total_tensor_bytes = index.total_loaded_nbytes(list(self._selection))
        self.read_bytes = 0
        self.total_compressed_tensor_bytes = 0
        logger.debug(
            "opened %s: %d tensors, %d bytes, data version %d, device %s, dtype %s, encrypted %s, verify %s",
            opened.source.name,
            len(self._selection),
            self.total_tensor_bytes,
            index.version,
            self._device_text(),
            dtype,
            index.encrypted,
            self._verify_hash,
        )

    def _device_of(self, i: int) -> torch.device:
        """Where one tensor goes, for a mapping or callable as ``device``."""
        return cast(DeviceChooser, self._device)(self._names[i])

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the file and forgets keys. Loaded tensors and counters stay available; may be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        opened, self._opened, self._reader = self._opened, None, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> TensorDeserializer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __repr__(self) -> str:
        if not hasattr(self, "_reader"):
            return f"<{type(self).__name__}: not open>"
        state = "closed" if self._closed else "open"
        return (
            f"<{type(self).__name__}: {len(self._selection)} tensors, {self.total_tensor_bytes:,} bytes, "
            f"data version {self._index.version}, device {self._device_text()}, {len(self._cache)} loaded, {state}>"
        )

    def _device_text(self) -> str:
        return str(self._device) if isinstance(self._device, torch.device) else "per tensor"

    def _repr_html_(self) -> str:
        """What Jupyter shows: a table of the tensors, from the index alone."""
        from tensorizer._format.table import entries_table

        return entries_table(repr(self)[1:-1], self.entries())

    # ---- facts ------------------------------------------------------------------------------------------------------

    @property
    def total_bytes_read(self) -> int:
        """Bytes that came from the source so far."""
        counter = getattr(self._stream, "bytes_read", None)
        if isinstance(counter, int):
            return counter
        if self._opened is None:
            return self.total_tensor_bytes
        mapped = sum(map(self._index.data_nbytes, self._cache)) if self._mapped else 0
        return int(self._opened.source.bytes_read) + mapped

    @property
    def cache_status(self) -> Optional[str]:
        """The ``x-cache-status`` response header of an HTTP source, else ``None``."""
        headers = getattr(self._stream, "response_headers", None)
        return None if headers is None else headers.get("x-cache-status")

    @property
    def _file_header(self) -> types.SimpleNamespace:
        """What integrators' tests look at: ``version_number``."""
        return types.SimpleNamespace(version_number=self._index.version)

    @property
    def _file_flags(self) -> FileFeatureFlags:
        return FileFeatureFlags(self._index.flags)

    def entries(self) -> list[TensorEntry]:
        """What the file says about every (selected) tensor, in file order, without loading any.

        Digests are in the record headers, so ``hashes`` is ``None`` for tensors that were not read yet.
        """
        return [self._entry(i) for i in self._selection]

    def _entry(self, i: int) -> TensorEntry:
        index = self._index
        dtype, shape, hashes = index.dtype(i), index.shape(i), None
        if i in self._headers:
            headers, position = self._header(i)
            dtype, shape = headers.dtype(position), headers.shape(position)
            hashes = [TensorHash(HashType(kind), value) for kind, value in headers.hashes(position)]
        return TensorEntry(
            metadata_version=index.entry_version(i),
            name=self._names[i],
            type=TensorType(index.type(i)),
            dtype=dtype.decode("utf-8", "replace"),
            shape=shape,
            offset=index.offset(i),
            data_offset=index.data_offset(i),
            data_length=index.data_nbytes(i),
            hashes=hashes,
            header_hashes=None,
        )

    # ---- mapping ----------------------------------------------------------------------------------------------------

    def keys(self) -> KeysView[Key]:
        """The keys of the top level, in file order."""
        return self._root.keys()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._root)

    def __len__(self) -> int:
        return len(self._root)

    def __contains__(self, key: object) -> bool:
        return key in self._root

    def __getitem__(self, key: Key) -> Any:
        node = self._root[key]
        if isinstance(node, int):
            return self._load_leaf(node)
        tensors = dict(zip(_leaves(node), self._load(list(_leaves(node)))))
        return _proxy(node, tensors)

    def tree(
        self,
        prefix: Optional[Iterable[Key]] = None,
        *,
        default: Any = None,
        filter_func: Optional[FilterFuncType] = None,
    ) -> Any:
        """The subtree at `prefix` with real containers: ``dict``, ``list``, parameters as leaves.

        Args:
            prefix: Path to the subtree, as an iterable of keys; ``None`` or empty is everything.
            default: Returned when nothing matches.
            filter_func: Narrows within the subtree; gets full paths from the root.

        Raises:
            TypeError: `prefix` is a single ``str`` or ``int``; write ``("a",)``.
        """
        if isinstance(prefix, (str, int)):
            raise TypeError(f"prefix: wanted a sequence of keys, found {type(prefix).__name__}; write ({prefix!r},)")
        wanted = () if prefix is None else tuple(prefix)
        chosen = [
            i
            for i in self._selection
            if _path(self._names[i])[: len(wanted)] == wanted and (filter_func is None or filter_func(self._names[i]))
        ]
        if not chosen:
            return default
        tensors = self._load(chosen)
        return module_tree.branch((_path(self._names[i])[len(wanted) :], t) for i, t in zip(chosen, tensors))

    # ---- generators -------------------------------------------------------------------------------------------------

    def read_tensors(
        self,
        filter_func: Optional[FilterFuncType] = None,
        num_tensors: int = -1,
        verify_hash: Optional[bool] = None,
        *,
        cache: bool = True,
    ) -> Iterator[tuple[int, TensorType, Name, torch.nn.Parameter]]:
        """Yields ``(module index, type, name, parameter)`` in file order, from where the last ``read_*`` call stopped.

        Args:
            filter_func: Skips tensors it does not accept.
            num_tensors: At most this many; ``-1`` is all.
            verify_hash: Overrides the constructor's value for tensors read by this call.
            cache: ``False`` keeps nothing of what is yielded, and reads at most 64 MiB (or one tensor) ahead, so files
                larger than memory can be streamed.

        Raises:
            ValueError: `num_tensors` below -1.
        """
        for i, box in self._read_on(filter_func, num_tensors, verify_hash, cache, raw=False):
            headers, position = self._header(i)
            # Out of its box, so that this suspended generator does not keep it alive.
            yield headers.module_idx(position), TensorType(self._index.type(i)), self._names[i], box.pop()

    def read_numpy_arrays(
        self,
        filter_func: Optional[FilterFuncType] = None,
        num_tensors: int = -1,
        allow_raw_data: bool = False,
        verify_hash: Optional[bool] = None,
        *,
        cache: bool = True,
    ) -> Iterator[tuple[int, TensorType, Name, np.ndarray[Any, Any], bool, Optional[str]]]:
        """Yields ``(module index, type, name, array, is opaque, torch dtype name)``, like :meth:`read_tensors`.

        The constructor's ``dtype`` is not applied. Arrays share memory with the cached tensors.

        Args:
            filter_func: Skips tensors it does not accept.
            num_tensors: At most this many; ``-1`` is all.
            allow_raw_data: Yields dtypes that numpy lacks (bfloat16, float8...) as signed integers of the same width,
                with ``is opaque`` true and the torch dtype's name; otherwise they raise.
            verify_hash: Overrides the constructor's value for tensors read by this call.
            cache: As in :meth:`read_tensors`.

        Raises:
            RuntimeError: The target device is not the CPU; the file is closed (as after an eager load) and the tensor
                was converted by the constructor's ``dtype``, so that its stored form is gone.
            ValueError: A dtype that numpy lacks, without `allow_raw_data`; `num_tensors` below -1.
        """
        if not isinstance(self._device, torch.device) or self._device.type != "cpu":
            raise RuntimeError(f"numpy arrays live on the CPU; this deserializer was opened for device {self._device}")
        for i, box in self._read_on(filter_func, num_tensors, verify_hash, cache, raw=True):
            yield self._as_numpy_item(i, box.pop(), allow_raw_data)

    def _as_numpy_item(
        self, i: int, tensor: torch.Tensor, allow_raw_data: bool
    ) -> tuple[int, TensorType, Name, np.ndarray[Any, Any], bool, Optional[str]]:
        headers, position = self._header(i)
        numpy_dtype, opaque = dtypes.numpy_storage(tensor.dtype)
        if opaque and not allow_raw_data:
            raise ValueError(
                f"tensor {self._names[i]!r} has dtype {tensor.dtype}, which numpy lacks; "
                "allow_raw_data=True yields its elements as integers"
            )
        return (
            headers.module_idx(position),
            TensorType(self._index.type(i)),
            self._names[i],
            _as_array(tensor.detach(), numpy_dtype, opaque),
            opaque,
            str(tensor.dtype) if opaque else None,
        )

    def _read_on(
        self,
        filter_func: Optional[FilterFuncType],
        num_tensors: int,
        verify_hash: Optional[bool],
        cache: bool,
        raw: bool,
    ) -> Iterator[tuple[int, list[Any]]]:
        if num_tensors < -1:
            raise ValueError(f"num_tensors: wanted -1 (all) or more, found {num_tensors}")
        verify = self._verify_hash if verify_hash is None else bool(verify_hash)
        left = math.inf if num_tensors == -1 else num_tensors
        while left > 0:
            batch = self._next_batch(filter_func, left)
            if not batch:
                return
            tensors = self._read_batch([i for _, i in batch], verify, cache, raw)
            for position, i in batch:
                self._cursor = position + 1
                left -= 1
                yield i, [tensors.pop(i)]

    def _next_batch(self, filter_func: Optional[FilterFuncType], left: float) -> list[tuple[int, int]]:
        """(position in the selection, entry) of the next tensors that the filter accepts."""
        batch: list[tuple[int, int]] = []
        nbytes = 0
        for position in range(self._cursor, len(self._selection)):
            i = self._selection[position]
            size = self._index.loaded_nbytes(i)
            if len(batch) >= left or (batch and nbytes + size > _READ_AHEAD_NBYTES):
                break
            if filter_func is None or filter_func(self._names[i]):
                batch.append((position, i))
                nbytes += size
        return batch

    def _read_batch(self, entries: list[int], verify: bool, cache: bool, raw: bool) -> dict[int, Any]:
        """The tensors of `entries`, from the cache where they are there."""
        if raw and self._dtype is not None and any(self._is_cast(i) for i in entries):
            batch = self._reader_or_raise().read_raw(entries, verify)
            self._note(batch)
            return dict(zip(entries, batch.tensors))
        if cache:
            return dict(zip(entries, self._load(entries, verify)))
        result: dict[int, Any] = {i: self._cache[i] for i in entries if i in self._cache}
        missing = [i for i in entries if i not in result]
        if missing:
            for batch in self._reader_or_raise().read(missing, verify):
                self._note(batch)
                result.update(zip(batch.entries, batch.tensors))
        return result

    def _is_cast(self, i: int) -> bool:
        """Whether the cached form of a tensor is, or would be, another one than the stored one."""
        cached = self._cache.get(i)
        if cached is not None and i in self._headers:
            headers, position = self._header(i)
            return cached.dtype != dtypes.torch_dtype(headers.dtype(position).decode("utf-8", "replace"))
        return self._reader_or_raise().may_cast(i)

    # ---- modules ----------------------------------------------------------------------------------------------------

    def load_into_module(
        self,
        m: torch.nn.Module,
        filter_func: Optional[FilterFuncType] = None,
        verify_hash: Optional[bool] = None,
    ) -> int:
        """Replaces the parameters and buffers of `m` by those of the file; closes the file.

        Parameters are replaced, not copied into, so `m` may be on the meta device; ties are broken. Buffers become
        plain tensors and keep their persistence. Tensors of `m` that the file lacks stay as they are.

        Args:
            m: The module, with the structure it had when it was written.
            filter_func: Takes only the tensors it accepts.
            verify_hash: Overrides the constructor's value for tensors read by this call.

        Returns:
            The number of tensors placed.

        Raises:
            KeyError: `m` has no such submodule, or has the attribute as the other kind.
            NotImplementedError: The file holds a state dict; use ``m.load_state_dict(deserializer)``.
        """
        try:
            module_tree.check_module(m)
            chosen = [i for i in self._selection if filter_func is None or filter_func(self._names[i])]
            modules = dict(m.named_modules())
            for i in chosen:
                self._check_placeable(i, modules)
            for i, tensor in zip(chosen, self._load(chosen, verify_hash)):
                is_buffer = self._index.type(i) == TensorType.BUFFER
                module_tree.insert_into_module(modules, cast(str, self._names[i]), is_buffer, tensor)
            return len(chosen)
        finally:
            self.close()

    def _check_placeable(self, i: int, modules: Mapping[str, torch.nn.Module]) -> None:
        name = self._names[i]
        if not isinstance(name, str) or self._index.type(i) == TensorType.STATE_DICT:
            raise NotImplementedError(
                f"tensor {name!r} was written from a state dict, which has no modules to load into; "
                "use module.load_state_dict(deserializer) or deserializer.tree()"
            )
        path = name.rpartition(".")[0]
        if path not in modules:
            raise KeyError(f"{name}: the module has no submodule {path!r}")

    def verify_module(self, m: torch.nn.Module) -> tuple[bool, list[tuple[Name, bool]]]:
        """Compares the bytes of `m`'s tensors with the hashes in the file.

        Returns:
            Whether everything matches, and one ``(name, matches)`` per stored tensor. Stored tensors that `m` lacks do
            not match; tensors of `m` that are not in the file are ignored.

        Raises:
            RuntimeError: A tensor of the file was not read yet, so that its hashes are unknown.
            NotImplementedError: A tensor of `m` is on the meta device.
        """
        module_tree.check_module(m)
        unread = [self._names[i] for i in self._selection if i not in self._headers]
        if unread:
            raise RuntimeError(
                f"the hashes of {len(unread)} tensors (first: {unread[0]!r}) are known only after they were loaded; "
                "load the file before verifying"
            )
        live = module_tree.live_tensors(m)
        results = [(self._names[i], self._matches(i, live)) for i in self._selection]
        return all(matches for _, matches in results), results

    def _matches(self, i: int, live: Mapping[str, torch.Tensor]) -> bool:
        name = self._names[i]
        if not isinstance(name, str):
            return False
        tensor = live.get(name)
        if tensor is None and name.startswith("."):
            tensor = live.get(name[1:])
        if tensor is None:
            return False
        if tensor.is_meta:
            raise NotImplementedError(f"tensor {name!r} of the module is on the meta device: it has no data to compare")
        data = contiguous(tensor, on_device=False)
        nbytes = data.numel() * data.element_size()
        if self._index.data_nbytes(i) == 0 and self._index.loaded_nbytes(i) > 0:  # written without data: zeros
            flat = data.reshape(-1).view(torch.uint8)
            return nbytes == self._index.loaded_nbytes(i) and not bool(flat.any())
        headers, position = self._header(i)
        return bool(headers.matches(position, data.data_ptr() if nbytes else 0, nbytes))

    def to_redis(self, redis_client: Any, key_prefix: str, force: bool = False) -> None:
        """Stores the file in Redis, so that ``redis://host/key_prefix`` reads it; bytes are copied as they are.

        Args:
            redis_client: A ``redis.Redis``.
            key_prefix: Everything is stored below ``key_prefix:``.
            force: Stores tensors again that are there already.

        Raises:
            ValueError: The file is closed; use ``lazy_load=True``.
        """
        if self._opened is None:
            raise ValueError("to_redis needs the file open: use lazy_load=True")
        if self._index.start != 0:
            raise ValueError("to_redis stores files, and this container starts in the middle of one")
        from tensorizer._io.redis_export import export_to_redis

        index = self._index
        header = self._opened.source.read(0, _PROLOGUE_NBYTES + index.metadata_nbytes)
        records = [
            (index.stored_name(i), index.offset(i), index.data_offset(i), index.data_nbytes(i)) for i in self._selection
        ]
        export_to_redis(self._opened.source, header, records, redis_client, key_prefix, force)

    # ---- loading ----------------------------------------------------------------------------------------------------

    def _reader_or_raise(self) -> TensorReader:
        reader = self._reader
        if reader is None:
            raise RuntimeError("the file is closed; tensors that were not loaded before are out of reach")
        return reader

    def _load(self, entries: Sequence[int], verify_hash: Optional[bool] = None) -> list[torch.nn.Parameter]:
        """The parameters of `entries`, read where they are not cached, cached from then on."""
        missing = [i for i in entries if i not in self._cache]
        if missing:
            verify = self._verify_hash if verify_hash is None else bool(verify_hash)
            reader = self._reader_or_raise()
            total = sum(map(reader.index.data_nbytes, missing)) if self._progress else 0
            with progress_reporter(self._progress, total, "loading") as report:
                for batch in reader.read(missing, verify, report):
                    self._note(batch)
                    with self._lock:
                        if self._cache.keys().isdisjoint(batch.entries):
                            self._cache.update(zip(batch.entries, cast("Sequence[torch.nn.Parameter]", batch.tensors)))
                        else:  # another thread read some of them meanwhile: everybody gets the first
                            for i, tensor in zip(batch.entries, batch.tensors):
                                self._cache.setdefault(i, cast(torch.nn.Parameter, tensor))
        return [self._cache[i] for i in entries]

    def _load_leaf(self, i: int) -> torch.nn.Parameter:
        """One tensor; over a network, those that a loop will ask for next come along."""
        together = [i] if self._ahead is None else self._ahead.together_with(i, self._cache)
        if len(together) > 1:
            try:
                return self._load(together)[0]
            except (FormatError, HashMismatchError, CryptographyError):
                self._ahead = None  # it may be another one that is damaged: from now on each for itself
        return self._load([i])[0]

    def _note(self, batch: LoadedBatch) -> None:
        with self._lock:
            self._headers.update(dict.fromkeys(batch.entries, (batch.entries, batch.headers)))

    def _header(self, i: int) -> tuple[_C.LoadedHeaders, int]:
        """The headers among which that of an entry is, and its position there."""
        entries, headers = self._headers[i]
        return headers, bisect.bisect_left(entries, i)


def _check_num_readers(num_readers: Optional[int]) -> int:
    if num_readers is None:
        return 0
    if not isinstance(num_readers, int):
        raise TypeError(f"num_readers: wanted an int, found {type(num_readers).__name__}")
    if num_readers < 1:
        raise ValueError(f"num_readers: wanted 1 or more, found {num_readers}")
    return min(int(num_readers), 0xFFFF)  # more than there will ever be


def _map_source(source: _C.RangeSource) -> _C.FileMapping:
    if not isinstance(source, _C.FileSource):
        raise ValueError(f"mmap=True: {source.name} cannot be mapped; only local files can")
    return source.map()


def _path(name: Name) -> tuple[Key, ...]:
    return (name,) if isinstance(name, str) else name


_Node = dict[Key, Any]  # a leaf is the number of its entry


def _build_tree(names: Sequence[Name], selection: Sequence[int]) -> _Node:
    chosen = [names[i] for i in selection]
    if set(map(type, chosen)) <= {str}:  # as in nearly all files
        return dict(zip(cast("list[str]", chosen), selection))
    root: _Node = {}
    for name, i in zip(chosen, selection):
        if isinstance(name, str):
            root[name] = i
            continue
        node = root
        for key in name[:-1]:
            node = node.setdefault(key, {})
        node[name[-1]] = i
    return root


def _leaves(node: _Node) -> list[int]:
    """Entries below a branch, in file order."""
    found: list[int] = []
    pending = [node]
    while pending:
        for child in pending.pop().values():
            if isinstance(child, int):
                found.append(child)
            else:
                pending.append(child)
    return sorted(found)


def _proxy(node: _Node, tensors: Mapping[int, torch.nn.Parameter]) -> types.MappingProxyType[Key, Any]:
    """Nested read-only mappings over a branch; children first, without recursion."""
    order: list[_Node] = []
    pending = [node]
    while pending:
        current = pending.pop()
        order.append(current)
        pending.extend(child for child in current.values() if not isinstance(child, int))
    finished: dict[int, types.MappingProxyType[Key, Any]] = {}
    for current in reversed(order):
        finished[id(current)] = types.MappingProxyType(
            {key: tensors[child] if isinstance(child, int) else finished[id(child)] for key, child in current.items()}
        )
    return finished[id(node)]


def _as_array(tensor: torch.Tensor, dtype: np.dtype[Any], opaque: bool) -> np.ndarray[Any, Any]:
    if opaque:
        width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        tensor = tensor.view(width)
    return tensor.numpy()

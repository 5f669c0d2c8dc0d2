"""Reading ``.tensors`` files: :class:`TensorDeserializer`."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, KeysView, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union

import torch

from tensorizer._encryption import DecryptionParams
from tensorizer._format.entries import FileFeatureFlags, FilterFuncType, TensorEntry, check_filter
from tensorizer._format.extra_state import check_module
from tensorizer._format.names import Key, Name, no_such_name, path_of
from tensorizer._format.tree import branch, leaves, read_only
from tensorizer._io.call_options import CallOptions, Trust, says_dtype
from tensorizer._io.sources import SourceArgument, reopener
from tensorizer._load.open_file import OpenFile, ReadOptions, open_file
from tensorizer._progress import ProgressArgument
from tensorizer._signing import PublicKeyArgument
from tensorizer._system import config
from tensorizer._system.devices import DeviceArgument, target_device
from tensorizer._system.sizes import counted, size_text

# Modules that only some calls need are imported in those calls.
if TYPE_CHECKING:
    from tensorizer._load.compare import LoadReport
    from tensorizer._load.cursor import ArrayItem, Cursor, TensorItem
    from tensorizer._load.parts import TensorSlice


class TensorDeserializer(Mapping[Key, Any], contextlib.AbstractContextManager["TensorDeserializer"]):
    """A ``.tensors`` or ``.safetensors`` file, or a folder of either, as a read-only mapping from names to parameters.

    The keys are the names on the top level of what was written; nested state dicts give nested mappings. Values are
    :class:`torch.nn.Parameter` objects on the target device, contiguous, with ``requires_grad`` for floating-point and
    complex dtypes. They stay valid after :meth:`close` and after this object is gone.

    Args:
        file_obj: What to read: a local path (``str``, ``bytes``, ``PathLike``), a descriptor, an ``http(s)://``,
            ``s3://`` or ``redis://`` URI, or an open binary file object, read from its current position on.
            :meth:`close` closes file objects but not descriptors. A folder, a ``*.index.json``, or an ``http(s)://``
            or ``s3://`` prefix loads all shards of its model (docs/safetensors.md). Two sets of weights in one folder
            raise ``FormatError``, unless one was made from the other by :func:`tensorizer.convert`.
        device: Target device; ``None`` is CUDA if available, otherwise the CPU (a surrounding CPU context is ignored).
            To spread one file over several devices, pass a mapping from (prefixes of) names to devices, like a
            ``device_map``, or a callable that gets each name.
        filter_func: Loads only the tensors whose name it accepts; this object ignores the others. It gets a
            ``str`` for names on a flat top level, otherwise the full path as a tuple.
        dtype: Converts ``float16``, ``bfloat16``, ``float32`` and ``float64`` tensors to this dtype. Integers, bool,
            complex, float8 and packed types stay as stored: converting them destroys quantized weights.
        lazy_load: Reads each tensor when you first ask for it, instead of all of them now.
        plaid_mode: Accepted, without effect.
        plaid_mode_buffers: Accepted, without effect.
        num_readers: Upper bound for reading threads; ``None`` uses as many as are useful.
        verify_hash: Compares the stored hashes with the data; a tensor with data and without a stored hash raises.
            ``None`` means ``True`` for plain files whose signature is checked, otherwise ``False``.
        encryption: The key of an encrypted file.
        mmap: Makes tensors copy-on-write views of a local file instead of reading it. They keep the mapping alive.
            Tensors of older files that are not aligned are copied. ``None`` maps if all tensors go to the CPU as
            they are stored and the file is neither encrypted nor on a network file system; otherwise it reads.
        progress: ``True`` shows a bar; a callable is told about bytes done (docs/quickstart.md).
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream` if it opens a URI.
        allow_missing_hashes: With ``verify_hash``, loads tensors without a stored hash unverified.
        public_key: Loads only what one of these keys has signed: a :class:`PublicKey`, a path, or a sequence of either.
            The signature is in the file, or in the file of the same name with ``.sig`` appended, on disk or remote. To
            load a part of a tensor of a plain file, it reads and hashes the whole tensor (docs/signing.md).
        require_authenticated: Rejects files that neither their key nor a signature authenticates. ``None`` takes the
            value of ``TENSORIZER_REQUIRE_AUTHENTICATED`` (``1`` or ``0``), otherwise ``False``.
        direct_io: How a local file is read (docs/performance-tuning.md). ``"always"`` bypasses the page cache if the
            file system allows it; ``"never"`` does not. ``"auto"`` bypasses it if the file is large and not cached.
            ``None`` means ``"auto"``. With ``"always"``, ``mmap=None`` does not map.

    Attributes:
        total_tensor_bytes: Bytes of the (selected) tensors once they are loaded.
        total_file_bytes: Bytes of tensor data in the whole file, as its header says; not the size of the file.
        read_bytes: Always 0, as in earlier releases; :attr:`total_bytes_read` counts.
        total_compressed_tensor_bytes: Always 0, as in earlier releases: nothing is compressed.

    Raises:
        ValueError: Not a ``.tensors`` file, an unknown version, a damaged index (:class:`FormatError` and subclasses);
            a text file; ``num_readers`` below 1; ``mmap`` with a source that cannot be mapped.
        TypeError: An argument of the wrong type.
        OSError: The source cannot be opened or read (:class:`StreamError`).
        CryptographyError: The file is encrypted and you passed no key, or you passed a key and it is not encrypted.
        AuthenticationError: The key is wrong, the file does not match its key or signature, or
            `require_authenticated` is set and neither a key nor a signature authenticates the file.
        HashMismatchError: Data disagree with their stored hash.
        MissingHashError: With `verify_hash`, a tensor with data has no stored hash.
        RuntimeError: `device` is a CUDA device, and CUDA is not available.

    Source: docs/format.md for the bytes, docs/errors.md for the errors.

    Examples:
        >>> from tensorizer import TensorDeserializer
        >>> with TensorDeserializer("model.tensors", device="cpu") as tensors:
        ...     print(tensors["weight"].shape)
        torch.Size([2, 4])
    """

    #: The result of the last :meth:`load_into_module`: what it filled and what did not fit; ``None`` before.
    report: Optional[LoadReport] = None

    @says_dtype
    def __init__(
        self,
        file_obj: SourceArgument,
        device: DeviceArgument = None,
        filter_func: Optional[FilterFuncType] = None,
        dtype: Optional[torch.dtype] = None,
        *,
        lazy_load: bool = False,
        plaid_mode: Optional[bool] = None,
        plaid_mode_buffers: Optional[int] = None,
        num_readers: Optional[int] = None,
        verify_hash: Optional[bool] = None,
        encryption: Optional[DecryptionParams] = None,
        mmap: Optional[bool] = False,
        progress: ProgressArgument = False,
        stream_options: Optional[Mapping[str, Any]] = None,
        allow_missing_hashes: bool = False,
        public_key: PublicKeyArgument = None,
        require_authenticated: Optional[bool] = None,
        direct_io: Optional[str] = None,
    ) -> None:
        chosen = target_device(device)
        trust = Trust.of(public_key, require_authenticated)
        call = CallOptions.to_read(encryption, stream_options, num_readers, progress, trust)
        options = ReadOptions(chosen, dtype, mmap, verify_hash, allow_missing_hashes, direct_io=direct_io)
        file = self._open_file = open_file(file_obj, call, options, filter_func)
        self.total_file_bytes: int = file.index.tensor_size
        self.total_tensor_bytes = file.total_tensor_bytes
        self.read_bytes = 0
        self.total_compressed_tensor_bytes = 0
        try:
            self._reopen = reopener(file.opened)
            if not lazy_load:
                file.load(file.selection)
                if file.index.metadata_is_sealed:  # the key is still known here
                    file.metadata()
                self.close()
        except BaseException:
            self.close()
            raise

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the file and forgets keys. Loaded tensors and counters stay available. A second call does nothing.

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     tensors.close()
        """
        file: Optional[OpenFile] = getattr(self, "_open_file", None)  # missing if the file could not be opened
        if file is not None:
            file.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has an open file and can be neither copied nor pickled: open the file again, or "
            "copy what it holds (dict(...) of it)"
        )

    def __del__(self) -> None:
        # At the end of the process, names of this module may be gone, so this uses none.
        file = self.__dict__.get("_open_file")
        if file is None or file.closed:
            return
        try:  # noqa: SIM105
            self.close()
        except Exception:
            pass

    def __repr__(self) -> str:
        file: Optional[OpenFile] = getattr(self, "_open_file", None)
        if file is None:
            return f"<{type(self).__name__}: not open>"
        device = file.options.device if isinstance(file.options.device, torch.device) else "per tensor"
        return (
            f"<{type(self).__name__}: {counted(len(file.selection), 'tensor')}, {size_text(self.total_tensor_bytes)}, "
            f"{file.kind_text}, device {device}, {len(file.kept)} loaded, {'closed' if file.closed else 'open'}>"
        )

    def _repr_html_(self) -> str:
        """Jupyter shows this table of the tensors, which comes from the index only."""
        from tensorizer._format.dtype_names import dtype_text
        from tensorizer._format.table import Row, tensors_table

        def row(entry: TensorEntry) -> Row:
            digests = " ".join(f"{digest.type.name}:{digest.hash.hex()[:8]}" for digest in entry.hashes or ())
            kind, dtype = entry.type.kind, dtype_text(entry.dtype)
            return Row(entry.name, kind, dtype, entry.shape, entry.deserialized_length, digests)

        return tensors_table(repr(self)[1:-1], list(map(row, self.entries())))

    # ---- facts ------------------------------------------------------------------------------------------------------

    @property
    def total_bytes_read(self) -> int:
        """Bytes read from the source so far."""
        return self._open_file.total_bytes_read

    @property
    def cached_bytes_read(self) -> int:
        """Bytes of :attr:`total_bytes_read` from the cache of the node (docs/node-cache.md); 0 without one."""
        return self._open_file.cached_bytes_read

    @property
    def format(self) -> str:
        """The format of the source, found from its content: ``"tensors"`` or ``"safetensors"``."""
        return str(self._open_file.index.format)

    @property
    def metadata(self) -> dict[str, str]:
        """The text that the writer kept in the file, by key; a copy.

        Raises:
            CryptographyError: It is encrypted with another key, or was altered.
            RuntimeError: It is encrypted, and the file was closed before you first asked for it.
        """
        return self._open_file.metadata() or {}

    @property
    def ties(self) -> dict[Name, Name]:
        """From the name of an alias to the name of its tensor. Both return the same parameter."""
        return self._open_file.ties()

    @property
    def authenticated(self) -> Optional[str]:
        """What authenticates the file: ``"key"``, ``"signature"``, ``"both"``, or ``None``."""
        return self._open_file.authenticated

    @property
    def index_digest(self) -> Optional[str]:
        """The SHA-256 of the index in hexadecimal digits, computed from the bytes read; ``None`` for ``.safetensors``
        files and for shards. In authenticated files it identifies the whole content."""
        return self._open_file.index_digest

    @property
    def cache_status(self) -> Optional[str]:
        """The ``x-cache-status`` response header of an HTTP source, otherwise ``None``."""
        headers = getattr(self._open_file.stream, "response_headers", None)
        return None if headers is None else headers.get("x-cache-status")

    @property
    def _file_header(self) -> types.SimpleNamespace:
        """Tests of integrators read ``version_number`` from it."""
        return types.SimpleNamespace(version_number=self._open_file.index.version)

    @property
    def _file_flags(self) -> FileFeatureFlags:
        return FileFeatureFlags(self._open_file.index.flags)

    def entries(self) -> list[TensorEntry]:
        """Describes every (selected) tensor, in file order, without loading any.

        Digests are in the record headers, so ``hashes`` is ``None`` for tensors that were not read yet.

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     print([(entry.name, entry.shape) for entry in tensors.entries()])
            [('weight', (2, 4)), ('bias', (2,))]
        """
        return [self._open_file.entry(i) for i in self._open_file.selection]

    # ---- mapping ----------------------------------------------------------------------------------------------------

    def keys(self) -> KeysView[Key]:
        """The keys of the top level, in file order.

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     print(list(tensors.keys()))
            ['weight', 'bias']
        """
        return self._open_file.root.keys()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._open_file.root)

    def __len__(self) -> int:
        return len(self._open_file.root)

    def __contains__(self, key: object) -> bool:
        return key in self._open_file.root

    def __getitem__(self, key: Key) -> Any:
        try:
            node = self._open_file.root[key]
        except KeyError:
            raise no_such_name(self._open_file.source_name, key, self._open_file.numbers) from None
        if isinstance(node, int):
            return self._open_file.load_one(node)
        below = leaves(node)
        return read_only(node, dict(zip(below, self._open_file.load(below))))

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

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     print(sorted(tensors.tree()))
            ['bias', 'weight']
        """
        if isinstance(prefix, (str, int)):
            raise TypeError(f"prefix: expected a sequence of keys, got {type(prefix).__name__}; write ({prefix!r},)")
        wanted = () if prefix is None else tuple(prefix)
        file = self._open_file
        below = [i for i in file.selection if path_of(file.names[i])[: len(wanted)] == wanted]
        chosen = [i for i in below if filter_func is None or filter_func(file.names[i])]
        if not chosen:
            return default
        return branch((path_of(file.names[i])[len(wanted) :], t) for i, t in zip(chosen, file.load(chosen)))

    # ---- parts of tensors -------------------------------------------------------------------------------------------

    def get_slice(self, name: Name) -> TensorSlice:
        """Returns a tensor of which you can read parts: ``d.get_slice("w")[10:20]``. Reads nothing itself.

        Args:
            name: As in :meth:`entries`: a path of keys for tensors in nested containers.

        Raises:
            KeyError: There is no such tensor.

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     print(tensors.get_slice("weight")[0:1].shape)
            torch.Size([1, 4])
        """
        from tensorizer._load.parts import get_slice

        return get_slice(self._open_file, name, self)

    def slices(self) -> dict[Name, TensorSlice]:
        """Returns a :class:`TensorSlice` for every tensor, by name, in file order.

        Functions that accept a state dict of ``safetensors`` slices accept it, such as ``Model.from_pretrained(None,
        config=config, state_dict=d.slices())`` of transformers 5.

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     print({name: list(part.shape) for name, part in tensors.slices().items()})
            {'weight': [2, 4], 'bias': [2]}
        """
        from tensorizer._load.parts import slices

        return slices(self._open_file, self)

    def get_slices(
        self,
        parts: Mapping[Name, Any],
        out: Optional[Mapping[Name, torch.Tensor]] = None,
        device: Optional[Union[torch.device, str, int]] = None,
        *,
        verify_hash: Optional[bool] = None,
    ) -> dict[Name, torch.Tensor]:
        """Reads parts of many tensors at once: ranges that are close are read together, on all threads.

        Args:
            parts: From names to indices that :class:`TensorSlice` accepts.
            out: Tensors of the parts' shapes, for every name, to read into and return. A contiguous one of the stored
                dtype is filled without a copy; others are copied and converted into. ``None`` makes new ones.
            device: Where new tensors go; ``None`` is the deserializer's device.
            verify_hash: Overrides the constructor's value.

        Returns:
            Plain tensors by name, in the order of `parts`.

        Raises:
            KeyError: There is no such tensor, or `out` lacks a name.
            ValueError: With verification, a part is not the whole tensor; an `out` tensor has another shape.
            IndexError, TypeError: As for :class:`TensorSlice`.

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     parts = tensors.get_slices({"weight": (slice(0, 1),)})
            ...     print(parts["weight"].shape)
            torch.Size([1, 4])
        """
        from tensorizer._load.parts import get_slices

        return get_slices(self._open_file, parts, out, device, verify_hash=verify_hash)

    # ---- generators -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _cursor(self) -> Cursor:
        from tensorizer._load.cursor import Cursor

        return Cursor(self._open_file)

    def read_tensors(
        self,
        filter_func: Optional[FilterFuncType] = None,
        num_tensors: int = -1,
        verify_hash: Optional[bool] = None,
        *,
        cache: bool = True,
    ) -> Iterator[TensorItem]:
        """Yields ``(module index, type, name, parameter)`` in file order, from where the last ``read_*`` call stopped.

        Args:
            filter_func: Skips tensors it does not accept.
            num_tensors: At most this many; ``-1`` is all.
            verify_hash: Overrides the constructor's value. ``True`` verifies tensors that were loaded before, too.
            cache: ``False`` keeps no yielded tensor and reads at most 64 MiB (or one tensor) ahead, so you can stream
                files larger than memory.

        Raises:
            ValueError: `num_tensors` below -1; a tensor was loaded unverified and converted to the constructor's
                ``dtype``, and the file is closed, so it cannot be verified. (A tensor that was verified before its
                conversion is not verified again.)

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     print([name for _, _, name, _ in tensors.read_tensors()])
            ['weight', 'bias']
        """
        yield from self._cursor.read_tensors(filter_func, num_tensors, verify_hash, cache)

    def read_numpy_arrays(
        self,
        filter_func: Optional[FilterFuncType] = None,
        num_tensors: int = -1,
        allow_raw_data: bool = False,
        verify_hash: Optional[bool] = None,
        *,
        cache: bool = True,
    ) -> Iterator[ArrayItem]:
        """Yields ``(module index, type, name, array, is opaque, torch dtype name)``, like :meth:`read_tensors`.

        The constructor's ``dtype`` is not applied. Arrays share memory with the cached tensors.

        Args:
            filter_func: Skips tensors it does not accept.
            num_tensors: At most this many; ``-1`` is all.
            allow_raw_data: Yields dtypes that numpy lacks (bfloat16, float8...) as signed integers of the same width,
                with ``is opaque`` true and the torch dtype's name; otherwise they raise.
            verify_hash: Overrides the constructor's value. ``True`` verifies tensors that were loaded before, too.
            cache: As in :meth:`read_tensors`.

        Raises:
            RuntimeError: The target device is not the CPU; the constructor's ``dtype`` converted the tensor and the
                file is closed (as after an eager load), so its stored form is gone.
            ValueError: A dtype that numpy lacks, without `allow_raw_data`; `num_tensors` below -1.

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     print([(name, array.shape) for _, _, name, array, _, _ in tensors.read_numpy_arrays()])
            [('weight', (2, 4)), ('bias', (2,))]
        """
        device = self._open_file.options.device
        if not isinstance(device, torch.device) or device.type != "cpu":
            raise RuntimeError(f"numpy arrays live on the CPU; this deserializer was opened for device {device}")
        yield from self._cursor.read_arrays(filter_func, num_tensors, allow_raw_data, verify_hash, cache)

    # ---- modules ----------------------------------------------------------------------------------------------------

    def load_into_module(
        self,
        m: torch.nn.Module,
        filter_func: Optional[FilterFuncType] = None,
        verify_hash: Optional[bool] = None,
        *,
        strict: bool = False,
        prefix: str = "",
        in_place: bool = False,
    ) -> int:
        """Replaces the parameters and buffers of `m` by those of the file; closes the file.

        If the file was written from a state dict, or is a ``.safetensors`` file, its names are those of the state dict
        of `m`. Names that `m` lacks are reported as unexpected and skipped. If modules of `m` rename or change what is
        in a state dict (hooks, a ``_load_from_state_dict`` or ``load_state_dict`` of their own), `m` gets it with
        ``load_state_dict(..., assign=True)``, which may fail half way.

        Parameters are replaced, not copied into, so `m` may be on the meta device. ``requires_grad`` is kept from `m`.
        Buffers become plain tensors and keep their persistence. Extra states of the file are passed to
        ``set_extra_state``. Tensors of `m` that the file lacks stay as they are, unless `m` ties them to a
        name of the file. Ties of the file are restored; other ties are broken.

        Args:
            m: The module, with the structure it had when it was written.
            filter_func: Loads only the tensors it accepts. It gets names of the file; with `strict`, also names
                that only `m` has. A name that it rejects does not count as missing.
            verify_hash: Overrides the constructor's value. ``True`` verifies tensors that were loaded before, too.
            strict: Raises if names are missing or unexpected, or shapes or kinds differ, as ``load_state_dict``.
                Otherwise a warning says if nothing is placed and, without `filter_func`, which parameters of `m` the
                file lacks.
            prefix: Loads only the tensors whose name begins with this text, under the rest of their name:
                ``prefix="model."`` loads ``model.lm_head.weight`` into ``lm_head.weight``. Steps of names of nested
                containers are joined by dots.
            in_place: Writes over the tensors of `m`, which keep their identity and ``data_ptr``, for example those that
                a CUDA graph has recorded. Names, shapes and dtypes must be those of the file (with `filter_func`, of
                what it accepts), and with verification the digests are compared, before the first write. All tensors
                of the file are in memory a second time until they are written.

        Returns:
            The number of tensors placed. :attr:`report`, a :class:`LoadReport`, has their names and what did not fit.

        Raises:
            LoadError: With `in_place`, a name, shape or dtype differs, or a tensor has no data; `m` is as it was.
                Otherwise: tensors of `m` with data have another shape or kind (floating point, complex, integer, bool)
                than the file's; the message names all of them. With `strict`, any other difference. `m` is as it was.
                Without `strict`, tensors of `m` on the meta device are replaced even so, with one warning.
            FormatError: Two tensors of the file have one name, as ``.w`` and ``w``. `m` is as it was.
            KeyError: `m` has no such submodule, or has the attribute as the other kind. `m` is as it was.
            NotImplementedError: The file holds nested containers; pass `prefix`, or use ``m.load_state_dict(...)`` with
                one of :meth:`tree`. Or `m` has DTensors, and is as it was; use
                :class:`tensorizer.distributed.TensorizerReader`.
            VerificationError: As in the constructor. `m` is as it was.
            ValueError: As in :meth:`read_tensors`; no name of the file begins with `prefix`.
            TypeError: `m` is not a module, or `filter_func` not a function. The file stays open for the next call.

        Examples:
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     with tensorizer.utils.no_init_or_tensor():
            ...         model = torch.nn.Linear(4, 2)
            ...     tensors.load_into_module(model, strict=True)
            2
        """
        from tensorizer._load.compare import ModuleView
        from tensorizer._load.modules import Fill, FillOptions, is_state_dict, module_names

        check_module(m, "for a state dict use module.load_state_dict(deserializer)")
        check_filter(filter_func)
        file = self._open_file
        stored = module_names(
            file, file.accepted_by(filter_func), config.text("prefix", prefix) if prefix != "" else prefix
        )
        try:
            view = ModuleView(m)
            hands_over = is_state_dict(file, stored.values()) and view.changes_state_dict and view.assigns
            how = FillOptions(ties="stored", by_modules=not hands_over, tells_unfilled=True)
            if in_place:
                how = FillOptions(assign=False, ties="kept", by_modules=True, in_place=True)
            fill = Fill(view, file, stored, how, strict or in_place, filter_func, prefix)
            try:
                return len(fill.run(verify_hash).loaded)
            finally:
                self.report = fill.report
        finally:
            self.close()

    def verify_module(self, m: torch.nn.Module) -> tuple[bool, list[tuple[Name, bool]]]:
        """Compares the bytes of `m`'s tensors with the hashes in the file.

        Returns:
            Whether everything matches, and one ``(name, matches)`` per stored tensor. Stored tensors that `m` lacks do
            not match, nor do those with data and without a stored hash. Tensors of `m` that the file lacks are ignored.

        Raises:
            RuntimeError: A tensor of the file was not read yet, so its hashes are unknown.
            NotImplementedError: A tensor of `m` is on the meta device, or has no memory of its own, like a DTensor.

        Examples:
            >>> model = torch.nn.Linear(4, 2)
            >>> with TensorSerializer("linear.tensors") as serializer:
            ...     serializer.write_module(model)
            >>> with TensorDeserializer("linear.tensors", device="cpu") as tensors:
            ...     print(tensors.verify_module(model))
            (True, [('.weight', True), ('.bias', True)])
        """
        from tensorizer._load.modules import verify_module

        check_module(m)
        results = verify_module(self._open_file, m)
        return all(matches for _, matches in results), results

    def to_redis(self, redis_client: Any, key_prefix: str, force: bool = False) -> None:
        """Copies the file to Redis unchanged, so that ``redis://host/key_prefix`` reads it.

        Args:
            redis_client: A ``redis.Redis`` or an object with its methods; all commands go through it.
            key_prefix: All keys begin with ``key_prefix:``.
            force: Also stores tensors that Redis already has.

        Raises:
            ValueError: The shards of a model; your file object is closed, as after an eager load.
            StreamError: The file is closed, as after an eager load, and another version has replaced it.
            redis.RedisError: The server refused or broke off. Call it again to store the rest.

        Examples:
            >>> import redis
            >>> client = redis.Redis("localhost", 6379)
            >>> with TensorDeserializer("model.tensors", device="cpu", lazy_load=True) as tensors:
            ...     tensors.to_redis(client, "model:")
        """
        from tensorizer._io.redis import export_to_redis

        file = self._open_file
        if file.source is None and self._reopen is None:
            raise ValueError("to_redis needs one file that is open or can be opened again: use lazy_load=True")
        if file.index.start != 0:
            raise ValueError("to_redis stores files, and this container starts in the middle of one")
        records = file.stored_records(file.selection)
        with contextlib.ExitStack() as stack:
            source = file.source
            if source is None:
                assert self._reopen is not None
                source = stack.enter_context(contextlib.closing(self._reopen())).source
            export_to_redis(source, file.prologue(source), records, redis_client, key_prefix, force)

"""Reading ``.tensors`` files: :class:`TensorDeserializer`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Optional, Union

import torch

from tensorizer import module_tree
from tensorizer._crypto.keys import check_decryption
from tensorizer._format.entries import FilterFuncType
from tensorizer._format.names import Name
from tensorizer._format.tree import build_tree
from tensorizer._io.file_types import SourceArgument
from tensorizer._io.reopen import SameFile
from tensorizer._io.shards import OpenedFiles, open_files
from tensorizer._load.arguments import check_dtype, check_filter
from tensorizer._load.authenticity import Trust
from tensorizer._load.container import Container, ReadOptions
from tensorizer._load.cursor import ArrayItem, Cursor, TensorItem
from tensorizer._load.device_choice import DeviceArgument, target_device
from tensorizer._load.direct_io import check_direct_io
from tensorizer._load.facts import FileFacts, kind_text
from tensorizer._load.loaded_tensors import LoadedTensors
from tensorizer._load.mapping import TensorMapping
from tensorizer._load.modules import ModuleLoad
from tensorizer._load.report import LoadedCount, LoadReport
from tensorizer._load.shards import open_files_as_one
from tensorizer._load.slices import TensorSlices
from tensorizer._load.verification import verify_module
from tensorizer._system.threads import thread_limit
from tensorizer.encryption import DecryptionParams
from tensorizer.progress import ProgressArgument
from tensorizer.signing import PublicKeyArgument

__all__ = ["TensorDeserializer"]

logger = logging.getLogger("tensorizer.serialization")


class TensorDeserializer(
    FileFacts,
    TensorMapping,
    TensorSlices,
    contextlib.AbstractContextManager["TensorDeserializer"],
):
    """A ``.tensors`` or ``.safetensors`` file, or a folder of either, as a read-only mapping from names to parameters.

    The keys are the names on the top level of what was written; nested state dicts give nested mappings. Values are
    :class:`torch.nn.Parameter` objects on the target device, contiguous, with ``requires_grad`` for floating-point and
    complex dtypes. They stay valid after :meth:`close` and after this object is gone.

    Args:
        file_obj: What to read: a local path (``str``, ``bytes``, ``PathLike``), a descriptor, an ``http(s)://``,
            ``s3://`` or ``redis://`` URI, or an open binary file object, read from its current position on. Objects are
            closed by this one, descriptors are not. A folder, a ``*.index.json``, or an ``http(s)://`` or ``s3://``
            prefix stands for all shards of its model (docs/safetensors.md).
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
        verify_hash: Compares the stored hashes with the data; ``None`` means ``False``, and ``True`` for files in clear
            whose signature is checked. A tensor with data and without a stored hash is an error then.
        encryption: The key of an encrypted file.
        mmap: Makes tensors copy-on-write views of a local file instead of reading it. They keep the mapping alive.
            Tensors of older files that are not aligned are copied. ``None`` maps where all tensors go to the CPU as
            they are stored, and the file is not encrypted and not on a network file system; it reads elsewhere.
        progress: ``True`` shows a bar; a callable is told about bytes done (docs/quickstart.md).
        stream_options: Keywords for :func:`tensorizer.stream_io.open_stream` where it opens a URI.
        allow_missing_hashes: With ``verify_hash``, takes tensors that have no stored hash, unverified.
        public_key: Loads only what one of these keys has signed: a :class:`PublicKey`, a path, or a sequence of either.
            A part of a tensor of a file in clear is read and hashed with the whole tensor then (docs/signing.md).
        signature: Where the signature is: a path, a URI or its bytes; ``None``: in the file, else beside it, in the
            file of that name with ``.sig`` behind it.
        direct_io: How a local file is read: ``"always"`` past the page cache, straight from the disk, where the file
            system lets it; ``"never"``; or ``"auto"``, past it where the file is not in the cache and so large that it
            would drive out what is (docs/performance-tuning.md). ``None`` is what ``TENSORIZER_DIRECT_IO`` says, else
            ``"auto"``. Mappings are of the page cache: ``mmap=None`` makes none where it is ``"always"``.
        require_authenticated: Refuses files that neither their key nor a signature vouches for; ``None`` is what
            ``TENSORIZER_REQUIRE_AUTHENTICATED`` says (``1`` or ``0``), else ``False``.

    Attributes:
        total_tensor_bytes: Bytes of the (selected) tensors once they are loaded.
        total_file_bytes: Bytes of tensor data in the whole file, as its header says; not the size of the file. The
            name is that of earlier releases.
        read_bytes: Always 0, as in earlier releases; :attr:`total_bytes_read` counts.
        total_compressed_tensor_bytes: Always 0, as in earlier releases: nothing is compressed.

    Raises:
        ValueError: Not a ``.tensors`` file, an unknown version, a damaged index (:class:`FormatError` and subclasses);
            a text file; ``num_readers`` below 1; ``mmap`` with a source that cannot be mapped.
        TypeError: An argument of the wrong type.
        OSError: The source cannot be opened or read (:class:`StreamError`).
        CryptographyError: The file is encrypted and there is no key, or the other way round.
        AuthenticationError: The key is wrong, the file is not what its key or a signature vouches for, or nothing
            vouches for it and something has to.
        HashMismatchError: Data disagree with their stored hash.
        MissingHashError: Verification was asked for, and a tensor with data has no stored hash.
        RuntimeError: CUDA was asked for and is not available.

    Source: docs/format.md for the bytes, docs/errors.md for the errors.
    """

    #: What the last :meth:`load_into_module` put into the module and what did not fit; ``None`` before.
    report: Optional[LoadReport] = None

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
        signature: Optional[Union[str, bytes, os.PathLike[str]]] = None,
        require_authenticated: Optional[bool] = None,
        direct_io: Optional[str] = None,
    ) -> None:
        self.total_tensor_bytes = 0
        self._device = target_device(device)
        check_decryption(encryption)
        check_direct_io(direct_io)
        trust = Trust.of(public_key, signature, require_authenticated)

        opened = open_files(file_obj, stream_options)
        self._stream = opened.stream
        self._same_file = SameFile.of(file_obj, opened, stream_options)
        self._container: Container
        try:
            check_filter(filter_func)
            check_dtype(dtype)
            limit = thread_limit("num_readers", num_readers)
            options = ReadOptions(
                self._device, dtype, limit, encryption, mmap, allow_missing_hashes, trust=trust, direct_io=direct_io
            )
            self._open(opened, filter_func, options, verify_hash, progress)
            if not lazy_load:
                self._loaded.load(self._container.selection)
                if self._container.index.metadata_is_sealed:  # its key is known by now, and about to be forgotten
                    self._container.metadata()
                self.close()
        except BaseException:
            if hasattr(self, "_container"):
                self.close()
            else:
                opened.close()
            raise

    def _open(
        self,
        opened: OpenedFiles,
        filter_func: Optional[FilterFuncType],
        options: ReadOptions,
        verify_hash: Optional[bool],
        progress: ProgressArgument,
    ) -> None:
        container = self._container = open_files_as_one(opened, filter_func, options)
        if container.checks_whole and verify_hash is not None and not verify_hash:
            raise ValueError("verify_hash=False: in a file in clear, hashes are what binds the data to its signature")
        verify = container.checks_whole if verify_hash is None else bool(verify_hash)
        if verify:
            container.verify_index()
        self._loaded = LoadedTensors(container, verify, progress)
        self._open_parts(options)
        self._root = build_tree(container.names, container.selection)
        self._cursor = Cursor(container, self._loaded)
        self.total_file_bytes: int = container.index.tensor_size
        self.total_tensor_bytes = container.index.total_loaded_nbytes(list(container.selection))
        self.read_bytes = 0
        self.total_compressed_tensor_bytes = 0
        logger.debug(
            "opened %s: %d tensors, %d bytes, %s, device %s, dtype %s, encrypted %s, verify %s",
            opened.name,
            len(container.selection),
            self.total_tensor_bytes,
            kind_text(container.index),
            self._device_text(),
            options.dtype,
            container.index.encrypted,
            verify,
        )

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the file and forgets keys. Loaded tensors and counters stay available; may be called repeatedly."""
        container: Optional[Container] = getattr(self, "_container", None)  # none where opening it failed
        if container is not None:
            container.close()

    def __enter__(self) -> TensorDeserializer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has an open file and can be neither copied nor pickled: open the file again, or "
            "copy what it holds (dict(...) of it)"
        )

    def __del__(self) -> None:
        # Names of this module may be gone when the process ends, so none is used here.
        container = self.__dict__.get("_container")
        if container is None or container.closed:
            return
        try:  # noqa: SIM105
            self.close()
        except Exception:
            pass

    def __repr__(self) -> str:
        container = getattr(self, "_container", None)
        if container is None:
            return f"<{type(self).__name__}: not open>"
        state = "closed" if container.closed else "open"
        return (
            f"<{type(self).__name__}: {len(container.selection)} tensors, {self.total_tensor_bytes:,} bytes, "
            f"{kind_text(container.index)}, device {self._device_text()}, {len(self._loaded.kept)} loaded, "
            f"{state}>"
        )

    def _device_text(self) -> str:
        return str(self._device) if isinstance(self._device, torch.device) else "per tensor"

    # ---- generators -------------------------------------------------------------------------------------------------

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
            cache: ``False`` keeps nothing of what is yielded, and reads at most 64 MiB (or one tensor) ahead, so files
                larger than memory can be streamed.

        Raises:
            ValueError: `num_tensors` below -1; a tensor was loaded unverified and cannot be verified any more: the file
                is closed, and the constructor's ``dtype`` converted it. (What was verified before it was converted is
                not compared again then.)
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
            RuntimeError: The target device is not the CPU; the file is closed (as after an eager load) and the tensor
                was converted by the constructor's ``dtype``, so that its stored form is gone.
            ValueError: A dtype that numpy lacks, without `allow_raw_data`; `num_tensors` below -1.
        """
        if not isinstance(self._device, torch.device) or self._device.type != "cpu":
            raise RuntimeError(f"numpy arrays live on the CPU; this deserializer was opened for device {self._device}")
        yield from self._cursor.read_arrays(filter_func, num_tensors, allow_raw_data, verify_hash, cache)

    # ---- modules ----------------------------------------------------------------------------------------------------

    def load_into_module(
        self,
        m: torch.nn.Module,
        filter_func: Optional[FilterFuncType] = None,
        verify_hash: Optional[bool] = None,
        *,
        strict: bool = False,
    ) -> LoadedCount:
        """Replaces the parameters and buffers of `m` by those of the file; closes the file.

        A file that was written from a state dict, or a ``.safetensors`` file, is taken by the names of the state dict
        of `m`; what `m` lacks is reported as unexpected and not placed.

        Parameters are replaced, not copied into, so `m` may be on the meta device; they need gradients where those of
        `m` do. Buffers become plain tensors and keep their persistence. Extra states that the file has are given to
        ``set_extra_state``. Tensors of `m` that the file lacks stay as they are, except that names which `m` ties to a
        name of the file follow it. Those that the file ties are tied again, other ties are broken.

        Args:
            m: The module, with the structure it had when it was written.
            filter_func: Takes only the tensors it accepts. It is asked about names of the file; with `strict` about
                what `m` has and the file lacks, too, and what it refuses is not missing.
            verify_hash: Overrides the constructor's value. ``True`` verifies tensors that were loaded before, too.
            strict: Raises where names are missing or unexpected, or shapes or kinds differ, as ``load_state_dict``.

        Returns:
            The number of tensors placed, which also carries ``.loaded``, ``.missing``, ``.unexpected`` and
            ``.mismatched``; the whole :class:`LoadReport` is :attr:`report`.

        Raises:
            LoadError: Tensors of `m` with data have another shape or kind (floating point, complex, integer, bool) than
                the file's; all are named. With `strict`, everything else that does not fit. `m` is as it was. Without
                `strict` tensors of `m` on the meta device are replaced all the same, with one warning.
            KeyError: `m` has no such submodule, or has the attribute as the other kind. `m` is as it was.
            NotImplementedError: The file holds nested containers; use ``m.load_state_dict(...)`` with one of
                :meth:`tree`.
            VerificationError: As in the constructor. `m` is as it was.
            ValueError: As in :meth:`read_tensors`.
        """
        try:
            module_tree.check_module(m, "for a state dict use module.load_state_dict(deserializer)")
            load = ModuleLoad(self._container, m, filter_func, strict)
            self.report = load.report
            load.check(strict)
            load.run(self._loaded, verify_hash)
            self.report = load.report
            return LoadedCount(load.report)
        finally:
            self.close()

    def verify_module(self, m: torch.nn.Module) -> tuple[bool, list[tuple[Name, bool]]]:
        """Compares the bytes of `m`'s tensors with the hashes in the file.

        Returns:
            Whether everything matches, and one ``(name, matches)`` per stored tensor. Stored tensors that `m` lacks do
            not match, nor do those with data and without a stored hash, which nothing vouches for; tensors of `m` that
            are not in the file are ignored.

        Raises:
            RuntimeError: A tensor of the file was not read yet, so that its hashes are unknown.
            NotImplementedError: A tensor of `m` is on the meta device.
        """
        module_tree.check_module(m)
        results = verify_module(self._container, m)
        return all(matches for _, matches in results), results

    def to_redis(self, redis_client: Any, key_prefix: str, force: bool = False) -> None:
        """Stores the file in Redis, so that ``redis://host/key_prefix`` reads it; bytes are copied as they are.

        Args:
            redis_client: A ``redis.Redis``.
            key_prefix: Everything is stored below ``key_prefix:``.
            force: Stores tensors again that are there already.

        Raises:
            ValueError: The shards of a model; a file object of the caller that is closed, as after an eager load.
            StreamError: The file is closed, as after an eager load, and was replaced by another version since.
        """
        from tensorizer._io.redis_export import export_to_redis

        container = self._container
        if container.source is None and self._same_file is None:
            raise ValueError("to_redis needs one file that is open or can be opened again: use lazy_load=True")
        if container.index.start != 0:
            raise ValueError("to_redis stores files, and this container starts in the middle of one")
        records = container.stored_records(container.selection)
        with contextlib.ExitStack() as stack:
            source = container.source
            if source is None:
                assert self._same_file is not None
                opened = self._same_file.open()
                stack.callback(opened.close)
                source = opened.source
            export_to_redis(source, container.prologue(source), records, redis_client, key_prefix, force)

"""Writing ``.tensors`` files: :class:`TensorSerializer`."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, Optional, Union

import numpy as np
import torch

from tensorizer import _C
from tensorizer._encryption import EncryptionParams
from tensorizer._format import extra_state
from tensorizer._format.entries import TensorType
from tensorizer._format.names import Name, Path, display
from tensorizer._format.payloads import adopt, stored_dtype
from tensorizer._format.tree import flatten
from tensorizer._io.call_options import CallOptions
from tensorizer._io.sinks import open_sink
from tensorizer._io.sources import TargetArgument
from tensorizer._io.upload_on_close import tell_if_unclosed
from tensorizer._keys import check_encryption, encryption_key, signer_of
from tensorizer._progress import ProgressArgument, progress_reporter
from tensorizer._save.records import (
    Record,
    check_name,
    extra_states,
    modules_with_extra_state,
    record_of,
    ties_of,
    walk_module,
)
from tensorizer._save.session import (
    HASH_NAMES,
    batches_to_copy,
    check_hashes,
    check_metadata,
    stay_until_the_end,
    write_tensors,
)
from tensorizer._signing import SigningKey
from tensorizer._system.config import thread_limit
from tensorizer._system.redaction import shown_location
from tensorizer.errors import FieldRangeError

logger = logging.getLogger("tensorizer.serialization")


class TensorSerializer:
    """Writes tensors to one ``.tensors`` file.

    When the content appears:

    - A local path: after each successful call of :meth:`write_module` or :meth:`write_state_dict`, before
      :meth:`close`. The serializer writes a file without a name and names it at the end of the first successful call;
      until then an existing file is untouched. If a later call fails, the last complete content stays readable. The
      same holds for an open file object, which is changed in place.
    - A URI of a store (``s3://…``, ``gs://…``): when :meth:`close` returns or you leave the ``with`` block. A
      failure, an exception in the block, or a serializer that is never closed stores nothing; the latter gives a
      ``ResourceWarning`` and a line in the log.
    - A new, empty stream of ``open_stream("s3://…", "wb+")``: as for a URI, and also when you close the stream after a
      successful call, even if you do not close the serializer. You can only close the stream from then on.

    If the machine crashes, a path has the old file or the content of whole calls, and after :meth:`close` all of it.
    That needs a sync per call, so tensors of :meth:`write_tensor` wait for each other. They become part of the content
    with the next call that writes many tensors, when 64 MiB have come together, with the first call a second later, and
    at the latest when the serializer is closed or dropped. If the file has metadata or ties, or is encrypted or signed,
    they wait for the end. With ``fsync=False``, and in descriptors and file objects, each call is visible when it
    returns.

    Do not change tensors while a call writes them. The serializer reads contiguous tensors in host memory twice, once
    to write and once for the digests, so a change in between gives a file that fails verification. In other cases
    (encryption, other devices, tensors that are not contiguous) it makes a copy first: the file verifies, and may hold
    a mix of old and new bytes.

    Several threads may use one serializer: their calls wait for each other.

    As a context manager, it closes the file. An exception inside the block abandons what is not complete.

    Args:
        file_obj: Where to write: a local path (``str``, ``bytes``, ``PathLike``; missing folders are made), a
            descriptor (which stays the caller's), an ``s3://`` URI, or an open, readable, writable and seekable binary
            file object, which is written from its current position on and closed by :meth:`close`.
        compress_tensors: Accepted, without effect.
        encryption: Encrypts every tensor with this key, and authenticates the whole file.
        limit_cpu_concurrency: Upper bound for threads; ``None`` uses as many as are useful.
        hashes: Digests to store per tensor: ``"crc32"``, ``"sha256"``, a collection of these; ``None`` or an empty
            collection stores none. The default is both, as readers expect. Encrypted tensors never get a CRC32, which
            would reveal too much about short plaintexts.
        fsync: Syncs a local path, so that a crash of the machine leaves the old file or whole calls of the new one.
            ``False`` is faster and gives that up. With either value, a killed process leaves one of these.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening a URI, as for :func:`tensorizer.stream_io.open_stream`.
        metadata: Text to keep in the file, by key, up to 100 MB; :attr:`TensorDeserializer.metadata` returns it. In
            encrypted files it is encrypted too. Earlier releases ignore it. Keys that begin with ``tensorizer.`` are
            reserved.
        ties: How to store tensors that a call writes under several names, such as tied embeddings. ``"twice"``
            stores their data under each name, as every release expects. ``"once"`` stores them under the first name;
            earlier releases do not see the others. With both, they are one tensor again after loading, and
            ``load_into_module`` ties the module.
        signing_key: A :class:`SigningKey` that signs the file after each call that writes many tensors, and when you
            close it. Plain files then need SHA-256 among `hashes`.

    Raises:
        ValueError: An object in the wrong mode (text, append, not readable, not seekable); a read-only scheme; a
            ``limit_cpu_concurrency`` below 1; unknown `hashes` or `ties`; a `signing_key` without
            SHA-256.
        TypeError: An argument of the wrong type.
        OSError: The target cannot be written.

    Examples:
        >>> from tensorizer import TensorSerializer
        >>> with TensorSerializer("new.tensors") as serializer:
        ...     serializer.write_module(torch.nn.Linear(4, 2))
    """

    _closed = True  # until there is a file to close

    def __init__(
        self,
        file_obj: TargetArgument,
        compress_tensors: bool = False,
        *,
        encryption: Optional[EncryptionParams] = None,
        limit_cpu_concurrency: Optional[int] = None,
        hashes: Union[str, Collection[str], None] = HASH_NAMES,
        fsync: bool = True,
        progress: ProgressArgument = False,
        stream_options: Optional[Mapping[str, Any]] = None,
        metadata: Optional[Mapping[str, str]] = None,
        ties: str = "twice",
        signing_key: Optional[SigningKey] = None,
    ) -> None:
        max_workers = thread_limit("limit_cpu_concurrency", limit_cpu_concurrency)
        self.cpu_limit = int(_C.cpu_quota()) if limit_cpu_concurrency is None else limit_cpu_concurrency
        check_encryption(encryption)
        chosen = check_hashes(hashes, encrypted=encryption is not None)
        signer = None if signing_key is None else signer_of(signing_key)
        if signer is not None and encryption is None and "sha256" not in chosen:
            raise ValueError(
                "signing_key: expected 'sha256' among hashes, which is what a signature of a file in clear covers"
            )
        if ties not in ("twice", "once"):
            raise ValueError(f"ties: expected one of twice, once, got {ties!r}")
        self._once = ties == "once"
        texts = check_metadata(metadata)
        key, derivation = encryption_key(encryption)
        self.compress_tensors = compress_tensors
        self.lz4_frame = None
        self.total_compressed_tensor_bytes = 0
        self._progress = progress
        self._extra_state: extra_state.Nodes = {}  # records in the file so far

        opened = open_sink(file_obj, fsync, CallOptions.to_write(stream_options=stream_options))
        self._opened = opened
        self._session = _C.SaveSession(
            opened.sink,
            opened.start,
            crc32="crc32" in chosen,
            sha256="sha256" in chosen,
            max_workers=max_workers,
            key=key,
            derivation=derivation,
            metadata=list(texts.items()),
            signer=signer,
        )
        self._unclosed = tell_if_unclosed(self, shown_location(file_obj)) if opened.appears_on_close else None
        self._lock, self._lock_owner = threading.RLock(), os.getpid()  # see _turn
        self._writing = self._close_is_due = False
        self._closed = False

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def total_tensor_bytes(self) -> int:
        """Bytes of tensor data written so far; tensors without data add nothing."""
        return int(self._session.tensor_nbytes)

    def close(self) -> None:
        """Closes the file, also a file object that you passed. A second call does nothing.

        Within a write call (from its `progress`, or from a signal handler) it takes effect when that call ends.

        Raises:
            OSError: The file could not be completed.

        Examples:
            >>> serializer = TensorSerializer("new.tensors")
            >>> serializer.write_state_dict({"weight": torch.ones(4)})
            >>> serializer.close()
        """
        with self._turn():
            if self._writing:
                self._close_is_due = True
            elif not self._closed:
                self._close()

    def _close(self) -> None:
        self._end()
        try:
            self._session.finish()
        except BaseException:
            with contextlib.suppress(Exception):  # the first failure says more
                self._opened.discard()
            raise
        self._opened.close()
        logger.debug("closed %s: %d bytes of tensors", self._opened.sink.name, self.total_tensor_bytes)

    def __enter__(self) -> TensorSerializer:
        return self

    def __exit__(self, exc_type: Optional[type[BaseException]], *_: object) -> None:
        if exc_type is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # the exception that is being raised says more
            self._abandon()

    def _abandon(self) -> None:
        with self._turn():
            if self._closed:
                return
            self._end()
            try:
                self._session.abandon()
            finally:
                self._opened.discard()

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        """The lock of calls that change the file. A forked child gets its own: nothing would release the parent's."""
        if self._lock_owner != os.getpid():
            self._lock, self._lock_owner, self._writing = threading.RLock(), os.getpid(), False
        return self._lock

    def _end(self) -> None:
        self._closed = True
        if self._unclosed is not None:
            self._unclosed.detach()

    def __getstate__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} has an open file and can be neither copied nor pickled")

    def __del__(self) -> None:
        # A local file has the content of all completed calls. An upload that was not closed is not completed.
        # At the end of the process, names of this module may be gone, so this uses none.
        if not self._closed and not self._opened.is_lent:
            self._closed = True
            try:  # noqa: SIM105
                self._session.abandon()
            except Exception:
                pass
            try:  # noqa: SIM105
                (self._opened.forget or self._opened.close)()
            except Exception:
                pass

    # ---- writing ----------------------------------------------------------------------------------------------------

    def write_module(
        self,
        m: torch.nn.Module,
        remove_tensors: bool = False,
        *,
        include_non_persistent_buffers: bool = True,
        include_extra_state: bool = False,
    ) -> None:
        """Writes every parameter and buffer of a module, named ``"<module path>.<tensor name>"``.

        Tensors of the root module get names that start with a dot. The constructor's ``ties`` says how tensors that
        modules share are stored.

        Args:
            m: The module; never modified, unless `remove_tensors`.
            remove_tensors: Sets each parameter and buffer to ``None`` once its data are written, to free memory early.
                The last ones, up to 256 MiB, stay until the call has succeeded, so a call that fails leaves a module of
                that size whole. From a larger one, only tensors whose data the target had accepted are gone. The object
                of an ``s3://`` URI appears at :meth:`close`: if that fails, the module has none of them any more.
            include_non_persistent_buffers: Writes also buffers that are not part of the state dict.
            include_extra_state: Stores also what ``get_extra_state`` of the modules returns: tensors or
                nested dictionaries of tensors (64 MiB at most). ``load_into_module`` passes it to
                ``set_extra_state``. Earlier releases ignore it. With ``False``, one warning names the modules
                whose extra state is left out. What classes save in their own way, as those of quantized layers
                do, is always left out; one warning names it.

        Raises:
            ValueError: The file already has a tensor of that name.
            NotImplementedError: Quantized, sparse or nested tensors; tensors without memory of their own.
            TypeError: With `include_extra_state`, a state of another kind. Nothing was written.
            OSError: The data could not be written.

        Examples:
            >>> with TensorSerializer("new.tensors") as serializer:
            ...     serializer.write_module(torch.nn.Linear(4, 2))
        """
        extra_state.check_module(m, "write_state_dict writes state dicts")
        held = list(walk_module(m, include_non_persistent_buffers))
        extra = extra_state.pack(extra_states(m)) if include_extra_state else None
        records = [record_of(one) for one in held]
        beside = extra_state.saved_beside(m)
        homes = [(one.module, one.attribute) for one in held] if remove_tensors else []
        held.clear()  # from here on, only the records keep alive the tensors that leave the module
        self._write(records, extra=extra, homes=homes)
        left_out = [] if include_extra_state else [extra_state.state_name(path) for path in modules_with_extra_state(m)]
        if left_out:
            _warn_of("extra state of modules, which include_extra_state=True would store", left_out)
        if beside:
            _warn_of("what classes of modules save beside their tensors, which torch.save would store", beside)

    def write_state_dict(self, state_dict: Any) -> None:
        """Writes nested mappings (with ``str`` keys) and sequences of tensors; sequences come back as lists.

        Empty mappings and sequences are not stored; one warning names them.

        Raises:
            TypeError: A key that is not a ``str``, a leaf that is not a tensor. Nothing was written.
            ValueError: The file already has a tensor of that name, or one that conflicts with it.
            NotImplementedError: As for :meth:`write_module`.
            OSError: The data could not be written.

        Examples:
            >>> with TensorSerializer("new.tensors") as serializer:
            ...     serializer.write_state_dict({"layers": [torch.ones(2), torch.ones(3)]})
        """
        empty: list[Path] = []
        self._write(
            [
                Record.of_tensor(path, tensor, stored_dtype(display(path), tensor))
                for path, tensor in flatten(state_dict, empty)
            ]
        )
        if empty:
            _warn_of("containers without a tensor", [display(path) for path in empty])

    def write_tensor(
        self,
        idx: int,
        name: Name,
        tensor_type: TensorType,
        tensor: Union[torch.Tensor, np.ndarray[Any, Any]],
    ) -> None:
        """Writes one tensor or array. Slower per tensor than the methods that take many.

        On a path that is synced the tensor may wait for others before it is part of the file: see the class.

        Args:
            idx: Module index, 0 to 65535.
            name: The name, or a path as :meth:`TensorDeserializer.read_tensors` yields it.
            tensor_type: What to call it in the file; paths are legal for ``STATE_DICT`` only.
            tensor: The data, on any device.

        Raises:
            TypeError: Arguments of the wrong type; an array that torch cannot adopt.
            ValueError: A name in use, an index out of range, an array in foreign byte order.
            NotImplementedError: As for :meth:`write_module`.

        Examples:
            >>> with TensorSerializer("new.tensors") as serializer:
            ...     _ = serializer.write_tensor(0, "weight", tensorizer.TensorType.PARAM, torch.ones(4, 2))
        """
        try:
            idx = operator.index(idx)
        except TypeError:
            raise TypeError(f"idx: expected an int, got {type(idx).__name__}") from None
        if not 0 <= idx <= 0xFFFF:
            raise FieldRangeError(f"idx: expected 0 to 65535, got {idx}")
        kind = TensorType(tensor_type)
        self._write([Record.of_tensor(check_name(name, kind), *adopt(name, tensor), kind, idx)], growing=True)

    def _write(
        self,
        records: Sequence[Record],
        growing: bool = False,
        extra: Optional[extra_state.Nodes] = None,
        homes: Sequence[tuple[torch.nn.Module, str]] = (),
    ) -> None:
        """Writes the records of one call, which become visible together. Calls of several threads wait for each other.

        If tensors are to be taken out of their modules and freed once they are written, `homes` has the module and the
        attribute of each record.
        """
        with self._turn():
            if self._closed:
                raise ValueError("the serializer is closed")
            if self._writing:
                raise RuntimeError("write called from inside another write (a progress callback or a signal handler)")
            self._writing = True
            try:
                self._write_alone(records, growing, extra, homes)
            finally:
                self._writing = False
                if self._close_is_due:
                    self.close()

    def _note_whole(self, is_whole: bool) -> None:
        if self._opened.note_whole is not None:
            self._opened.note_whole(is_whole)

    def _write_alone(
        self,
        records: Sequence[Record],
        growing: bool,
        extra: Optional[extra_state.Nodes],
        homes: Sequence[tuple[torch.nn.Module, str]],
    ) -> None:
        extra = None if extra is None else {**self._extra_state, **extra}
        home_of = dict(zip((record.path for record in records), homes))
        aliases = ties_of(records)
        left_out = {r.path for r in records if r.path in aliases and (self._once or r.is_second_name)}
        ties = [(alias, kept, alias not in left_out) for alias, kept in aliases.items()]
        written = [record for record in records if record.path not in left_out]
        left_out_with: dict[Path, list[Record]] = {}
        for record in records:
            if record.path in left_out:
                left_out_with.setdefault(aliases[record.path], []).append(record)
        total = behind = sum(record.nbytes for record in written)
        removable: list[Record] = []

        def remove() -> None:
            for record in removable:
                for name in (record, *left_out_with.get(record.path, ())):
                    setattr(*home_of[name.path], None)
                    name.source = None
            removable.clear()

        begun = False
        try:
            if extra is not None:
                self._session.set_metadata(extra_state.KEY, extra_state.to_text(extra))
            self._session.begin_call([record.begin() for record in written], growing, ties)
            begun = True
            self._note_whole(False)
            with progress_reporter(self._progress, total, "saving") as report:
                for batch in batches_to_copy(written, frees=bool(home_of)):
                    write_tensors(self._session, [record.source for record in batch], report)
                    nbytes = sum(record.nbytes for record in batch)
                    behind -= nbytes
                    removable += batch if home_of else ()
                    if not stay_until_the_end(nbytes, behind):
                        remove()
            self._session.finish_call()
            remove()
            self._note_whole(True)
        except BaseException:
            if begun and self._unclosed is not None:
                self._unclosed.detach()  # the error says that nothing was stored
            if extra is not None:  # restores the state before the call
                self._session.set_metadata(extra_state.KEY, extra_state.to_text(self._extra_state))
            self._session.abort_call()
            raise
        self._extra_state = self._extra_state if extra is None else extra
        if logger.isEnabledFor(logging.DEBUG):
            for record in written:
                logger.debug("wrote %s", str(record))  # as text, because a record that is kept must not keep the tensor


def _warn_of(what: str, names: list[str]) -> None:
    """Warns once, at the line of the caller's caller, about content that a write call leaves out."""
    shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    warnings.warn(f"not stored: {what}: {shown}", stacklevel=3)

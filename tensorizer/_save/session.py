"""Writes one ``.tensors`` file: checks the arguments and hands tensors to the extension."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import torch

from tensorizer import _C
from tensorizer._format.payloads import contiguous, is_copied
from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.sinks import open_sink
from tensorizer._keys import check_encryption, encryption_key
from tensorizer._save.records import Record, Tie
from tensorizer._system import cuda_engine
from tensorizer._system.devices import empty, ordinary_tensors
from tensorizer._system.sizes import runs

HASH_NAMES = ("crc32", "sha256")

# Most bytes of copies (of non-contiguous tensors and of tensors on other devices) that exist at a time.
_COPY_BUDGET_NBYTES = 256 << 20


def check_hashes(hashes: Union[str, Collection[str], None], encrypted: bool) -> frozenset[str]:
    """The hashes that the caller chose. Encrypted tensors get no CRC-32, whose four bytes would reveal short tensors.

    Raises:
        ValueError: A name is unknown.
    """
    chosen = frozenset((hashes,) if isinstance(hashes, str) else hashes or ())
    unknown = sorted(map(str, chosen.difference(HASH_NAMES)))
    if unknown:
        raise ValueError(f"hashes: expected names out of {', '.join(HASH_NAMES)}, got {', '.join(unknown)}")
    return chosen - {"crc32"} if encrypted else chosen


def check_metadata(metadata: Any) -> dict[str, str]:
    """The metadata to store.

    Raises:
        TypeError: It is not a mapping from ``str`` to ``str``.
        ValueError: A text has lone surrogates, which UTF-8 cannot encode.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata: expected a mapping from str to str, got {type(metadata).__name__}")
    for key, value in metadata.items():
        for text in (key, value):
            if not isinstance(text, str):
                raise TypeError(f"metadata: expected str, got {type(text).__name__} at {key!r:.100}")
            try:
                text.encode()
            except UnicodeEncodeError:  # Python's names of files contain lone surrogates for undecodable bytes
                raise ValueError(f"metadata: {ascii(key)[:100]}: text that is no Unicode cannot be stored") from None
    return dict(metadata)


# --- payloads -------------------------------------------------------------------------------------------------------


def batches_to_copy(
    records: Sequence[Record], frees: bool = False, to_host: bool = False
) -> Iterator[Sequence[Record]]:
    """Splits tensors into batches of one device whose copies fit the budget together.

    If writing `frees` the tensors, those that need no copy count, too, so that memory becomes free in steps. If they go
    `to_host`, all tensors of devices are copied.
    """

    def nbytes(record: Record) -> int:
        stays = not to_host and on_fast_device(record.source)
        return record.nbytes if frees or is_copied(record.source, stays) else 0

    return runs(records, nbytes, _COPY_BUDGET_NBYTES, lambda record: record.source.device)


def stay_until_the_end(nbytes: int, behind: int) -> bool:
    """Whether tensors stay in their modules until the call has succeeded, so that they are there if it fails.

    These are the last tensors, as many as fit the budget; `behind` is the number of bytes that follow.
    """
    return not behind or nbytes + behind <= _COPY_BUDGET_NBYTES


def on_fast_device(tensor: torch.Tensor) -> bool:
    """Whether the extension copies the tensor's data from its device."""
    return tensor.is_cuda and cuda_engine.is_fast_device(tensor.device)


def write_tensors(session: _C.SaveSession, tensors: Sequence[torch.Tensor], progress: Any = None) -> None:
    """Writes the next tensors, which are on one device. Tensors are copied first only if they have to be."""
    fast = on_fast_device(tensors[0])
    data = [contiguous(tensor, on_device=fast) for tensor in tensors]  # keeps the copies alive until the call returns
    engine = cuda_engine.engine_for(tensors[0].device) if fast else None
    session.write_payloads([memory_of(tensor) for tensor in data], engine=engine, progress=progress)


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous data of tensors of one device in host memory; that of CUDA devices comes through the pinned slots."""
    fast = on_fast_device(tensors[0])
    data = [contiguous(tensor, on_device=fast) for tensor in tensors]
    if not fast:
        return data
    with ordinary_tensors():
        copies = [empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in data]
    moves = [(tensor.data_ptr(), *memory_of(copy)) for tensor, copy in zip(data, copies)]
    _C.fetch_to_host(moves, cuda_engine.engine_for(tensors[0].device))
    return copies


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and number of bytes of contiguous data."""
    nbytes = tensor.numel() * tensor.element_size()
    return (tensor.data_ptr() if nbytes else 0, nbytes)


# --- a file that is written by a single call ------------------------------------------------------------------------


@contextlib.contextmanager
def tensors_file(
    target: Any,
    records: Sequence[Record],
    ties: Sequence[Tie] = (),
    *,
    hashes: Collection[str],
    encryption: Any = None,
    metadata: Optional[Mapping[str, str]] = None,
    max_workers: int = 0,
    fsync: bool = True,
    options: CallOptions = PLAIN,
    signer: Optional[_C.Signer] = None,
    binds_records: bool = False,
) -> Iterator[_C.SaveSession]:
    """The session to which the block hands the payloads of `records`, in order.

    The file exists when the block has ended; after an exception, an older file of that name stays. Encrypted files hold
    no CRC-32, whatever `hashes` says. With `binds_records`, the index digest of a plain file also covers the record
    headers, as it does in encrypted and signed files.

    Raises:
        OSError: The target cannot be written.
    """
    key: Optional[_C.SecretKey] = None
    derivation: Optional[tuple[int, int, bytes]] = None
    if encryption is not None:
        check_encryption(encryption)
        key, derivation = encryption_key(encryption)
    opened = open_sink(target, fsync, options)
    give_up = [opened.discard]
    try:
        session = _C.SaveSession(
            opened.sink,
            opened.start,
            crc32="crc32" in hashes and key is None,
            sha256="sha256" in hashes,
            max_workers=max_workers,
            key=key,
            derivation=derivation,
            metadata=list((metadata or {}).items()),
            signer=signer,
            binds_records=binds_records,
        )
        give_up = [session.abandon, opened.discard]
        session.begin_call([record.begin() for record in records], False, list(ties))
        yield session
        session.finish_call()
        session.finish()
    except BaseException:
        for end in give_up:
            with contextlib.suppress(Exception):  # the exception that is being raised says more
                end()
        raise
    opened.close()

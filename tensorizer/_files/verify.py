"""Whether the data of a file are what was written."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from tensorizer._files.checkpoints import reader
from tensorizer._files.copy import open_once
from tensorizer._format.entries import FilterFuncType
from tensorizer._format.names import Name, name_text
from tensorizer._io.call_options import CallOptions, Trust
from tensorizer._io.model_files import is_checkpoint
from tensorizer._load.digests import GivenDigest, verification
from tensorizer._load.open_file import OpenFile
from tensorizer._progress import ProgressArgument, progress_reporter
from tensorizer._signing import PublicKeyArgument
from tensorizer._system.redaction import shown_location
from tensorizer.errors import CryptographyError, FormatError, HashMismatchError, TensorizerError

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class Mismatch(NamedTuple):
    """A tensor, or a file, whose data differ from what was written."""

    name: Name
    reason: str


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """What was checked, and the result. It is true if everything was checked and nothing is wrong."""

    source: str
    format: str
    verified: tuple[Name, ...]
    """Tensors whose data agree with a stored digest or an authentication code."""
    mismatched: tuple[Mismatch, ...]
    unverified: tuple[Name, ...]
    """Tensors with data of which the file holds no digest."""
    index_matches: Optional[bool]
    """Whether the index has the digest that is stored with it; ``None`` where there is none."""
    sha256: Optional[str]
    """SHA-256 of the whole file, where it was compared; ``None`` for a model of several files."""
    sha256_matches: Optional[bool]
    """Whether all files have the SHA-256 that they must have; ``None`` where none was given."""
    nbytes: int
    """Payload bytes that were read."""
    seconds: float = field(compare=False)
    """How long it took; reports of equal findings are equal."""
    sharded: bool = False
    """Whether it is a model of several files."""
    authenticated: Optional[str] = None
    """What authenticated the file: ``"key"``, ``"signature"``, ``"both"``, or ``None``."""
    signers: tuple[str, ...] = ()
    """Public keys of the signatures that were checked and are right, as hexadecimal digits."""
    differing: tuple[Mismatch, ...] = ()
    """Files that have another SHA-256 than `sha256` or `verify` states."""

    @property
    def may_be_right(self) -> bool:
        """Whether nothing is wrong with what could be checked."""
        return not self.mismatched and self.index_matches is not False and self.sha256_matches is not False

    @property
    def ok(self) -> bool:
        if not self.may_be_right:
            return False
        # A .safetensors file holds no digests: its structure is all that it can be held against.
        return not self.unverified or self.format == "safetensors" or self.sha256_matches is True

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"<VerifyReport: {self.source}: {'ok' if self.ok else 'FAILED'}: {self.counts()}>"

    def counts(self) -> str:
        """What was found, for people: how many tensors match their digests, and the first that does not."""
        parts = [f"{len(self.verified):,} verified"]
        if self.mismatched:
            parts.append(f"{len(self.mismatched):,} do not match (first: {name_text(self.mismatched[0].name)})")
        if self.index_matches is False:
            parts.append("the index does not match its digest")
        if self.unverified:
            parts.append(f"{len(self.unverified):,} without a digest")
        return ", ".join(parts)


def verify(
    source: Any,
    *,
    encryption: Any = None,
    filter_func: Optional[FilterFuncType] = None,
    sha256: Optional[str] = None,
    fail_fast: bool = False,
    num_readers: Optional[int] = None,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
    verify: Any = "auto",
) -> VerifyReport:
    """Reads every tensor and compares it with the digests and authentication codes in the file.

    Args:
        source: A path, URI, descriptor, open binary file object, a folder of shards or their index; or a checkpoint
            folder of ``TensorizerWriter``, local or on ``s3://``, of which other values are checked, too.
        encryption: The key of an encrypted file.
        filter_func: Checks only the tensors whose name it accepts.
        sha256: Hexadecimal SHA-256 that the whole file must have, if you know it from elsewhere.
        fail_fast: Ends at the first tensor that does not match.
        num_readers: Upper bound for reading threads.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening a URI.
        public_key: Keys, of which one must have signed the file, as for :class:`tensorizer.TensorDeserializer`.
        require_authenticated: Whether the key or a signature must authenticate the file (docs/api/index.md).
        verify: Digests that whole files are also compared with, as for :func:`tensorizer.load_stream`: ``"hub"``, or a
            path or URI of a ``SHA256SUMS`` file or an OpenSSF signature.

    Returns:
        The report. Tensors without data count as verified: there is nothing that could be wrong. A ``.safetensors``
        file holds no digests, so only its structure can be checked, unless `sha256` or `verify` is given; the report
        says so in ``unverified``. Each file is read once.

    Raises:
        CryptographyError: The file is encrypted and there is no key.
        AuthenticationError: The key is wrong, or the index does not match the key or the signature.
        FormatError: Not a file of tensors, or one whose structure is damaged.
        OSError: It cannot be opened or read.
        MissingHashError: `verify` has no digest for a file.
        ValueError: `sha256` is not 64 hexadecimal digits, or the source is more than one file; ``verify="hub"`` of a
            file that is not from the hub.

    Examples:
        >>> tensorizer.verify("model.tensors")
        <VerifyReport: model.tensors: ok: 2 verified>
    """
    wanted = None if sha256 is None else sha256.strip().lower()
    if wanted is not None and not _SHA256.match(wanted):
        raise ValueError(f"sha256: expected 64 hexadecimal digits, got {len(wanted)} characters")
    trust = Trust.of(public_key, require_authenticated)
    call = CallOptions.to_read(encryption, stream_options, num_readers, progress, trust)
    checks = verification(verify, call)
    begin = time.monotonic()
    if is_checkpoint(source, call):
        if wanted is not None:
            raise ValueError(f"sha256: expected one file, got the checkpoint {shown_location(source)}")
        if checks.files is not None:
            raise ValueError(f"verify: expected a model, got the checkpoint {shown_location(source)}")
        found: VerifyReport = reader().verify(source, call, filter_func, fail_fast)
        return found
    if wanted is not None:
        checks = checks._replace(files=GivenDigest(wanted))
    with open_once(source, call, checks) as file:
        chosen = [i for i in file.stored if filter_func is None or filter_func(file.names[i])]
        if wanted is not None and file.shard_names:
            raise ValueError(f"sha256: expected one file, got the shards of {file.source_name}")
        file.announce(chosen)
        verified: list[int] = []
        mismatched: list[Mismatch] = []
        unverified: list[int] = []
        nbytes = 0
        total = sum(map(file.index.data_nbytes, chosen))
        with progress_reporter(progress, total, "verifying") as report:
            for batch in file.runs_of_files(chosen):
                for i, error in _errors_of(file, batch):
                    if error is None:
                        proved = file.index.encrypted or not file.lacks_hashes(i)
                        (verified if proved else unverified).append(i)
                        continue
                    if isinstance(error, CryptographyError) and not verified and not mismatched:
                        raise error  # the key may be wrong: that says nothing about the data
                    mismatched.append(Mismatch(file.names[i], str(error)))
                    del error  # it holds what was read
                    if fail_fast:
                        break
                nbytes += sum(map(file.index.data_nbytes, batch))
                if report is not None:
                    report(nbytes)
                if fail_fast and mismatched:
                    break
            compares = checks.files is not None and not (fail_fast and mismatched)
            errors = file.differing_files() if compares else []
            differing = [Mismatch(str(error.source), str(error)) for error in errors]
        return VerifyReport(
            source=file.source_name,
            format=file.index.format,
            verified=tuple(file.names[i] for i in sorted(verified)),
            mismatched=tuple(mismatched),
            unverified=tuple(file.names[i] for i in sorted(unverified)),
            index_matches=file.index_matches,
            sha256=file.readers[0].sha256 if len(file.readers) == 1 else None,
            sha256_matches=not differing if compares else None,
            nbytes=nbytes,
            seconds=time.monotonic() - begin,
            sharded=bool(file.shard_names),
            authenticated=file.authenticated,
            signers=tuple(signer.hex() for signer in file.signers),
            differing=tuple(differing),
        )


def check_all(file: OpenFile, progress: ProgressArgument) -> None:
    """Reads every tensor of an open file.

    Raises:
        HashMismatchError, CryptographyError, FormatError: One of them, or the index, is not what was written.
    """
    file.verify_index()
    with progress_reporter(progress, sum(map(file.index.data_nbytes, file.stored)), "verifying") as report:
        done = 0
        for batch in file.runs(file.stored):
            file.read(batch, verify=True)
            done += sum(map(file.index.data_nbytes, batch))
            if report is not None:
                report(done)


def _errors_of(file: OpenFile, batch: Sequence[int]) -> Iterator[tuple[int, Optional[TensorizerError]]]:
    """What is wrong with each tensor of a batch; they are read one by one, as the answers are asked for, only if one of
    them is wrong."""
    try:
        file.read(batch, True)
    except (HashMismatchError, CryptographyError, FormatError) as error:
        if len(batch) == 1:
            yield batch[0], error
            return
    else:
        yield from ((i, None) for i in batch)
        return
    for i in batch:
        yield from _errors_of(file, [i])

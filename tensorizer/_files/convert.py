"""From one format of tensor files to another, encrypted or decrypted on the way, in bounded memory."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import time
from collections.abc import Hashable, Mapping
from typing import Any, Optional, Union

import torch

from tensorizer import _C
from tensorizer._files.checkpoints import reader
from tensorizer._files.contents import (
    Contents,
    check_pickled,
    contents_of_file,
    contents_of_tensors,
    pickled_files,
    read_pickled,
)
from tensorizer._files.copy import copies_beside, copy_file, has_signature_beside, open_once
from tensorizer._files.write import WriteOptions, file_in_folder, format_of, write_contents
from tensorizer._format.names import name_text
from tensorizer._io.call_options import CallOptions, Trust, says_dtype
from tensorizer._io.model_files import index_name, is_checkpoint
from tensorizer._io.shards import ORIGIN_KEY, facts_of, origin_text
from tensorizer._io.sources import is_path
from tensorizer._io.uri import SplitURI, identity_of, local_path
from tensorizer._load.digests import AUTO, Verification, verification
from tensorizer._load.open_file import OpenFile
from tensorizer._progress import ProgressArgument
from tensorizer._signing import PublicKeyArgument
from tensorizer._system.redaction import shown_location
from tensorizer.errors import AuthenticationError

logger = logging.getLogger("tensorizer.serialization")


@says_dtype
def convert(
    source: Any,
    target: Any,
    *,
    format: Optional[str] = None,
    dtype: Optional[torch.dtype] = None,
    max_shard_size: Union[str, int, None] = None,
    ties: str = "once",
    encryption: Any = None,
    decryption: Any = None,
    all_files: bool = False,
    check: bool = True,
    keep_order: bool = False,
    flatten: bool = False,
    skip_non_tensors: bool = False,
    force: bool = True,
    dry_run: bool = False,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
    public_key: PublicKeyArgument = None,
    verify: Any = "auto",
) -> dict[str, Any]:
    """Writes the tensors of one file to another, in another format, dtype or encryption.

    Payloads are read 64 MiB at a time (or one tensor, if that is larger) while the previous ones are written, so files
    may be larger than memory. The target appears when it is complete. A conversion that fails leaves an existing target
    as it was.

    A ``.tensors`` target beside its source notes what it was made from, with a SHA-256, for which the source is read
    once more: a reader of the folder then knows that both are one model (docs/safetensors.md, "Two sets of weights").

    Args:
        source: A ``.tensors``, ``.safetensors``, ``.pt`` or ``.bin`` file: a path, URI or open binary file object; or
            the shards of a model: their folder, index or URI prefix. The content decides the format. Pickled files
            must be local. Or a checkpoint folder of ``TensorizerWriter``, local or on ``s3://``, as
            :func:`tensorizer.distributed.dcp_to_files` takes it, which selects by prefix and works with many ranks.
        target: A path or URI. In a folder that exists, or with a slash at the end: the file ``model.tensors`` or
            ``model.safetensors`` there.
        format: ``"tensors"`` or ``"safetensors"``; ``None`` uses the extension of `target`, and ``"tensors"`` if it has
            no known one.
        dtype: Converts floating-point tensors of 16 bits and more; others stay as they are.
        max_shard_size: Writes several files and an index beside the name of `target`, each of at most so many bytes,
            or a text like ``"5GB"``; ``None``, the default, writes one file.
        ties: How to store a tensor with several names: ``"once"`` stores it once and records the other names,
            ``"twice"`` stores it under each name, ``"error"`` raises.
        encryption: Encrypts the target (``.tensors`` only).
        decryption: The key of an encrypted source.
        all_files: Also copies the other files in the local folder of `source` (configuration, tokenizer) to that of
            `target`, without hidden files, subfolders, and models in any format. If a key is there, it is copied, too.
        check: Reads the target back and compares every payload with what was read from the source: a local file before
            it appears under its name, an object of a store when it is there.
        keep_order: Keeps the order of the source in a ``.safetensors`` target, instead of using that of the reference's
            writer. A file converted from ``.safetensors`` and back is the same, byte for byte.
        flatten: Joins the steps of nested names with dots, for a ``.safetensors`` target.
        skip_non_tensors: Leaves out values of a pickled file that are not tensors.
        force: Replaces an existing target.
        dry_run: Writes nothing, and reports what would be written.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.
        public_key: Keys, one of which must have signed the source, as for :class:`tensorizer.TensorDeserializer`.
        verify: The digests that the source is compared with while it is read, as for :func:`tensorizer.load_stream`.
            The target appears only if they are equal. ``"auto"``, the default: those in a ``.tensors`` file.

    Returns:
        What was done, by name: ``source`` and ``target``; ``format`` of the target; ``files``, the written ones,
        without credentials and query; ``tensors``, how many, and ``nbytes``, the bytes of their payloads; ``ties``,
        from the names of aliases to those of stored tensors; ``skipped``, the values of a pickled state dict
        that are not tensors, or of a checkpoint that no file of tensors holds; ``copied``, the other files of the
        folder; ``checked`` and ``dry_run``; ``seconds``. The target has no signatures; a warning says so if the source
        has any.

    Raises:
        UnsupportedContentError: The target's format cannot hold something, or `all_files` with a model that torchao has
            quantised; nothing was written.
        StreamExistsError: Without `force`, the target exists, or the target of a file that would be copied. With
            `max_shard_size`, other files of the model of that name exist (a single file, other shards, their index)
            that are not read: `force` replaces none of them.
        HashMismatchError: The source disagrees with its digests, or the target with what was written.
        MissingHashError: `verify` needs a digest, and a tensor or file has none.
        CryptographyError: A key is missing or wrong, or was given for a file that is not encrypted.
        AuthenticationError: The source does not match its key or signature.
        FormatError: The source is not a file of tensors, or a folder with several sets of weights.
        ImportError: The source is pickled, and this torch cannot read such files safely.
        OSError: The source cannot be read, or the target cannot be written.
        ValueError: An argument has a wrong value; `all_files` with a source that is not local; `all_files`, or several
            shards, with a `target` that is neither a folder nor has a known extension.

    Examples:
        >>> tensorizer.convert("model.tensors", "model.safetensors")["tensors"]
        2
    """
    begin = time.monotonic()
    call = CallOptions.to_write(encryption, stream_options, progress)
    with contextlib.ExitStack() as stack:
        trust = Trust.of(public_key, False)
        reading = call.reading(decryption, trust)
        to_format = format_of(target, format)
        contents, skipped, files_read, file = _open_contents(
            stack,
            source,
            reading,
            skip_non_tensors,
            to_format,
            AUTO if verify == "auto" else verification(verify, reading),
        )
        shown_source = shown_location(source) if file is None else file.source_name
        options = WriteOptions(
            format=format,
            dtype=dtype,
            max_shard_size=max_shard_size,
            ties=ties,
            check=check,
            keep_order=keep_order,
            flatten=flatten,
            force=force,
            dry_run=dry_run,
            replaces_forms=False,
            reads={identity_of(location) for location in files_read if isinstance(location, (str, bytes, os.PathLike))},
        )
        target = file_in_folder(target, format)
        if all_files:
            _check_is_told_from_folders(target)
        beside = copies_beside(source, target, force, call) if all_files else []
        if file is not None and not dry_run and format_of(target, format) == "tensors":
            note = _note_of_origin(file, target)
            if note is not None:
                contents = contents._replace(metadata={**(contents.metadata or {}), ORIGIN_KEY: note})
        plan, files = write_contents(contents, target, options, call)
        if not dry_run:
            if file is not None:
                _warn_of_signatures(file, source)
            for other, copy in beside:
                copy_file(other, copy, call)
        return {
            "source": shown_source,
            "target": shown_location(target),
            "format": plan.format,
            "files": tuple(map(shown_location, files)),
            "tensors": len(plan.records),
            "nbytes": plan.nbytes,
            "ties": {name_text(alias): name_text(kept) for alias, kept in plan.ties.items()},
            "skipped": tuple(skipped),
            "copied": tuple(shown_location(copy) for _, copy in beside),
            "checked": check and not dry_run,
            "dry_run": dry_run,
            "seconds": time.monotonic() - begin,
        }


def _note_of_origin(file: OpenFile, target: Any) -> Optional[str]:
    """What the target has to say of a source in the same folder, so that readers of the folder know them for one model;
    ``None`` where the source lies elsewhere."""
    locations = file.opened.locations
    if not all(isinstance(one, (str, bytes, os.PathLike)) for one in [target, *locations]):
        return None
    if {_folder_of(one) for one in locations} != {_folder_of(target)}:
        return None
    written = {identity_of(target), identity_of(index_name(os.fsdecode(target)))}
    if written & {*map(identity_of, locations)}:
        return file.made_from  # the source is gone then, and what it was made from may still be there
    sources = [reader.handle.source for reader in file.readers]
    of_index = [None] * (len(locations) - len(sources))  # the index of shards is not open
    return origin_text(
        {
            _name_of(location): facts_of(location, file.call, source)
            for location, source in zip(locations, [*of_index, *sources])
        }
    )


def _folder_of(location: Any) -> Hashable:
    path = local_path(location)
    if path is not None:
        return os.path.realpath(os.path.dirname(os.path.abspath(path)))
    uri = identity_of(location)
    assert isinstance(uri, SplitURI)
    return uri._replace(path=posixpath.dirname(uri.path))


def _name_of(location: Any) -> str:
    identity = identity_of(location)
    return posixpath.basename(identity.path if isinstance(identity, SplitURI) else str(identity))


def _check_is_told_from_folders(target: Any) -> None:
    """Rejects a name like ``served``: the other files would go beside it, where a folder may be meant."""
    if is_path(target) and not format_of(target, None, default=""):
        raise ValueError(
            f"all_files: {shown_location(target)} does not end in .tensors or .safetensors; put / at the end to write "
            "into a folder of that name"
        )


def _open_contents(
    stack: contextlib.ExitStack,
    source: Any,
    call: CallOptions,
    skip_non_tensors: bool,
    to_format: str,
    verify: Verification,
) -> tuple[Contents, list[str], list[Any], Optional[OpenFile]]:
    """The tensors of a source, the names of values that are left out, the files that they come from, and the open file,
    if any."""
    if is_checkpoint(source, call):
        found, left_out, read = stack.enter_context(reader().contents(source, call, to_format))
        return found, left_out, read, None
    files = pickled_files(source)
    if files:
        if call.trust.public_keys:
            raise AuthenticationError(f"{os.fspath(source)}: not signed: a pickle holds no signature")
        check_pickled(files, verify)
        tensors, skipped = read_pickled(files, skip_non_tensors)
        return contents_of_tensors(tensors), skipped, [source, *files], None
    file = stack.enter_context(open_once(source, call, verify))
    stored = file.index.stores_hashes if verify.where_stored else bool(verify.stored)
    return contents_of_file(file, verify=stored), [], file.opened.locations, file


def _warn_of_signatures(file: OpenFile, source: Any) -> None:
    """Logs that the signature is lost: the file that is written is another one, without a signature."""
    signed = file.index.format == "tensors" and file.source is not None and bool(_C.embedded_signers(file.index))
    if signed or (is_path(source) and not isinstance(source, int) and has_signature_beside(source)):
        logger.warning("%s: the new file has no signatures: sign it again", file.source_name)

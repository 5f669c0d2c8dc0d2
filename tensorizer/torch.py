"""The functions that users of ``safetensors.torch`` know, over files of both formats, from anywhere.

``from safetensors.torch import load_file, save_file`` becomes ``from tensorizer.torch import load_file, save_file``.
They return a ``dict`` of plain tensors without a gradient, on the CPU unless you pass a device.
(:class:`tensorizer.TensorDeserializer` returns Parameters, on CUDA if there is a device.)
"""

from __future__ import annotations

import contextlib
import io
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional, Union

import torch

from tensorizer._files.contents import check_state_dict, module_contents, state_dict_contents, state_of
from tensorizer._files.write import WriteOptions, format_of, write_contents
from tensorizer._format.entries import FilterFuncType
from tensorizer._format.names import no_such_name
from tensorizer._io.call_options import CallOptions, Trust, says_dtype
from tensorizer._io.sources import lent
from tensorizer._load.compare import LoadReport, ModuleView
from tensorizer._load.digests import AUTO, verification
from tensorizer._load.modules import Fill, FillOptions
from tensorizer._load.open_file import ReadOptions, open_file
from tensorizer._load.parts import TensorSlice
from tensorizer._progress import ProgressArgument
from tensorizer._save.session import HASH_NAMES
from tensorizer._signing import PublicKeyArgument
from tensorizer._system.devices import DeviceArgument, target_device

__all__ = ["load", "load_file", "load_model", "safe_open", "save", "save_file", "save_model"]


@says_dtype
def load_file(
    filename: Any,
    device: DeviceArgument = "cpu",
    *,
    backend: Optional[str] = None,
    dtype: Optional[torch.dtype] = None,
    filter_func: Optional[FilterFuncType] = None,
    verify: Any = "auto",
    encryption: Any = None,
    mmap: Optional[bool] = False,
    num_readers: Optional[int] = None,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
    direct_io: Optional[str] = None,
) -> dict[str, Any]:
    """Loads all tensors of a ``.tensors`` or ``.safetensors`` file; the content decides which.

    Args:
        filename: A path, URI, descriptor, open file object (it stays open), a folder of shards or their index.
        device: Where the tensors go; the CPU by default.
        backend: As ``safetensors`` has it: ``"mmap"`` maps a local file that goes to the CPU unchanged; ``"pread"``
            and the default ``None`` read into new memory.
        dtype: Converts ``float16``, ``bfloat16``, ``float32`` and ``float64`` tensors to this dtype.
        filter_func: Loads only the tensors whose name it accepts.
        verify: The digests that the data are compared with, as for :func:`tensorizer.load_stream`. ``"auto"``, the
            default: those in a ``.tensors`` file. ``"hub"``: those that the hub states. A path or URI: those in a
            ``SHA256SUMS`` file or an OpenSSF signature. ``True``: those in the file; a ``.safetensors`` file has none,
            so it raises. ``False``: none.
        encryption: The key of an encrypted file.
        mmap: Makes tensors copy-on-write views of a local file instead of reading it. ``None`` does so if
            possible, as for :class:`tensorizer.TensorDeserializer`.
        num_readers: Upper bound for reading threads.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening a URI.
        public_key: Keys, one of which must have signed the file, as for :class:`tensorizer.TensorDeserializer`.
        require_authenticated: Whether the key or a signature must authenticate the file (docs/api/index.md).
        direct_io: Whether a local file is read past the page cache, as for
            :class:`tensorizer.TensorDeserializer`.

    Returns:
        Plain tensors by name, in the order of the file; aliases of one tensor are the same object. Names of
        tensors of a root module have no leading dot. Nested state dicts become nested dicts.

    Raises:
        FormatError: Not a file of tensors, or a damaged one.
        OSError: It cannot be opened or read.
        MissingHashError: `verify` needs a digest, and a tensor or file has none.
        HashMismatchError: Data disagree with their digest.
        CryptographyError: A key is missing or wrong, or was given for a file that is not encrypted.
        AuthenticationError: The file does not match its key or signature.

    Source: the semantics of ``safetensors.torch.load_file``; docs/safetensors.md says what differs.

    Examples:
        >>> tensors = tensorizer.load_file("model.tensors")
        >>> tensors["weight"].shape
        torch.Size([2, 4])
    """
    chosen = target_device("cpu" if device is None else device)
    trust = Trust.of(public_key, require_authenticated)
    call = CallOptions.to_read(encryption, stream_options, num_readers, progress, trust)
    options = ReadOptions(chosen, dtype, _maps(backend, mmap), direct_io=direct_io)
    options = options.verifying(AUTO if verify == "auto" else verification(verify, call))
    with open_file(lent(filename), call, options, filter_func) as file:
        return file.as_state_dict(file.read_whole())


def load(data: bytes, device: DeviceArgument = "cpu", **options: Any) -> dict[str, Any]:
    """Loads the tensors of a file that is in memory; arguments and errors as :func:`load_file`.

    Examples:
        >>> with open("model.tensors", "rb") as file:
        ...     content = file.read()
        >>> sorted(tensorizer.load(content))
        ['bias', 'weight']
    """
    return load_file(io.BytesIO(data), device, **options)


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: Any,
    metadata: Optional[Mapping[str, str]] = None,
    *,
    format: Optional[str] = None,
    ties: str = "once",
    encryption: Any = None,
    hashes: Union[str, Collection[str], None] = HASH_NAMES,
    max_shard_size: Union[str, int, None] = None,
    progress: ProgressArgument = False,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> None:
    """Writes tensors to one file, or to shards and their index.

    Tensors may be on any device, share memory, be views of larger storages, and need not be contiguous. A
    ``.safetensors`` file is the same, byte for byte, as that of the reference's writer.

    Args:
        tensors: By name.
        filename: A path, ``s3://`` URI or open binary file object (it stays open). A file appears when it is complete.
        metadata: Texts to store, in their order.
        format: ``"tensors"`` or ``"safetensors"``; ``None`` is ``"tensors"`` for a name that ends in ``.tensors``,
            otherwise ``"safetensors"``.
        ties: How to store a tensor with several names: ``"once"`` stores it once and records the other names,
            ``"twice"`` stores it under each name, ``"error"`` raises as ``safetensors`` does.
        encryption: Encrypts the file (``.tensors`` only).
        hashes: Digests to store (``.tensors`` only), as for :class:`tensorizer.TensorSerializer`.
        max_shard_size: Bytes, or a text like ``"5GB"``: writes several files beside the name `filename`, and then
            removes files of an earlier save of that name in another form (a single file, other shards, their index).
            ``None``, the default, writes one file and removes nothing. The name of several files ends in ``.tensors``
            or ``.safetensors``.
        progress: ``True`` shows a bar; a callable is told about bytes done.
        stream_options: Keywords for opening URIs.

    Raises:
        ValueError: `tensors` is not a mapping of names to dense tensors, or the format cannot hold something
            (:class:`UnsupportedContentError`); nothing was written.
        OSError: The target cannot be written.

    Examples:
        >>> tensorizer.save_file({"weight": torch.ones(4)}, "new.safetensors", metadata={"step": "10"})
    """
    contents = state_dict_contents(check_state_dict(tensors), metadata)
    options = WriteOptions(
        format=_format_of(filename, format),
        ties=ties,
        hashes=hashes,
        max_shard_size=max_shard_size,
    )
    write_contents(contents, lent(filename), options, CallOptions.to_write(encryption, stream_options, progress))


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Optional[Mapping[str, str]] = None,
    *,
    format: str = "safetensors",
    ties: str = "once",
    encryption: Any = None,
) -> bytes:
    """Returns the file that :func:`save_file` would write, as bytes; arguments and errors as there.

    Examples:
        >>> content = tensorizer.save({"weight": torch.ones(4)})
        >>> tensorizer.load(content)
        {'weight': tensor([1., 1., 1., 1.])}
    """
    memory = io.BytesIO()
    save_file(tensors, memory, metadata, format=format, ties=ties, encryption=encryption)
    return memory.getvalue()


def load_model(
    model: torch.nn.Module,
    filename: Any,
    strict: bool = True,
    device: DeviceArgument = None,
    *,
    assign: Union[bool, str] = "auto",
    ignore_mismatched_sizes: bool = False,
    backend: Optional[str] = None,
    dtype: Optional[torch.dtype] = None,
    verify: bool = False,
    encryption: Any = None,
    num_readers: Optional[int] = None,
    stream_options: Optional[Mapping[str, Any]] = None,
    public_key: PublicKeyArgument = None,
    require_authenticated: Optional[bool] = None,
) -> LoadReport:
    """Fills a model from a file, by the names of its state dict.

    Index and model are compared before a payload is read or a tensor changed. Tensors that the
    model shares stay shared. Models with hooks, extra state, or their own ``load_state_dict`` or
    ``_load_from_state_dict`` get a state dict, because such modules may rename or resize tensors.

    Args:
        model: The model; its parameters may be on the meta device.
        filename: As for :func:`load_file`.
        strict: Raises if names are missing or unexpected, or if names that the model ties have different contents.
        device: Where tensors are read to; ``None`` is the device of the model's tensor, and the CPU for one on meta.
        assign: ``False`` copies into the tensors of the model, which keep their dtype, device and identity; ``True``
            replaces them; ``"auto"`` replaces those on the meta device and copies into the others (or replaces all of a
            model that gets a state dict and has any on meta). Copying is not atomic: reading raises before it, but a
            device may fail in the middle.
        ignore_mismatched_sizes: Leaves tensors of another shape or kind as they are, and reports them.
        backend: As for :func:`load_file`.
        dtype: As for :func:`load_file`.
        verify: As for :func:`load_file`.
        encryption: The key of an encrypted file.
        num_readers: Upper bound for reading threads.
        stream_options: Keywords for opening a URI.
        public_key: Keys, of which one must have signed the file, as for :class:`tensorizer.TensorDeserializer`.
        require_authenticated: Whether the key or a signature must authenticate the file (docs/api/index.md).

    Returns:
        The report; ``missing, unexpected = load_model(…)`` works as with ``safetensors``.

    Raises:
        LoadError: Names, shapes or kinds do not match. The message is that of ``load_state_dict``; ``.report`` has the
            report. The model is as it was, unless it got a state dict and rejected it.
        NotImplementedError: `model` has DTensors, which :class:`tensorizer.distributed.TensorizerReader` fills. It is
            as it was.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> tensorizer.torch.load_model(model, "model.tensors")
        <LoadReport: 2 tensors, 40 bytes, of model.tensors into Linear: all names match>
    """
    if assign not in (True, False, "auto"):
        raise ValueError(f"assign: expected True, False or 'auto', got {assign!r}")
    view = ModuleView(model)
    chosen = target_device(view.device_of if device is None else device)
    trust = Trust.of(public_key, require_authenticated)
    call = CallOptions.to_read(encryption, stream_options, num_readers, trust=trust)
    options = ReadOptions(chosen, dtype, _maps(backend), verify or None)
    with open_file(lent(filename), call, options) as file:
        how = FillOptions(assign, ignores_sizes=ignore_mismatched_sizes)
        return Fill(view, file, file.flat_names(), how, strict).run()


def save_model(
    model: torch.nn.Module,
    filename: Any,
    metadata: Optional[Mapping[str, str]] = None,
    force_contiguous: bool = True,
    *,
    format: Optional[str] = None,
    include_non_persistent_buffers: bool = False,
    ties: str = "once",
    encryption: Any = None,
    stream_options: Optional[Mapping[str, Any]] = None,
) -> None:
    """Writes the state dict of a model. Stores shared tensors once and records their other names.

    Extra state (``get_extra_state``) is part of it: tensors in both formats, dictionaries of tensors in ``.tensors``.
    Any other extra state raises.

    Args:
        model: The model; never modified.
        filename: As for :func:`save_file`.
        metadata: Texts to store. In ``.safetensors`` each name that was left out is recorded as
            ``metadata[dropped] = kept``, where ``kept`` is the alphabetically first one.
        force_contiguous: Accepted, without effect: tensors need not be contiguous.
        format: As for :func:`save_file`.
        include_non_persistent_buffers: Writes also buffers that are not part of the state dict (``.tensors`` only).
        ties: As for :func:`save_file`.
        encryption: Encrypts the file (``.tensors`` only).
        stream_options: Keywords for opening a URI.

    Raises:
        ValueError: As for :func:`save_file`; extra state that the format cannot hold.
        OSError: The target cannot be written.

    Examples:
        >>> tensorizer.save_model(torch.nn.Linear(4, 2), "new.safetensors")
    """
    format = _format_of(filename, format)
    if format == "tensors" and ties != "error":
        contents = module_contents(model, metadata, include_non_persistent_buffers)
    else:
        state = state_of(model, include_non_persistent_buffers and format == "tensors")
        contents = state_dict_contents(check_state_dict(state), metadata)
    options = WriteOptions(format=format, ties=ties)
    write_contents(contents, lent(filename), options, CallOptions.to_write(encryption, stream_options))


class safe_open(AbstractContextManager["safe_open"]):
    """Opens a ``.tensors`` or ``.safetensors`` file for single tensors and parts of them, without reading a payload.

    Tensors of a ``.tensors`` file have the names that they would have in ``.safetensors``: those of a root module
    without their leading dot, those of nested containers with the steps of their path joined by dots.

    Args:
        filename: A path, URI, open binary file object (which stays open), a folder of shards or their index.
        framework: ``"pt"``, the only one here.
        device: Where tensors go; the CPU by default.
        backend: As for :func:`load_file`.
        encryption: The key of an encrypted file.
        stream_options: Keywords for opening a URI.
        public_key: Keys, of which one must have signed the file, as for :class:`tensorizer.TensorDeserializer`.
        require_authenticated: Whether the key or a signature must authenticate the file (docs/api/index.md).

    Raises:
        ValueError: Another framework.
        AuthenticationError: As for :class:`tensorizer.TensorDeserializer`.
        FormatError: Not a file of tensors, or two of them would have one name.
        OSError: It cannot be opened.

    Examples:
        >>> with tensorizer.safe_open("model.tensors", "pt") as file:
        ...     print(file.keys(), file.get_tensor("bias").shape)
        ['bias', 'weight'] torch.Size([2])
    """

    def __init__(
        self,
        filename: Any,
        framework: str = "pt",
        device: DeviceArgument = "cpu",
        *,
        backend: Optional[str] = None,
        encryption: Any = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        public_key: PublicKeyArgument = None,
        require_authenticated: Optional[bool] = None,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ValueError(f"framework: expected 'pt', got {framework!r}")
        options = ReadOptions(target_device(device), mmap=_maps(backend))
        trust = Trust.of(public_key, require_authenticated)
        self._file = open_file(lent(filename), CallOptions.to_read(encryption, stream_options, trust=trust), options)
        try:
            self._metadata = self._file.metadata()
            self._entries = self._file.flat_names()
            # For tensors with several names: the name under which each was returned last, and the tensor while alive.
            self._tied: dict[int, Optional[tuple[str, Callable[[], Optional[torch.Tensor]]]]]
            self._tied = dict.fromkeys(self._file.aliases.values())
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def metadata(self) -> Optional[dict[str, str]]:
        """The texts that are stored beside the tensors; ``None`` if the file has none.

        Examples:
            >>> with tensorizer.safe_open("model.tensors", "pt") as file:
            ...     print(file.metadata())
            None
        """
        return None if self._metadata is None else dict(self._metadata)

    def keys(self) -> list[str]:
        """The names of all tensors and aliases, sorted.

        Examples:
            >>> with tensorizer.safe_open("model.tensors", "pt") as file:
            ...     print(file.keys())
            ['bias', 'weight']
        """
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """The names of the stored tensors in the order of the file.

        Examples:
            >>> with tensorizer.safe_open("model.tensors", "pt") as file:
            ...     print(file.offset_keys())
            ['weight', 'bias']
        """
        aliases = self._file.aliases
        return [name for name, i in self._entries.items() if i not in aliases]

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor, read now. The file keeps none, but as long as you keep one, its aliases are that tensor.

        Raises:
            KeyError: The file has no tensor of that name.

        Examples:
            >>> with tensorizer.safe_open("model.tensors", "pt") as file:
            ...     print(file.get_tensor("bias").shape)
            torch.Size([2])
        """
        i = self._entry(name)
        record = self._file.aliases.get(i, i)
        if record not in self._tied:
            return self._file.read_one(record)
        given_as, given = self._tied[record] or (name, lambda: None)
        tensor = given() if given_as != name else None
        if tensor is None:
            tensor = self._file.read_one(record)
            self._tied[record] = name, weakref.ref(tensor)
        return tensor

    def get_tensors(self, names: Optional[Sequence[str]] = None) -> dict[str, torch.Tensor]:
        """Several tensors, ``None`` for all, by name; read together. Aliases of one tensor are the same object.

        Raises:
            KeyError: The file lacks one of the names.

        Examples:
            >>> with tensorizer.safe_open("model.tensors", "pt") as file:
            ...     print(sorted(file.get_tensors(["weight", "bias"])))
            ['bias', 'weight']
        """
        entries = {name: self._entry(name) for name in (self.keys() if names is None else names)}
        chosen = sorted(set(entries.values()))
        tensors = dict(zip(chosen, self._file.read_plain(chosen)))
        return {name: tensors[i] for name, i in entries.items()}

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts can be read: ``get_slice(name)[2:4]`` reads the rows it needs.

        Raises:
            KeyError: The file has no tensor of that name.

        Examples:
            >>> with tensorizer.safe_open("model.tensors", "pt") as file:
            ...     print(file.get_slice("weight")[0:1].shape)
            torch.Size([1, 4])
        """
        return TensorSlice(self._file, self._entry(name))

    def _entry(self, name: str) -> int:
        try:
            return self._entries[name]
        except KeyError:
            raise no_such_name(self._file.source_name, name, self._entries) from None


def _format_of(filename: Any, format: Optional[str]) -> str:
    """``.tensors`` if the name ends so, else ``.safetensors``: programs write ``model.safetensors.tmp`` first."""
    return format_of(filename, format, default="safetensors")


def _maps(backend: Optional[str], mmap: Optional[bool] = False) -> Optional[bool]:
    """What ``backend`` and ``mmap`` mean together: ``"mmap"`` maps where nothing speaks against it.

    Raises:
        ValueError: A backend that ``safetensors`` does not know; where it is installed, its ``SafetensorError`` too.
    """
    if backend in (None, "mmap", "pread"):
        return None if backend == "mmap" and not mmap else mmap
    kinds: tuple[type, ...] = (ValueError,)
    with contextlib.suppress(ImportError):
        from safetensors import SafetensorError

        kinds = (SafetensorError, ValueError)
    raise type("UnknownBackendError", kinds, {})(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')

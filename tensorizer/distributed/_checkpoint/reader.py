"""Loading: :class:`TensorizerReader`."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensorizer._encryption import DecryptionParams
from tensorizer._io.call_options import CallOptions, Trust
from tensorizer._io.model_files import may_be_folder
from tensorizer._io.uri import local_path, scheme_of
from tensorizer._keys import check_decryption
from tensorizer._load.digests import verification
from tensorizer._signing import PublicKeyArgument
from tensorizer._system.config import thread_limit
from tensorizer._system.devices import empty
from tensorizer._system.redaction import shown_location
from tensorizer.distributed._boxes import box_at, check_cover, check_described, slices_of
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, Saved, WantedBox, saved_parts
from tensorizer.distributed._checkpoint.folder import MARKER, Folder, Located, PathLike, is_data_file, marker_name
from tensorizer.distributed._checkpoint.json_values import load_vetted, torch_saved
from tensorizer.distributed._checkpoint.marker import ARRAYS, JSON, Stored, StoredParts, unpack_marker, written_by_torch
from tensorizer.distributed._checkpoint.model import ModelFiles, Seen, SeenFile, compare
from tensorizer.distributed._checkpoint.parts import about_name, put_together, same_parts, unsupported
from tensorizer.distributed._checkpoint.reading import Want
from tensorizer.errors import FormatError, StreamIsADirectoryError, StreamNotFoundError

DecryptionArgument = Union[DecryptionParams, Callable[[], DecryptionParams], None]


class TensorizerReader(Located, StorageReader):
    """Reads checkpoints and models for ``dcp.load(…, storage_reader=TensorizerReader(path))``.

    ``torch.distributed.checkpoint`` plans which parts each rank needs. Each rank reads only its parts, straight into
    the memory of its tensors if dtypes agree and that memory is contiguous. World size, mesh and placements may differ
    from those of the save. Objects in the cache on the node are read from there.

    Leaves of a checkpoint that are neither tensors nor simple values are read with ``torch.load(weights_only=True)``.
    If that rejects one, the load raises unless `allow_pickle` is set.

    Args:
        path: A checkpoint of :class:`TensorizerWriter` (a folder or an ``s3://`` prefix); a ``.tensors`` or
            ``.safetensors`` file; or a folder or index of the shards of a model. Models may be local, on ``s3://``,
            ``http(s)://``, ``hf://`` or any other scheme of :func:`tensorizer.stream_io.open_stream`. ``None`` takes
            the ``checkpoint_id`` of the load.
        verify_hash: Compares everything that is read with its digest, and digests of a checkpoint with its marker. It
            reads whole boxes or tensors, also if a part is enough.
        verify: The digests that the files of a model are compared with, as for :func:`tensorizer.load_stream`:
            ``"hub"``, a path or URI of a ``SHA256SUMS`` file or an OpenSSF signature, or ``"auto"``, those in
            ``.tensors`` files. Each rank then reads whole files. ``None`` leaves it to `verify_hash`.
        allow_pickle: Lets torch unpickle leaves that hold more than simple values: only for trusted checkpoints.
        encryption: The key of an encrypted checkpoint or file, or a function without arguments that returns it. It
            authenticates marker and files.
        num_readers: Upper bound for reading threads; ``None`` uses as many as are useful.
        stream_options: Keywords for opening URIs, as for :func:`tensorizer.stream_io.open_stream`.
        public_key: Keys, one of which must have signed every file of tensors (``tensorizer sign``), as for
            :class:`tensorizer.TensorDeserializer`. All data are then compared with their digests. Signatures do not
            cover the marker of a checkpoint, which says where each box is; the key of an encrypted checkpoint does.
        require_authenticated: Whether the key or a signature must authenticate each file (docs/api/index.md).

    Attributes:
        total_bytes_read: Bytes that came from storage since the reader was made.

    Raises:
        ValueError: An ``s3://`` URI without a bucket; `num_readers` below 1.
        TypeError: An argument of the wrong type.

    Examples:
        Fill a model from a file of its weights. Under FSDP2, every rank reads its shards only:

        >>> import torch, torch.distributed.checkpoint as dcp
        >>> from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
        >>> from tensorizer.distributed import TensorizerReader
        >>> from tensorizer.torch import save_file
        >>> model = torch.nn.Linear(4, 2)
        >>> save_file(torch.nn.Linear(4, 2).state_dict(), "model.safetensors")
        >>> state = get_model_state_dict(model)
        >>> dcp.load(state, storage_reader=TensorizerReader("model.safetensors"), no_dist=True)
        >>> set_model_state_dict(model, state)
        <All keys matched successfully>

    Source: docs/training.md, "Distributed checkpoints".
    """

    def __init__(
        self,
        path: Optional[PathLike] = None,
        *,
        verify_hash: bool = False,
        verify: Any = None,
        allow_pickle: bool = False,
        encryption: DecryptionArgument = None,
        num_readers: Optional[int] = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        public_key: PublicKeyArgument = None,
        require_authenticated: Optional[bool] = None,
    ) -> None:
        trust = Trust.of(public_key, require_authenticated)
        options = CallOptions.to_read(stream_options=stream_options, num_readers=num_readers, trust=trust)
        Located.__init__(self, path, options)
        if not callable(encryption):
            check_decryption(encryption)
        self._encryption = encryption
        thread_limit("num_readers", num_readers)
        self._verify = verify_hash or bool(trust.public_keys)
        self._checks = verification(verify, options)
        self._allow_pickle = allow_pickle
        self._load_id = str(uuid.uuid4())
        self._metadata: Optional[Metadata] = None
        self._model: Optional[ModelFiles] = None  # open from read_metadata() to read_data()
        self._seen: Optional[Seen] = None
        self._failure: Optional[Exception] = None  # the result of read_metadata() without a rank
        self.total_bytes_read = 0

    # ---- what torch calls, in its order -----------------------------------------------------------------------------

    def reset(self, checkpoint_id: Optional[PathLike] = None) -> None:
        """Begins a load, from `checkpoint_id` if you pass one."""
        self._begin(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._forget()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the content of the marker of a checkpoint, or of the index of a model.

        With ``rank=``, it reads the marker of one rank that saved without collectives. Torch keeps only the texts of
        these errors.

        Raises:
            FileNotFoundError: There is neither a complete checkpoint nor a model.
            FormatError: The marker or the model is damaged, or torch's own writers wrote the checkpoint.
            AuthenticationError: The marker or the file does not match the key or the signature.
            CryptographyError: The key is missing or wrong.
            OSError: It cannot be read.
        """
        rank = kwargs.get("rank")
        failure, self._failure = self._failure, None
        self._forget()
        try:
            found = self._checkpoint_metadata(rank) if self._may_be_folder() else None
            if found is not None and self._checks.files is not None:
                raise ValueError(f"verify: expected a model, got the checkpoint {self._shown()}")
            if found is None:
                if rank is not None:  # torch asks for a rank if the first call failed; that error says more
                    raise failure or _nothing_at(self._shown(), None)
                found = self._model_metadata()
        except Exception as error:
            self._failure = error
            raise
        if hasattr(found, "storage_meta"):
            found.storage_meta = self._storage_meta(load_id=self._load_id)
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps what :meth:`read_metadata` returned."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan with what tells the files that this rank sees from others."""
        return dataclasses.replace(plan, storage_data=self._seen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged.

        Raises:
            StreamError: Ranks see different files.
        """
        compare(self._shown(), [plan.storage_data for plan in plans])
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of this rank into the tensors that the planner names.

        Raises:
            FormatError: A file is damaged, or is not the one that was written.
            UnsupportedContentError: A tensor was saved by its parts, and the state dict has none of its class to fill.
            MissingHashError: With ``verify_hash``, a tensor has no digest, as in every ``.safetensors`` file.
            HashMismatchError: With ``verify_hash``, a box differs from what was written.
            pickle.UnpicklingError: A leaf holds more than simple values, without ``allow_pickle``.
            CryptographyError: The key is missing.
            AuthenticationError: A file differs from the one that the key and the marker authenticate.
            OSError: A file cannot be read.
        """
        if self._model is not None:
            try:
                self._read_model(plan, planner, self._model)
            finally:
                self._forget()
        else:
            files = CheckpointFiles(self._folder(), self._with_key(), verify=self._verify)
            try:
                with files:
                    self._read(plan, planner, files)
            finally:
                self.total_bytes_read += files.bytes_read
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _with_key(self) -> CallOptions:
        return self._options._replace(encryption=self._params())

    def _params(self) -> Optional[DecryptionParams]:
        params = self._encryption() if callable(self._encryption) else self._encryption
        check_decryption(params)
        return params

    # ---- what is there ----------------------------------------------------------------------------------------------

    @classmethod
    def _check(cls, path: PathLike) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"checkpoint: expected a path or URI, got {type(path).__name__}")
        if local_path(path) is not None or scheme_of(path) == "s3":
            Folder.at(path)

    def _shown(self) -> str:
        return str(shown_location(self._path))

    def _may_be_folder(self) -> bool:
        """Whether the path may be a checkpoint, so that looking for its marker is worth a request."""
        path = self._place()
        return local_path(path) is not None or (scheme_of(path) == "s3" and may_be_folder(str(path)))

    def _forget(self) -> None:
        """Closes the files of a model, and drops the metadata."""
        self._metadata = self._seen = None
        model, self._model = self._model, None
        if model is not None:
            self.total_bytes_read += model.bytes_read
            model.close()

    def _checkpoint_metadata(self, rank: Optional[int]) -> Optional[Metadata]:
        """The content of a marker; ``None`` if the folder has none."""
        folder = self._folder()
        name = marker_name(rank)

        def unpacked(content: bytes) -> tuple[Metadata, SeenFile]:
            self.total_bytes_read += len(content)
            marker = unpack_marker(content, folder.join(name), self._params(), self._options.trust.required)
            return marker.metadata, SeenFile(len(content), "", (hashlib.sha256(content).hexdigest(),))

        try:
            found, seen = folder.read(name, unpacked)
        except OSError as error:
            if not folder.is_absent(error):
                raise
            names = [] if folder.remote or not os.path.isdir(folder.where) else folder.names()
            if any(map(is_data_file, names)):  # a save has not ended, or each rank has its own marker
                raise
            if any(name.endswith(".distcp") for name in names):
                raise written_by_torch(folder.where) from None
            return None
        self._seen = {name: seen} if rank is None else None
        # The marker of one rank names only the boxes of that rank.
        for fqn, item in found.state_dict_metadata.items() if rank is None else ():
            if isinstance(item, TensorStorageMetadata):
                boxes = [box_at(chunk.offsets, chunk.sizes) for chunk in item.chunks if chunk.sizes.numel()]
                check_cover(fqn, item.size, boxes, folder.where)
        return found

    def _model_metadata(self) -> Metadata:
        """The metadata of a model from its index. Its files stay open for read_data()."""
        try:
            model = ModelFiles(self._place(), self._with_key(), verify=self._verify, checks=self._checks)
        except (FileNotFoundError, StreamIsADirectoryError) as error:
            raise _nothing_at(self._shown(), error) from error
        self._model, self._seen = model, model.seen
        return model.metadata()

    # ---- the items of a rank ----------------------------------------------------------------------------------------

    def _read(self, plan: LoadPlan, planner: LoadPlanner, files: CheckpointFiles) -> None:
        wanted: list[WantedBox] = []
        filled: list[tuple[ReadItem, torch.Tensor, Optional[Callable[[], None]]]] = []
        for item in plan.items:
            stored = self._stored(item.storage_index)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._leaf(item.storage_index.fqn, stored, files))
                continue
            target = self._target(item, planner)
            if stored.parts is None:
                want = self._wanted_box(item, stored, target.detach())
                wanted.append(want)
                filled.append((item, want.target, None))
            else:
                inner, end = self._wanted_parts(item, stored, stored.parts, target, planner, files)
                wanted += inner
                filled.append((item, target, end))
        files.read(wanted)
        for item, target, end in filled:
            if end is not None:
                end()
            planner.commit_tensor(item, target)

    def _read_model(self, plan: LoadPlan, planner: LoadPlanner, model: ModelFiles) -> None:
        wants: list[Want] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, model.leaf(name))
                continue
            target = self._target(item, planner)
            part = slices_of(box_at(item.storage_offsets, item.lengths))
            wants.append(model.want(name, part, target.detach()))
            filled.append((item, target))
        model.read(wants)
        for item, target in filled:
            planner.commit_tensor(item, target)

    def _stored(self, index: MetadataIndex) -> Stored:
        assert self._metadata is not None
        assert self._metadata.storage_data is not None
        found: Optional[Stored] = self._metadata.storage_data.get(index)
        if found is None:
            where = "" if index.offset is None else f" at {list(index.offset)}"
            raise FormatError(f"{self._folder().where}: the checkpoint has no data of {index.fqn!r}{where}")
        return found

    def _target(self, item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
        fqn = item.storage_index.fqn
        check_described(planner, item.dest_index.fqn, item.dest_index.offset)
        target = planner.resolve_tensor(item)
        if target.size() != torch.Size(item.lengths):
            raise ValueError(f"tensor {fqn!r}: expected memory of shape {list(item.lengths)}, got {list(target.shape)}")
        return target

    def _wanted_box(self, item: ReadItem, stored: Stored, target: torch.Tensor) -> WantedBox:
        assert self._metadata is not None
        fqn = item.storage_index.fqn
        saved_as = self._metadata.state_dict_metadata[fqn]
        assert isinstance(saved_as, TensorStorageMetadata)
        part = slices_of(box_at(item.storage_offsets, item.lengths))
        return WantedBox(Saved(fqn, stored, saved_as.properties.dtype), part, target)

    def _wanted_parts(
        self,
        item: ReadItem,
        stored: Stored,
        inner: StoredParts,
        target: torch.Tensor,
        planner: LoadPlanner,
        files: CheckpointFiles,
    ) -> tuple[list[WantedBox], Optional[Callable[[], None]]]:
        """The inner tensors of a box that is made of others: into those of the target where they are alike, else into
        new ones, of which the class of the target then makes what is copied into it."""
        fqn = item.storage_index.fqn
        about = inner.about
        text = files.read_bytes(about_name(fqn), about) if about.text is None else about.text
        alike = same_parts(fqn, text, [part.path for part in inner.parts], target)
        saved = saved_parts(fqn, inner)
        described = [(one.dtype, one.stored.shape) for one in saved]
        look_up = getattr(planner, "lookup_tensor", None)
        is_whole = (
            stored.shape == tuple(item.lengths)
            and look_up is not None
            and look_up(item.dest_index).shape == target.shape  # else the target is a part of a tensor, perhaps a copy
        )
        if is_whole and alike is not None and [(t.dtype, tuple(t.shape)) for _, t in alike] == described:
            return [_whole(one, tensor) for one, (_, tensor) in zip(saved, alike)], None
        fresh = [empty(shape, dtype=dtype, device=target.device) for dtype, shape in described]

        def end() -> None:
            made = put_together(fqn, text, target, fresh)
            with torch.no_grad(), unsupported(fqn, target):
                for dim, (begin, size) in enumerate(zip(item.storage_offsets, item.lengths)):
                    if size != stored.shape[dim]:
                        made = made.narrow(dim, begin, size)
                target.copy_(made)

        return [_whole(one, tensor) for one, tensor in zip(saved, fresh)], end

    def _leaf(self, fqn: str, stored: Stored, files: CheckpointFiles) -> io.BytesIO:
        """Encodes a leaf with ``torch.save``, from a value that was found harmless."""
        if stored.kind in (JSON, ARRAYS):
            return torch_saved(files.read_value(fqn, stored))
        data = io.BytesIO(files.read_bytes(fqn, stored))
        return data if self._allow_pickle else torch_saved(load_vetted(fqn, data))


def _nothing_at(where: str, error: Optional[OSError]) -> StreamNotFoundError:
    """The error for a path without a marker or a model."""
    found = StreamNotFoundError(
        f"{where}: expected a checkpoint (a folder with {MARKER}), a .tensors or .safetensors file, or the shards of a "
        f"model, got none of them{'' if error is None else f': {error}'}"
    )
    found.source = where
    return found


def _whole(saved: Saved, target: torch.Tensor) -> WantedBox:
    return WantedBox(saved, tuple(slice(0, size) for size in saved.stored.shape), target)

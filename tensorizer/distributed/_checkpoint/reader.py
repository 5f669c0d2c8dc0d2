"""Loading: :class:`TensorizerReader`."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensorizer._io.access import Access, Trust
from tensorizer._keys import check_decryption
from tensorizer._system.checks import thread_limit
from tensorizer._system.devices import empty
from tensorizer.distributed._boxes import box_at, check_cover, check_described, slices_of
from tensorizer.distributed._checkpoint.boxes import CheckpointFiles, Saved, WantedBox, saved_parts
from tensorizer.distributed._checkpoint.folder import Located, PathLike, marker_name
from tensorizer.distributed._checkpoint.json_values import load_vetted, torch_saved
from tensorizer.distributed._checkpoint.marker import ARRAYS, JSON, Stored, StoredParts, unpack_marker
from tensorizer.distributed._checkpoint.parts import about_name, put_together, same_parts, unsupported
from tensorizer.encryption import DecryptionParams
from tensorizer.errors import FormatError
from tensorizer.signing import PublicKeyArgument

DecryptionArgument = Union[DecryptionParams, Callable[[], DecryptionParams], None]


class TensorizerReader(Located, StorageReader):
    """Reads checkpoints of :class:`TensorizerWriter` for ``dcp.load(…, storage_reader=TensorizerReader(path))``.

    Each rank reads only what its plan needs, straight into the memory of its tensors if dtypes agree and
    that memory is contiguous. World size, mesh and placements may differ from those of the save.

    Leaves that are neither tensors nor simple values are read with ``torch.load(weights_only=True)``. If that rejects
    one, the load raises unless `allow_pickle` is set.

    Args:
        path: The checkpoint: a folder or an ``s3://`` prefix; ``None`` takes the ``checkpoint_id`` of the load.
        verify_hash: Compares every box that is read with its digest, and the digest with the marker. It reads whole
            boxes, also if a part is enough.
        allow_pickle: Lets torch unpickle leaves that hold more than simple values: only for trusted checkpoints.
        encryption: The key of an encrypted checkpoint, or a function without arguments that returns it. It
            authenticates marker and files.
        threads: Upper bound for reading threads; ``None`` uses as many as are useful.
        stream_options: Keywords for opening ``s3://`` URIs, as for :func:`tensorizer.stream_io.open_stream`.
        public_key: Who has to have signed every file of tensors (``tensorizer sign``), as for
            :class:`tensorizer.TensorDeserializer`; boxes are then compared with their digests. Signatures do not cover
            the marker, which says where each box is; the key of an encrypted checkpoint does.
        require_authenticated: Rejects checkpoints that the key does not vouch for; ``None`` takes the value of
            ``TENSORIZER_REQUIRE_AUTHENTICATED``.

    Attributes:
        total_bytes_read: Bytes that came from storage since the reader was made.

    Raises:
        ValueError: Another scheme than ``s3``, or no bucket; `threads` below 1.
        TypeError: An argument of the wrong type.

    Source: docs/training.md, "Distributed checkpoints".
    """

    def __init__(
        self,
        path: Optional[PathLike] = None,
        *,
        verify_hash: bool = False,
        allow_pickle: bool = False,
        encryption: DecryptionArgument = None,
        threads: Optional[int] = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        public_key: PublicKeyArgument = None,
        require_authenticated: Optional[bool] = None,
    ) -> None:
        Located.__init__(self, path, stream_options)
        if not callable(encryption):
            check_decryption(encryption)
        self._encryption = encryption
        self._trust = Trust.of(public_key, require_authenticated)
        thread_limit("threads", threads)
        self._threads = threads
        self._verify = verify_hash or bool(self._trust.public_keys)
        self._allow_pickle = allow_pickle
        self._load_id = str(uuid.uuid4())
        self._metadata: Optional[Metadata] = None
        self.total_bytes_read = 0

    # ---- what torch calls, in its order -----------------------------------------------------------------------------

    def reset(self, checkpoint_id: Optional[PathLike] = None) -> None:
        """Begins a load, from `checkpoint_id` if you pass one."""
        self._move_to(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the content of the marker: of all ranks, or with ``rank=`` of one that saved without collectives.

        Raises:
            FileNotFoundError: There is no complete checkpoint.
            FormatError: The marker is damaged, or another program wrote it.
            AuthenticationError: The marker differs from what the key vouches for.
        """
        folder = self._folder()
        name = marker_name(kwargs.get("rank"))

        def unpacked(content: bytes) -> Metadata:
            self.total_bytes_read += len(content)
            return unpack_marker(content, folder.join(name), self._params(), self._trust.required).metadata

        found = folder.read(name, unpacked)
        # The marker of one rank alone names its own boxes.
        for fqn, item in found.state_dict_metadata.items() if kwargs.get("rank") is None else ():
            if isinstance(item, TensorStorageMetadata):
                boxes = [box_at(chunk.offsets, chunk.sizes) for chunk in item.chunks if chunk.sizes.numel()]
                check_cover(fqn, item.size, boxes, folder.where)
        if hasattr(found, "storage_meta"):
            found.storage_meta = self._storage_meta(load_id=self._load_id)
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keeps what :meth:`read_metadata` returned."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of this rank into the tensors that the planner names.

        Raises:
            FormatError: A file is damaged, or is not the one that was written.
            UnsupportedContentError: A tensor was saved by its parts, and the state dict has none of its class to fill.
            HashMismatchError: With ``verify_hash``, a box differs from what was written.
            pickle.UnpicklingError: A leaf holds more than simple values, without ``allow_pickle``.
            CryptographyError: The key is missing.
            AuthenticationError: A file differs from what the key and the marker vouch for.
            OSError: A file cannot be read.
        """
        access = Access(self._params(), num_readers=self._threads, trust=self._trust)
        files = CheckpointFiles(self._folder(), access, verify=self._verify)
        try:
            with files:
                self._read(plan, planner, files)
        finally:
            self.total_bytes_read += files.bytes_read
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _params(self) -> Optional[DecryptionParams]:
        params = self._encryption() if callable(self._encryption) else self._encryption
        check_decryption(params)
        return params

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
            and look_up(item.dest_index).shape == target.shape  # else it is a part of a tensor, perhaps a copy
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
        """A leaf as bytes of ``torch.save`` that were made here, from a value that was found harmless."""
        if stored.kind in (JSON, ARRAYS):
            return torch_saved(files.read_value(fqn, stored))
        data = io.BytesIO(files.read_bytes(fqn, stored))
        return data if self._allow_pickle else torch_saved(load_vetted(fqn, data))


def _whole(saved: Saved, target: torch.Tensor) -> WantedBox:
    return WantedBox(saved, tuple(slice(0, size) for size in saved.stored.shape), target)

"""What a contender is: a library that can do some of the things that the cases measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

State = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class HttpPlace:
    """An object of an HTTP server.

    Attributes:
        url: Where it is.
        connections: How many those open who have to be told.
    """

    url: str
    connections: int


@dataclass(frozen=True)
class S3Place:
    """An object of a store that speaks S3 over plain HTTP, and what it takes to get there."""

    uri: str
    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)

    @property
    def bucket(self) -> str:
        """The URI's first part."""
        return self.uri.split("/")[2]

    @property
    def key(self) -> str:
        """The rest of it."""
        return self.uri.split("/", 3)[3]


class Contender:
    """One library under measurement.

    Subclasses define the methods they can do; a case runs on every contender that has the method it needs. Nothing
    but the standard library is imported at module level: the runner reads these classes in its own environment, the
    methods run in the contender's.

    Attributes:
        name: Short and unique, for the command line and JSON.
        label: For tables and charts.
        suffix: File name suffix of its format.
        packages: Requirements of its own virtual environment; empty where the project's environment serves.
        role: ``"ours"``, ``"variant"`` (this project, set in another way), ``"reference"``, ``"other"`` or ``"limit"``.
        shares: Name of the contender whose file and environment it uses; empty where it has its own.
        makes_tensors: False where it brings bytes alone, which nobody can check then.
        cannot_write: Data sets that its own writer refuses; it reads the file that this project writes then.
        wheel: Its environment has this project's wheel, and borrows everything else from the project's own.
        by_name_only: Takes part only where the command line names it.
    """

    name: str
    label: str
    suffix: str = ""
    packages: tuple[str, ...] = ()
    role: str = "other"
    shares: str = ""
    makes_tensors: bool = True
    cannot_write: tuple[str, ...] = ()
    wheel: bool = False
    by_name_only: bool = False

    @property
    def owner(self) -> str:
        """Name of the contender whose file and environment this one uses."""
        return self.shares or self.name

    def import_library(self) -> None:
        """Import everything that a measurement should not pay for."""
        raise NotImplementedError

    def version(self) -> str:
        """The version that is measured."""
        raise NotImplementedError

    def file_name(self, variant: str = "") -> str:
        """Name of its file of a model, within the model's folder; a ``variant`` is made by ``prepare_<variant>``."""
        return f"{self.owner}{variant and '-' + variant}{self.suffix}"

    # What cases may ask for; each contender defines what it can do.

    import_time: bool = False
    """True where the import itself is worth a measurement."""

    def prepare(self, state: State, path: Path) -> None:
        """Write the file that the load cases read."""
        raise NotImplementedError

    def prepare_encrypted(self, state: State, path: Path) -> None:
        """As :meth:`prepare`, encrypted with ``benchmarks.models.KEY``."""
        raise NotImplementedError

    def prepare_crc32(self, state: State, path: Path) -> None:
        """As :meth:`prepare`, with CRC-32 as the only digest."""
        raise NotImplementedError

    def prepare_sha256(self, state: State, path: Path) -> None:
        """As :meth:`prepare`, with SHA-256 as the only digest."""
        raise NotImplementedError

    def load(self, path: Path) -> State:
        """All tensors, in memory of their own."""
        raise NotImplementedError

    def load_direct(self, path: Path) -> State:
        """As :meth:`load`, with ``O_DIRECT``."""
        raise NotImplementedError

    def load_buffered(self, path: Path) -> State:
        """As :meth:`load`, through the page cache."""
        raise NotImplementedError

    def load_mapped(self, path: Path) -> State:
        """All tensors, as views of the file."""
        raise NotImplementedError

    def load_verified(self, path: Path) -> State:
        """As :meth:`load`, checking every stored digest."""
        raise NotImplementedError

    def stream(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors one after the other; a tensor may be gone when the next one is asked for."""
        raise NotImplementedError

    def stream_http(self, place: HttpPlace) -> Iterator[tuple[str, torch.Tensor]]:
        """The same from an HTTP server."""
        raise NotImplementedError

    def load_one(self, path: Path, name: str) -> State:
        """A single tensor out of the file."""
        raise NotImplementedError

    def save(self, state: State, path: Path, *, sync: bool = False) -> None:
        """As users call it by default; with ``sync`` the bytes are on the device when it returns."""
        raise NotImplementedError

    def save_crc32(self, state: State, path: Path, *, sync: bool = False) -> None:
        """With CRC32 alone; for those who know no digest, without any."""
        raise NotImplementedError

    def load_encrypted(self, path: Path) -> State:
        """All tensors of an encrypted file, in memory of their own."""
        raise NotImplementedError

    def load_encrypted_on(self, path: Path, threads: int = 1) -> State:
        """As :meth:`load_encrypted` with so many threads."""
        raise NotImplementedError

    def save_encrypted(self, state: State, path: Path, *, sync: bool = False) -> None:
        """Encrypted with ``benchmarks.models.KEY``, with the SHA-256 that the format stores."""
        raise NotImplementedError

    def load_gpu(self, path: Path) -> State:
        """All tensors on the first CUDA device."""
        raise NotImplementedError

    def load_gpu_encrypted(self, path: Path) -> State:
        """As :meth:`load_gpu` of an encrypted file, decrypted by the host."""
        raise NotImplementedError

    def load_gpu_decrypting(self, path: Path) -> State:
        """As :meth:`load_gpu` of an encrypted file, decrypted by the device."""
        raise NotImplementedError

    def load_gpu_verified(self, path: Path) -> State:
        """As :meth:`load_gpu`, checking every stored digest."""
        raise NotImplementedError

    def load_gpu_float32(self, path: Path) -> State:
        """As :meth:`load_gpu`, as ``torch.float32``."""
        raise NotImplementedError

    def load_gpu_http(self, place: HttpPlace) -> State:
        """As :meth:`load_gpu`, of a remote file."""
        raise NotImplementedError

    def save_gpu(self, state: State, path: Path) -> None:
        """Tensors on the first CUDA device, as users save them by default."""
        raise NotImplementedError

    def save_gpu_encrypted(self, state: State, path: Path) -> None:
        """As :meth:`save_encrypted`, of tensors on the first CUDA device."""
        raise NotImplementedError

    def load_http(self, place: HttpPlace) -> State:
        """All tensors of a remote file, in memory of their own."""
        raise NotImplementedError

    def open_http(self, place: HttpPlace) -> int:
        """Read the index of a remote file and nothing else; returns the number of tensors."""
        raise NotImplementedError

    def load_s3(self, place: S3Place) -> State:
        """All tensors of an object, in memory of their own."""
        raise NotImplementedError

    def upload_s3(self, state: State, finished: Path, place: S3Place) -> None:
        """Make ``place`` hold the state; who only sends files sends the ``finished`` one of that state."""
        raise NotImplementedError

    def load_redis(self, uri: str) -> State:
        """All tensors that ``to_redis`` has stored below the URI's prefix."""
        raise NotImplementedError

    def convert(self, source: Path, target: Path) -> None:
        """Its own file as one of this project's, on the device when it returns; digests made, nothing read back."""
        raise NotImplementedError

    def convert_checked(self, source: Path, target: Path) -> None:
        """As :meth:`convert`; what was written is read back and compared."""
        raise NotImplementedError

    def from_pretrained(self, folder: Path) -> torch.nn.Module:
        """A model of ``transformers``, ready for use, from a folder with ``config.json`` and its own file."""
        raise NotImplementedError

    def dcp_writer(self, path: Path) -> Any:
        """A storage writer for ``torch.distributed.checkpoint.save``, as users make it."""
        raise NotImplementedError

    def dcp_reader(self, path: Path) -> Any:
        """A storage reader for what the writer wrote."""
        raise NotImplementedError

    def dcp_model_reader(self, path: Path) -> Any:
        """A storage reader for a folder of ``.safetensors`` shards with their index."""
        raise NotImplementedError

    def can(self, what: str) -> bool:
        """Whether this contender offers the method or fact ``what``."""
        own = getattr(type(self), what)
        return own is True or own is not getattr(Contender, what)


__all__ = ["Contender", "HttpPlace", "S3Place", "State"]

"""A file that is open for single tensors and parts of them, as ``safetensors.safe_open`` opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch

from tensorizer._files.names import flat_names
from tensorizer._io.access import Access, Trust
from tensorizer._io.sources import lent
from tensorizer._load.arguments import DeviceArgument, maps, target_device
from tensorizer._load.open_file import open_file
from tensorizer._load.parts import TensorSlice
from tensorizer._load.reader import ReadOptions
from tensorizer.signing import PublicKeyArgument

__all__ = ["safe_open"]


class safe_open(AbstractContextManager["safe_open"]):
    """Opens a ``.tensors`` or ``.safetensors`` file without reading a payload.

    Tensors of a ``.tensors`` file have the names that they would have in ``.safetensors``: those of a root module
    without their leading dot, those of nested containers with the steps of their path joined by dots.

    Args:
        filename: A path, URI, open binary file object (which stays open), a folder of shards or their index.
        framework: ``"pt"``, the only one here.
        device: Where tensors go; the CPU by default.
        backend: As for :func:`tensorizer.torch.load_file`.
        encryption: The key of an encrypted file.
        stream_options: Keywords for opening a URI.
        public_key: Keys, of which one must have signed the file, as for :class:`tensorizer.TensorDeserializer`.
        signature: The signature, likewise.
        require_authenticated: Whether the key or a signature must vouch for the file, likewise.

    Raises:
        ValueError: Another framework.
        AuthenticationError: As for :class:`tensorizer.TensorDeserializer`.
        FormatError: Not a file of tensors, or two of them would have one name.
        OSError: It cannot be opened.
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
        signature: Any = None,
        require_authenticated: Optional[bool] = None,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ValueError(f"framework: wanted 'pt', found {framework!r}")
        options = ReadOptions(target_device(device), mmap=maps(backend))
        trust = Trust.of(public_key, signature, require_authenticated)
        self._file = open_file(lent(filename), Access.to_read(encryption, stream_options, trust=trust), options)
        try:
            self._metadata = self._file.metadata()
            self._entries = flat_names(self._file)
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def metadata(self) -> Optional[dict[str, str]]:
        """The texts that are stored beside the tensors; ``None`` where the file has no such part."""
        return None if self._metadata is None else dict(self._metadata)

    def keys(self) -> list[str]:
        """The names of all tensors and aliases, sorted."""
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        """The names of the stored tensors in the order of the file."""
        aliases = self._file.targets
        return [name for name, i in self._entries.items() if i not in aliases]

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor, read now.

        Raises:
            KeyError: There is none of that name.
        """
        return self._file.load_one(self._entries[name]).detach()

    def get_tensors(self, names: Optional[Sequence[str]] = None) -> dict[str, torch.Tensor]:
        """Several tensors, ``None`` for all, by name."""
        return {name: self.get_tensor(name) for name in (self.keys() if names is None else names)}

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts can be read: ``get_slice(name)[2:4]`` reads the rows it needs.

        Raises:
            KeyError: There is none of that name.
        """
        return TensorSlice(self._file, self._entries[name])

"""A file that is open for single tensors and parts of them, as ``safetensors.safe_open`` opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch

from tensorizer._files.names import flat_names
from tensorizer._io.sources import is_path, lent
from tensorizer._io.uri import LOCAL_SCHEMES, scheme_of
from tensorizer._load.device_choice import DeviceArgument, as_device
from tensorizer._load.slices import TensorSlice
from tensorizer.deserializer import TensorDeserializer
from tensorizer.signing import PublicKeyArgument

__all__ = ["safe_open"]


def maps(backend: Optional[str], filename: Any, device: Any, dtype: Optional[torch.dtype], encryption: Any) -> bool:
    """Whether `backend` asks for a mapping, and the file can be mapped: a local one that goes to the CPU as it is.

    Raises:
        ValueError: A backend that ``safetensors`` does not know; where it is installed, its ``SafetensorError`` too.
    """
    if backend not in (None, "mmap", "pread"):
        raise _unknown_backend(backend)
    if backend != "mmap" or dtype is not None or encryption is not None:
        return False
    is_local = is_path(filename) and (isinstance(filename, int) or scheme_of(filename) in (None, *LOCAL_SCHEMES))
    if not is_local or callable(device) or isinstance(device, Mapping):
        return False
    return as_device(device).type == "cpu"


def _unknown_backend(backend: object) -> ValueError:
    """What ``safetensors`` raises, where it is installed, and a ``ValueError`` in any case."""
    kinds: tuple[type, ...] = (ValueError,)
    try:
        from safetensors import SafetensorError

        kinds = (SafetensorError, ValueError)
    except ImportError:
        pass
    kind = type("UnknownBackendError", kinds, {})
    error: ValueError = kind(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
    return error


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
        public_key: Who has to have signed the file, as for :class:`tensorizer.TensorDeserializer`.
        signature: Where the signature is, likewise.
        require_authenticated: Whether the key or a signature has to vouch for the file, likewise.

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
        self._file = TensorDeserializer(
            lent(filename),
            device,
            lazy_load=True,
            mmap=maps(backend, filename, device, None, encryption),
            encryption=encryption,
            stream_options=stream_options,
            public_key=public_key,
            signature=signature,
            require_authenticated=require_authenticated,
        )
        try:
            self._metadata = self._file._container.metadata()
            self._entries = flat_names(self._file._container)
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
        aliases = self._file._container.targets
        return [name for name, i in self._entries.items() if i not in aliases]

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor, read now.

        Raises:
            KeyError: There is none of that name.
        """
        return self._file._loaded.load_one(self._entries[name]).detach()

    def get_tensors(self, names: Optional[Sequence[str]] = None) -> dict[str, torch.Tensor]:
        """Several tensors, ``None`` for all, by name."""
        return {name: self.get_tensor(name) for name in (self.keys() if names is None else names)}

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts can be read: ``get_slice(name)[2:4]`` reads the rows it needs.

        Raises:
            KeyError: There is none of that name.
        """
        return self._file.get_slice(self._file._container.names[self._entries[name]])

"""A file that is open for single tensors and parts of them, as ``safetensors.safe_open`` opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch

from tensorizer._load.device_choice import DeviceArgument
from tensorizer._load.slices import TensorSlice
from tensorizer.deserializer import TensorDeserializer

__all__ = ["safe_open"]


class safe_open(AbstractContextManager["safe_open"]):
    """Opens a ``.tensors`` or ``.safetensors`` file without reading a payload.

    Args:
        source: A path, URI, open binary file object, a folder of shards or their index.
        framework: ``"pt"``, the only one here.
        device: Where tensors go; the CPU by default.
        encryption: The key of an encrypted file.
        stream_options: Keywords for opening a URI.

    Raises:
        ValueError: Another framework.
        FormatError: Not a file of tensors.
        OSError: It cannot be opened.
    """

    def __init__(
        self,
        source: Any,
        framework: str = "pt",
        device: DeviceArgument = "cpu",
        *,
        encryption: Any = None,
        stream_options: Optional[Mapping[str, Any]] = None,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise ValueError(f"framework: wanted 'pt', found {framework!r}")
        self._file = TensorDeserializer(
            source, device, lazy_load=True, encryption=encryption, stream_options=stream_options
        )
        self._metadata = self._file.metadata
        self._kept = {str(alias): str(kept) for alias, kept in self._file.ties.items()}

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def metadata(self) -> Optional[dict[str, str]]:
        """The texts that are stored beside the tensors; ``None`` where there are none."""
        return dict(self._metadata) if self._metadata else None

    def keys(self) -> list[str]:
        """The names of all tensors and aliases, sorted."""
        return sorted({*map(str, self._file.keys()), *self._kept})

    def offset_keys(self) -> list[str]:
        """The names of the stored tensors in the order of the file."""
        return [str(name) for name in self._file if name not in self._kept]

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor, read now.

        Raises:
            KeyError: There is none of that name.
        """
        tensor: torch.Tensor = self._file[self._kept.get(name, name)]
        return tensor.detach()

    def get_tensors(self, names: Optional[Sequence[str]] = None) -> dict[str, torch.Tensor]:
        """Several tensors, ``None`` for all, by name."""
        return {name: self.get_tensor(name) for name in (self.keys() if names is None else names)}

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor of which parts can be read: ``get_slice(name)[2:4]`` reads the rows it needs.

        Raises:
            KeyError: There is none of that name.
        """
        return self._file.get_slice(name)

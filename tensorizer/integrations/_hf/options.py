"""What a load was asked for, as it is handed from one module to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch

from tensorizer._load.device_choice import as_device

__all__ = ["LoadOptions", "device_of"]


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The arguments of ``from_pretrained`` that concern one model."""

    dtype: Union[torch.dtype, str, None] = "auto"
    device: Union[torch.device, str, None] = None
    device_map: Any = None
    quantization_config: Any = None
    config: Any = None
    model_class: Any = None
    strict: bool = True
    verify: bool = False
    encryption: Any = None
    public_key: Any = None
    require_authenticated: Optional[bool] = None
    variant: Optional[str] = None
    allow_pickle: bool = False
    allow_plaintext_temp: bool = False
    mmap: Optional[bool] = None
    model_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def replace(self, **changes: Any) -> LoadOptions:
        return dataclasses.replace(self, **changes)


def device_of(options: LoadOptions) -> torch.device:
    """The one device of a load without a device map: the CPU unless another was named, as the libraries do."""
    return as_device(options.device)

"""Says so when something that stores its content on ``close()`` is never closed."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from typing import Any

__all__ = ["tell_if_unclosed"]

logger = logging.getLogger("tensorizer.stream_io")


def tell_if_unclosed(owner: object, name: str) -> weakref.finalize[Any, Any]:
    """Watches `owner` until it is collected or the interpreter ends.

    Args:
        owner: What has to be closed; its ``close()`` calls ``detach()`` of the result.
        name: The object in the store, for a ``ResourceWarning`` and a line in the log.
    """
    return weakref.finalize(owner, _tell, name, os.getpid())


def _tell(name: str, process: int) -> None:
    if os.getpid() != process:  # a copy of a fork; the upload is the parent's
        return
    text = f"{name}: nothing was stored, because the serializer was not closed; call close(), or use a with block"
    logger.warning("%s", text)
    warnings.warn(text, ResourceWarning, stacklevel=2)

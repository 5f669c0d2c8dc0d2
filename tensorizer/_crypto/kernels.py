"""Whether encryption works here, and with which kernel.

``TENSORIZER_CRYPTO_KERNEL`` (unset: the fastest for this processor) is read when the first key of the process is made.
"""

from __future__ import annotations

from tensorizer import _C
from tensorizer._system.config import env_text
from tensorizer.errors import CryptographyError

__all__ = ["CryptographyError", "available", "require_crypto"]

#: True where libsodium could be started. It is linked in, so False means a system without a source of randomness.
available: bool = _C.sodium_available()

_kernel_chosen = False


def require_crypto() -> None:
    """Prepares for encryption or decryption. Cheap after the first call.

    Raises:
        RuntimeError: libsodium cannot be used.
        ValueError: ``TENSORIZER_CRYPTO_KERNEL`` names no kernel that this processor can run.
    """
    global _kernel_chosen
    if not available:
        raise RuntimeError(
            "encryption is unavailable: libsodium could not be started on this system; "
            "install a working libsodium (for example 'apt-get install libsodium23') and restart"
        )
    if not _kernel_chosen:
        _choose_kernel()
        _kernel_chosen = True


def _choose_kernel() -> None:
    name = env_text("TENSORIZER_CRYPTO_KERNEL")
    if name is not None and not _C.select_kernel(name):
        usable = ", ".join(_C.available_kernels())
        raise ValueError(f"environment variable TENSORIZER_CRYPTO_KERNEL: found {name!r}, usable here: {usable}")

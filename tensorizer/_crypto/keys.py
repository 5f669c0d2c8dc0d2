"""From the public key parameters to what the extension decrypts and encrypts with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, cast

from tensorizer import _C

if TYPE_CHECKING:
    from tensorizer.encryption import DecryptionParams, EncryptionParams

__all__ = ["check_decryption", "check_encryption", "encryption_key", "key_ring"]


def check_decryption(params: object) -> None:
    """Refuses anything but usable ``DecryptionParams`` or ``None``.

    Raises:
        TypeError: Another type.
        ValueError: Parameters without key and passphrase.
    """
    if params is None:
        return
    from tensorizer.encryption import DecryptionParams

    if not isinstance(params, DecryptionParams):
        raise TypeError(f"encryption: wanted DecryptionParams, found {type(params).__name__}")
    if params._secret() is None and params.source is None:
        raise ValueError("encryption: these DecryptionParams hold neither a key nor a passphrase")


def check_encryption(params: object) -> None:
    """Refuses anything but ``EncryptionParams`` or ``None``.

    Raises:
        TypeError: Another type.
    """
    if params is None:
        return
    from tensorizer.encryption import EncryptionParams

    if not isinstance(params, EncryptionParams):
        raise TypeError(f"encryption: wanted EncryptionParams, found {type(params).__name__}")


def key_ring(params: Optional[DecryptionParams]) -> Optional[_C.KeyRing]:
    """The keys of a load."""
    if params is None:
        return None
    secret = params._secret()
    if secret is not None:
        return _C.KeyRing(secret)
    source = cast(bytes, params.source)  # check_decryption has refused parameters with neither
    return _C.KeyRing(source, params.max_opslimit, params.max_memlimit, params.max_derivations)


def encryption_key(
    params: Optional[EncryptionParams],
) -> tuple[Optional[_C.SecretKey], Optional[tuple[int, int, bytes]]]:
    """The key of a save, and (opslimit, memlimit, salt) where it came from a passphrase."""
    if params is None:
        return None, None
    return params._secret(), params.derivation

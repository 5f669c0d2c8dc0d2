"""Converts the public key parameters into the arguments with which the extension encrypts and decrypts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Optional, cast

from tensorizer import _C

if TYPE_CHECKING:
    from tensorizer._encryption import DecryptionParams, EncryptionParams


def check_decryption(params: object) -> None:
    """Refuses anything but usable ``DecryptionParams`` or ``None``.

    Raises:
        TypeError: Another type.
        ValueError: Parameters without key and passphrase.
    """
    if params is None:
        return
    from tensorizer._encryption import DecryptionParams

    if not isinstance(params, DecryptionParams):
        raise TypeError(f"encryption: expected DecryptionParams, got {type(params).__name__}")
    if params._secret() is None and params.source is None:
        raise ValueError("encryption: these DecryptionParams hold neither a key nor a passphrase")


def check_encryption(params: object) -> None:
    """Raises ``TypeError`` for anything but ``EncryptionParams`` or ``None``."""
    if params is None:
        return
    from tensorizer._encryption import EncryptionParams

    if not isinstance(params, EncryptionParams):
        raise TypeError(f"encryption: expected EncryptionParams, got {type(params).__name__}")


def key_ring(params: DecryptionParams) -> _C.KeyRing:
    """The keys of a load."""
    secret = params._secret()
    if secret is not None:
        return _C.KeyRing(secret)
    source = cast(bytes, params.source)  # check_decryption has refused parameters with neither
    return _C.KeyRing(source, params.max_opslimit, params.max_memlimit, params.max_derivations)


def encryption_key(
    params: Optional[EncryptionParams],
) -> tuple[Optional[_C.SecretKey], Optional[tuple[int, int, bytes]]]:
    """The key of a save, and (opslimit, memlimit, salt) if it was derived from a passphrase."""
    if params is None:
        return None, None
    return params._secret(), params.derivation


def public_key_bytes(public_key: Any) -> tuple[bytes, ...]:
    """The keys that a caller means: a ``PublicKey``, the path of one, or a sequence of either.

    Raises:
        TypeError: Something else.
        ValueError: An empty sequence; a file that holds no public key.
        OSError: A file that cannot be read.
    """
    several = public_key if isinstance(public_key, (list, tuple, set, frozenset)) else [public_key]
    if not several:
        raise ValueError("public_key: an empty sequence, which no signature could satisfy")
    return tuple(map(_public_key_bytes, several))


def _public_key_bytes(public_key: Any) -> bytes:
    from tensorizer._signing import PublicKey

    if isinstance(public_key, (str, os.PathLike)):
        public_key = PublicKey.from_file(public_key)
    if not isinstance(public_key, PublicKey):
        raise TypeError(
            f"public_key: expected a PublicKey, a path or a sequence of them, got {type(public_key).__name__}"
        )
    return bytes(public_key)


def signer_of(signing_key: Any) -> _C.Signer:
    """The argument with which the extension signs. Raises ``TypeError`` for anything but a ``SigningKey``."""
    from tensorizer._signing import SigningKey

    if not isinstance(signing_key, SigningKey):
        raise TypeError(f"signing_key: expected a SigningKey, got {type(signing_key).__name__}")
    return signing_key._signer

"""Keeps keys in memory, checks the keys that callers pass, and says whether encryption works on this system."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Optional, TypeVar, Union

from tensorizer import _C
from tensorizer._system import locks
from tensorizer.errors import CryptographyError as CryptographyError  # 2.12.1 has it here, too

# --- whether encryption works here -----------------------------------------------------------------------------------

#: True if libsodium could be started. It is linked in, so False means that the system has no source of randomness.
available: bool = _C.sodium_available()


def require_crypto() -> None:
    """Prepares for encryption or decryption.

    Raises:
        RuntimeError: libsodium cannot be used.
    """
    if not available:
        raise RuntimeError(
            "encryption is unavailable: libsodium could not be started on this system; "
            "install a working libsodium (for example 'apt-get install libsodium23') and restart"
        )


# --- keys as callers pass them, and objects that keep them -----------------------------------------------------------

_Object = TypeVar("_Object", bound="Immutable")

BytesLike = Union[bytes, bytearray, memoryview]

_KEY_NBYTES = 32
_SALT_NBYTES = 16


class Provided:
    """A key that a provider hands out. The first thread that needs the key asks for it, once."""

    __slots__ = ("__weakref__", "_lock", "_secret", "provider")

    def __init__(self, provider: Callable[[], BytesLike]) -> None:
        if not callable(provider):
            raise TypeError(f"provider: expected a callable without arguments, got {type(provider).__name__}")
        self.provider = provider
        self._secret: Optional[_C.SecretKey] = None
        self._lock = threading.Lock()
        locks.makers[self] = threading.Lock

    def secret(self) -> _C.SecretKey:
        with self._lock:
            if self._secret is None:
                self._secret = secret_from_bytes(self.provider(), "the key that the provider returned")
            return self._secret


Key = Union[_C.SecretKey, Provided]


def secret_of(key: Key) -> _C.SecretKey:
    """Returns the key itself. A provider is asked if it has not been asked before."""
    return key.secret() if isinstance(key, Provided) else key


def same_key(a: Optional[Key], b: Optional[Key]) -> bool:
    """Compares in constant time. Two providers are equal if they are the same object."""
    if a is None or b is None:
        return a is b
    if isinstance(a, Provided) or isinstance(b, Provided):
        # A comparison must not call a key service.
        return isinstance(a, Provided) and isinstance(b, Provided) and a.provider is b.provider
    return _C.same_secret(a, b)


def same_bytes(a: Optional[bytes], b: Optional[bytes]) -> bool:
    """Compares in constant time."""
    if a is None or b is None:
        return a is b
    return _C.same_secret(a, b)


def secret_from_bytes(key: Any, what: str) -> _C.SecretKey:
    """A key from 32 bytes; ``what`` names them in a ``TypeError`` or ``ValueError``."""
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise TypeError(
            f"{what}: expected {_KEY_NBYTES} bytes from a secure source of randomness, got {type(key).__name__} "
            "(from_string() derives a key from a passphrase)"
        )
    nbytes = key.nbytes if isinstance(key, memoryview) else len(key)
    if nbytes != _KEY_NBYTES:
        raise ValueError(f"{what}: expected {_KEY_NBYTES} bytes, got {nbytes}")
    if isinstance(key, memoryview) and not key.contiguous:
        key = key.tobytes()
    return _C.SecretKey(key)


def secret_from_file(path: Union[str, os.PathLike[str]]) -> _C.SecretKey:
    """A key from a file of exactly 32 bytes; ``ValueError`` for another size."""
    with open(path, "rb", buffering=0) as file:  # unbuffered, so that no other copy stays behind
        key = bytearray(_KEY_NBYTES + 1)
        nbytes = 0
        while nbytes < len(key):
            got = file.readinto(memoryview(key)[nbytes:])
            if not got:
                break
            nbytes += got
    try:
        if nbytes != _KEY_NBYTES:
            found = "more" if nbytes > _KEY_NBYTES else nbytes
            raise ValueError(f"key file {path!r}: expected {_KEY_NBYTES} bytes, got {found}")
        with memoryview(key) as view:
            return _C.SecretKey(view[:_KEY_NBYTES])
    finally:
        key[:] = bytes(len(key))


def _encoded(what: str, text: str, encoding: str) -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError:
        pass  # raised below, outside, because this error quotes the text
    raise ValueError(f"{what}: it cannot be encoded as {encoding}")


def passphrase_bytes(source: Any, encoding: str) -> bytes:
    """The bytes that Argon2id gets. An empty passphrase is a ``ValueError``, another type a ``TypeError``."""
    if not isinstance(source, (str, bytes)):
        raise TypeError(f"passphrase: expected str or bytes, got {type(source).__name__}")
    if not source:
        raise ValueError("passphrase: it is empty")
    return _encoded("passphrase", source, encoding) if isinstance(source, str) else source


def salt_bytes(salt: Any, encoding: str) -> bytes:
    """The salt as 16 bytes, random ones for ``None``."""
    if salt is None:
        return _C.random_bytes(_SALT_NBYTES)
    if isinstance(salt, str):
        salt = _encoded("salt", salt, encoding)
    if not isinstance(salt, (bytes, bytearray, memoryview)):
        raise TypeError(f"salt: expected bytes-like or None, got {type(salt).__name__}")
    salted = bytes(salt)
    if len(salted) != _SALT_NBYTES:
        raise ValueError(f"salt: expected {_SALT_NBYTES} bytes, got {len(salted)}")
    return salted


class Immutable:
    """An object whose attributes :meth:`_set` sets once, when it is made. A copy of it is the object itself."""

    __slots__ = ()

    def _set(self: _Object, **values: Any) -> _Object:
        for name, value in values.items():
            object.__setattr__(self, name, value)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} objects are immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} objects are immutable: cannot delete {name!r}")

    def __copy__(self: _Object) -> _Object:
        return self

    def __deepcopy__(self: _Object, memo: Any) -> _Object:
        return self

"""The keys with which tensors are encrypted and decrypted.

``docs/encryption.md`` shows their use, and ``docs/security.md`` says what encryption protects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar, Optional, TypeVar, Union

from tensorizer import _C, _crypto
from tensorizer._crypto import BytesLike, Key, Provided

_ARGON2ID13 = 2
_MAX_OPSLIMIT = 4_294_967_295
_MAX_MEMLIMIT = 4_398_046_510_080


class _Params(_crypto.Immutable):
    """What parameters for both directions have in common: a key, or a provider of one, or neither."""

    __slots__ = ("_key",)
    _key: Optional[Key]

    @classmethod
    def from_file(cls: type[_Made], path: Union[str, os.PathLike[str]]) -> _Made:
        """The key that a local file of exactly 32 bytes holds.

        Raises:
            ValueError: The file has another size.
            OSError: The file cannot be read.
        """
        _crypto.require_crypto()
        return cls._of(_crypto.secret_from_file(path))

    @classmethod
    def from_provider(cls: type[_Made], provider: Callable[[], BytesLike]) -> _Made:
        """A key that comes from elsewhere, such as a key management service.

        Args:
            provider: Called without arguments when the key is first needed, and only once for this object, which keeps
                its 32 bytes. If it raises, the load or save raises that error, and the next one calls it again.

        Raises:
            TypeError: ``provider`` is not callable.
        """
        _crypto.require_crypto()
        return cls._of(Provided(provider))

    @classmethod
    def _of(cls: type[_Made], key: Optional[Key], **values: Any) -> _Made:
        return cls.__new__(cls)._set(**{**cls._DEFAULTS, "_key": key, **values})

    _DEFAULTS: ClassVar[Mapping[str, Any]] = {}

    def _secret(self) -> Optional[_C.SecretKey]:
        return None if self._key is None else _crypto.secret_of(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle holds the key in clear, because the process that unpickles it needs the key.
        if isinstance(self._key, Provided):
            return (type(self).from_provider, (self._key.provider,))
        secret = self._secret()
        values = {name: getattr(self, name) for name in self._DEFAULTS}
        return (_unpickle, (type(self), None if secret is None else secret.export(), values))

    __hash__ = None  # type: ignore[assignment]  # equal objects would hash alike, and a hash would tell about the key


_Made = TypeVar("_Made", bound=_Params)


def _unpickle(kind: type[_Made], key: Optional[bytes], values: Mapping[str, Any]) -> _Made:
    _crypto.require_crypto()
    return kind._of(None if key is None else _C.SecretKey(key), **values)


class EncryptionParams(_Params):
    """A key for :class:`~tensorizer.TensorSerializer` to encrypt with.

    Instances are immutable, compare by value (in constant time) and never show the key in their ``repr``. The key is
    kept in memory that is locked, where the system allows it, and left out of core dumps.

    Args:
        key: 32 secret bytes from a cryptographically secure source. For a text that people chose, use
            :meth:`from_string`.

    Raises:
        TypeError: ``key`` is not bytes-like.
        ValueError: ``key`` does not have 32 bytes.
        RuntimeError: libsodium is unusable.

    Examples:
        >>> key = tensorizer.EncryptionParams.random()
        >>> tensorizer.save_file({"weight": torch.ones(4)}, "secret.tensors", encryption=key)
    """

    __module__ = "tensorizer.encryption"  # where users import it from

    __slots__ = ("_derivation",)

    class OpsLimit(IntEnum):
        """Passes of a key derivation over its memory."""

        MIN = 1
        INTERACTIVE = 2
        MODERATE = 3
        SENSITIVE = 4

    class MemLimit(IntEnum):
        """Memory, in bytes, that each guess of a passphrase needs."""

        MIN = 8_192
        INTERACTIVE = 67_108_864
        MODERATE = 268_435_456
        SENSITIVE = 1_073_741_824

    _key: Key
    _derivation: Optional[tuple[int, int, bytes]]
    _DEFAULTS = MappingProxyType({"_derivation": None})

    def __init__(self, key: bytes) -> None:
        _crypto.require_crypto()
        self._set(_key=_crypto.secret_from_bytes(key, "encryption key"), _derivation=None)

    @classmethod
    def random(cls) -> EncryptionParams:
        """A new random key. Keep :attr:`key`: the file cannot be read without it.

        Examples:
            >>> len(tensorizer.EncryptionParams.random().key)
            32
        """
        _crypto.require_crypto()
        return cls._of(_C.random_key())

    @classmethod
    def from_string(
        cls,
        source: Union[str, bytes],
        opslimit: Union[EncryptionParams.OpsLimit, int, None] = None,
        memlimit: Union[EncryptionParams.MemLimit, int, None] = None,
        salt: Union[str, bytes, None] = None,
        *,
        encoding: str = "utf-8",
    ) -> EncryptionParams:
        """A key derived from a passphrase with Argon2id.

        The file stores the other arguments, so reading needs only the passphrase. With the defaults, the
        derivation takes about half a second and 256 MiB, and cannot be interrupted.

        Args:
            source: The passphrase; it is not trimmed.
            opslimit: Passes over the memory, 1 to 4294967295; default ``OpsLimit.MODERATE`` (3).
            memlimit: Memory in bytes, 8192 to 4398046510080; default ``MemLimit.MODERATE`` (256 MiB).
            salt: 16 bytes, or a text that encodes to 16 bytes; default random. Pass one only if two files must
                have the same key.
            encoding: Of ``source`` and ``salt``, if they are ``str``.

        Raises:
            TypeError: An argument of the wrong type; the presets of ``opslimit`` and ``memlimit`` exchanged.
            ValueError: An empty passphrase, a limit out of range, a salt of another length.
            CryptographyError: Not enough memory for ``memlimit``.
            RuntimeError: libsodium is unusable.

        Examples:
            >>> key = tensorizer.EncryptionParams.from_string("a few random words", opslimit=1, memlimit=8192)
            >>> tensorizer.save_file({"weight": torch.ones(4)}, "secret.tensors", encryption=key)
        """
        _crypto.require_crypto()
        passphrase = _crypto.passphrase_bytes(source, encoding)
        ops = _limit("opslimit", opslimit, cls.OpsLimit, cls.MemLimit, 1, _MAX_OPSLIMIT)
        mem = _limit("memlimit", memlimit, cls.MemLimit, cls.OpsLimit, 8_192, _MAX_MEMLIMIT)
        salted = _crypto.salt_bytes(salt, encoding)
        return cls._of(_C.derive_key(passphrase, ops, mem, _ARGON2ID13, salted), _derivation=(ops, mem, salted))

    @property
    def key(self) -> bytes:
        """The 32 bytes of the key: a copy in ordinary memory."""
        return _crypto.secret_of(self._key).export()

    @property
    def salt(self) -> bytes:
        """The salt of a key from :meth:`from_string`.

        Raises:
            ValueError: The key was not derived from a passphrase.
        """
        if self._derivation is None:
            raise ValueError("this key was not derived from a string, so there is no salt")
        return self._derivation[2]

    @property
    def derivation(self) -> Optional[tuple[int, int, bytes]]:
        """``(opslimit, memlimit, salt)`` of a key from :meth:`from_string`, otherwise ``None``."""
        return self._derivation

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncryptionParams):
            return NotImplemented
        return self._derivation == other._derivation and _crypto.same_key(self._key, other._key)

    __hash__ = None  # a class with __eq__ does not inherit __hash__

    def __repr__(self) -> str:
        if self._derivation is None:
            return "EncryptionParams(key=<hidden>)"
        opslimit, memlimit, _ = self._derivation
        return f"EncryptionParams(key=<hidden>, opslimit={opslimit}, memlimit={memlimit})"


class DecryptionParams(_Params):
    """What :class:`~tensorizer.TensorDeserializer` decrypts with: a key, or the passphrase that gives it.

    Use :meth:`from_key`, :meth:`from_string`, :meth:`from_file` or :meth:`from_provider`; the constructor makes an
    empty object, which opens no file. Instances are immutable, compare by value (in constant time) and never show
    secrets in their ``repr``.

    Examples:
        >>> key = tensorizer.EncryptionParams.random()
        >>> tensorizer.save_file({"weight": torch.ones(4)}, "secret.tensors", encryption=key)
        >>> unlock = tensorizer.DecryptionParams.from_key(key.key)
        >>> tensorizer.load_file("secret.tensors", encryption=unlock)
        {'weight': tensor([1., 1., 1., 1.])}
    """

    __module__ = "tensorizer.encryption"  # where users import it from

    __slots__ = ("_source", "max_derivations", "max_memlimit", "max_opslimit")

    _source: Optional[bytes]
    max_opslimit: int
    """Most passes that a file may ask for; reading raises ``CryptographyError`` above it. Default 16."""
    max_memlimit: int
    """Most bytes of memory that a file may ask for. Default 4 GiB."""
    max_derivations: int
    """Most different keys that the tensors of one load may ask for. Default 16; usual files need one."""

    _DEFAULTS = MappingProxyType(
        {
            "_source": None,
            "max_opslimit": _C.DEFAULT_MAX_OPSLIMIT,
            "max_memlimit": _C.DEFAULT_MAX_MEMLIMIT,
            "max_derivations": _C.DEFAULT_MAX_DERIVATIONS,
        }
    )

    def __init__(self) -> None:
        self._set(_key=None, **self._DEFAULTS)

    @classmethod
    def from_string(
        cls,
        source: Union[str, bytes],
        *,
        encoding: str = "utf-8",
        max_opslimit: Optional[int] = None,
        max_memlimit: Optional[int] = None,
        max_derivations: Optional[int] = None,
    ) -> DecryptionParams:
        """The passphrase with which a file was encrypted.

        The file stores the cost of deriving the key, so a hostile file could ask for terabytes of memory or
        billions of passes. Reading raises if it asks for more than these limits.

        Args:
            source: The passphrase.
            encoding: Of ``source``, if it is a ``str``.
            max_opslimit: Most passes allowed; default 16, four times ``OpsLimit.SENSITIVE``.
            max_memlimit: Most memory allowed, in bytes; default 4 GiB, four times ``MemLimit.SENSITIVE``.
            max_derivations: Most different keys derived in one load; default 16. Usual files need one.

        Raises:
            TypeError: ``source`` is neither ``str`` nor ``bytes``; a limit is no integer.
            ValueError: ``source`` is empty; a limit is below 1.
            RuntimeError: libsodium is unusable.

        Examples:
            >>> key = tensorizer.EncryptionParams.from_string("a few random words", opslimit=1, memlimit=8192)
            >>> tensorizer.save_file({"weight": torch.ones(4)}, "secret.tensors", encryption=key)
            >>> unlock = tensorizer.DecryptionParams.from_string("a few random words")
            >>> tensorizer.load_file("secret.tensors", encryption=unlock)
            {'weight': tensor([1., 1., 1., 1.])}
        """
        _crypto.require_crypto()
        ops = _ceiling("max_opslimit", max_opslimit, _C.DEFAULT_MAX_OPSLIMIT)
        mem = _ceiling("max_memlimit", max_memlimit, _C.DEFAULT_MAX_MEMLIMIT)
        most = _ceiling("max_derivations", max_derivations, _C.DEFAULT_MAX_DERIVATIONS)
        passphrase = _crypto.passphrase_bytes(source, encoding)
        return cls._of(None, _source=passphrase, max_opslimit=ops, max_memlimit=mem, max_derivations=most)

    @classmethod
    def from_key(cls, key: bytes) -> DecryptionParams:
        """The 32 bytes of the key; also of one that was derived from a passphrase.

        Raises:
            TypeError: ``key`` is not bytes-like.
            ValueError: ``key`` is empty or does not have 32 bytes.
            RuntimeError: libsodium is unusable.

        Examples:
            >>> key = tensorizer.EncryptionParams.random()
            >>> unlock = tensorizer.DecryptionParams.from_key(key.key)
        """
        _crypto.require_crypto()
        if not key:
            raise ValueError("decryption key: it is empty")
        return cls._of(_crypto.secret_from_bytes(key, "decryption key"))

    @property
    def key(self) -> Optional[bytes]:
        """The 32 bytes of the key (a copy in ordinary memory); ``None`` with a passphrase."""
        secret = self._secret()
        return None if secret is None else secret.export()

    @property
    def source(self) -> Optional[bytes]:
        """The passphrase as bytes; ``None`` with a key."""
        return self._source

    def _limits(self) -> tuple[int, int, int]:
        return self.max_opslimit, self.max_memlimit, self.max_derivations

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DecryptionParams):
            return NotImplemented
        return (
            self._limits() == other._limits()
            and _crypto.same_bytes(self._source, other._source)
            and _crypto.same_key(self._key, other._key)
        )

    __hash__ = None  # as for EncryptionParams

    def __repr__(self) -> str:
        if self._source is not None:
            return "DecryptionParams(source=<hidden>)"
        return f"DecryptionParams({'' if self._key is None else 'key=<hidden>'})"


def _limit(
    name: str, value: Any, preset: type[IntEnum], wrong_preset: type[IntEnum], minimum: int, maximum: int
) -> int:
    if value is None:
        return int(preset["MODERATE"])
    if not isinstance(value, int) or isinstance(value, wrong_preset):
        raise TypeError(
            f"{name}: expected an EncryptionParams.{preset.__name__}, an int or None, got {type(value).__name__}"
        )
    if not minimum <= value <= maximum:
        raise ValueError(f"{name}: expected {minimum} to {maximum}, got {int(value)}")
    return int(value)


def _ceiling(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an int or None, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {int(value)}")
    return min(int(value), 2**64 - 1)

"""Ed25519 keys, which sign files and check their signatures.

``docs/signing.md`` shows how a release job signs models and how programs check them.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Optional, Union

from tensorizer import _C, _crypto
from tensorizer.errors import stream_errors

_MAX_KEY_FILE_NBYTES = 65_536
_SEED_PREFIX = bytes.fromhex("302e020100300506032b657004220420")  # RFC 8410
_PUBLIC_PREFIX = bytes.fromhex("302a300506032b6570032100")
_PUBLIC_PEM = r"-----BEGIN PUBLIC KEY-----([A-Za-z0-9+/=\s]*)-----END PUBLIC KEY-----"


class PublicKey(_crypto.Immutable):
    """The public half of a :class:`SigningKey`: 32 bytes that anybody may know.

    Instances are immutable, hashable and compare by value; ``bytes(key)`` are the 32 bytes, ``str(key)`` is 64
    hexadecimal digits.

    Examples:
        >>> key = tensorizer.SigningKey.generate().public_key
        >>> key == tensorizer.PublicKey.from_bytes(bytes(key))
        True
    """

    __module__ = "tensorizer.signing"  # where users import it from

    __slots__ = ("_bytes",)
    _bytes: bytes

    def __init__(self) -> None:
        raise TypeError("PublicKey objects come from from_file(), from_bytes() or SigningKey.public_key")

    @classmethod
    def from_bytes(cls, key: bytes) -> PublicKey:
        """A key from its 32 bytes.

        Raises:
            TypeError: Not bytes-like.
            ValueError: Another length, or not a public key (no point, or one of small order).

        Examples:
            >>> key = tensorizer.PublicKey.from_bytes(bytes(tensorizer.SigningKey.generate().public_key))
        """
        if not isinstance(key, (bytes, bytearray, memoryview)):
            raise TypeError(f"public key: expected 32 bytes, got {type(key).__name__}")
        stored = bytes(key)
        if len(stored) != 32:
            raise ValueError(f"public key: expected 32 bytes, got {len(stored)}")
        if not _C.is_public_key(stored):
            raise ValueError("public key: these 32 bytes are no Ed25519 public key")
        return cls.__new__(cls)._set(_bytes=stored)

    @classmethod
    def from_file(cls, path: Union[str, os.PathLike[str]]) -> PublicKey:
        """The key in a PEM file (``PUBLIC KEY``, as ``openssl pkey -pubout`` writes it) or in 64 hexadecimal digits.

        Raises:
            ValueError: The file holds no Ed25519 public key.
            OSError: It cannot be read.

        Examples:
            >>> tensorizer.SigningKey.generate().public_key.save("release.pem.pub")
            >>> key = tensorizer.PublicKey.from_file("release.pem.pub")
        """
        with stream_errors(), open(path, "rb") as file:
            text = file.read(_MAX_KEY_FILE_NBYTES + 1).decode("latin-1")
        what = f"public key file {os.fspath(path)!r}"
        found = re.search(_PUBLIC_PEM, text)
        if found is not None:
            try:
                der = base64.b64decode("".join(found.group(1).split()), validate=True)
            except ValueError:
                raise ValueError(f"{what}: its PEM is damaged") from None
            if len(der) != len(_PUBLIC_PREFIX) + 32 or not der.startswith(_PUBLIC_PREFIX):
                raise ValueError(f"{what}: expected an Ed25519 key, got one of another algorithm")
            return cls._named(der[len(_PUBLIC_PREFIX) :], what)
        if "PRIVATE KEY" in text:
            raise ValueError(f"{what}: expected a public key, got a private one")
        if re.fullmatch(r"\s*[0-9A-Fa-f]{64}\s*", text):
            return cls._named(bytes.fromhex(text.strip()), what)
        raise ValueError(f"{what}: expected a PEM file with PUBLIC KEY, or 64 hexadecimal digits")

    @classmethod
    def _named(cls, key: bytes, what: str) -> PublicKey:
        try:
            return cls.from_bytes(key)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes a PEM file, as ``openssl`` reads it.

        Raises:
            FileExistsError: The file exists.
            OSError: It cannot be written.

        Examples:
            >>> tensorizer.SigningKey.generate().public_key.save("team.pem.pub")
        """
        _write_new(path, _pem("PUBLIC KEY", _PUBLIC_PREFIX + self._bytes), None)

    def __bytes__(self) -> bytes:
        return self._bytes

    def __str__(self) -> str:
        return self._bytes.hex()

    def __repr__(self) -> str:
        return f"PublicKey({self._bytes.hex()})"

    def __eq__(self, other: object) -> bool:
        return self._bytes == other._bytes if isinstance(other, PublicKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (PublicKey.from_bytes, (self._bytes,))


class SigningKey:
    """A private Ed25519 key, which signs ``.tensors`` files: ``TensorSerializer(..., signing_key=...)``.

    Use :meth:`generate`, :meth:`from_file`, :meth:`from_bytes` or :meth:`from_provider`. The key stays in memory
    that is locked if the system allows it, and is left out of core dumps. Objects show only their public key and
    cannot be pickled.

    Examples:
        >>> key = tensorizer.SigningKey.generate()
        >>> with TensorSerializer("signed.tensors", signing_key=key) as serializer:
        ...     serializer.write_state_dict({"weight": torch.ones(4)})
    """

    __module__ = "tensorizer.signing"  # where users import it from

    __slots__ = ("_public_key", "_seed", "_signer")
    _public_key: PublicKey
    _seed: Optional[_C.SecretKey]
    _signer: _C.Signer

    def __init__(self) -> None:
        raise TypeError("SigningKey objects come from generate(), from_file(), from_bytes() or from_provider()")

    @classmethod
    def generate(cls) -> SigningKey:
        """A new random key. :meth:`save` it: without it you cannot sign again.

        Examples:
            >>> key = tensorizer.SigningKey.generate()
            >>> key.save("team.pem")
        """
        _crypto.require_crypto()
        return cls._of(_C.random_key())

    @classmethod
    def from_bytes(cls, seed: bytes) -> SigningKey:
        """The key of 32 secret bytes, the seed of RFC 8032.

        Raises:
            TypeError: Not bytes-like.
            ValueError: Another length.

        Examples:
            >>> key = tensorizer.SigningKey.from_bytes(bytes(range(32)))
        """
        _crypto.require_crypto()
        return cls._of(_crypto.secret_from_bytes(seed, "signing key"))

    @classmethod
    def from_file(cls, path: Union[str, os.PathLike[str]]) -> SigningKey:
        """The key in a PEM file (``PRIVATE KEY``, as ``openssl genpkey -algorithm ed25519`` writes it) or in 64
        hexadecimal digits.

        Raises:
            ValueError: The file holds no Ed25519 private key, or an encrypted one.
            OSError: It cannot be read.

        Examples:
            >>> tensorizer.SigningKey.generate().save("release.pem")
            >>> key = tensorizer.SigningKey.from_file("release.pem")
        """
        _crypto.require_crypto()
        text = bytearray(_MAX_KEY_FILE_NBYTES)
        with stream_errors(), open(path, "rb", buffering=0) as file:  # unbuffered: no other copy stays behind
            nbytes = file.readinto(text) or 0
        try:
            with memoryview(text) as view:
                return cls._of(_C.read_seed(view[:nbytes]))
        except ValueError as error:
            raise ValueError(f"key file {os.fspath(path)!r}: {error}") from None
        finally:
            text[:] = bytes(len(text))

    @classmethod
    def from_provider(cls, sign: Callable[[bytes], bytes], public_key: PublicKey) -> SigningKey:
        """A key that stays elsewhere, such as in a key management service.

        Args:
            sign: Called with a message of 40 bytes each time a file is signed; returns the 64 bytes of its Ed25519
                signature (pure Ed25519, not Ed25519ph). If it raises, signing raises that error.
            public_key: The public half. Signing raises if a signature does not match it.

        Raises:
            TypeError: Arguments of other types.

        Examples:
            >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            >>> service = Ed25519PrivateKey.generate()  # stands for the key management service
            >>> public_key = tensorizer.PublicKey.from_bytes(service.public_key().public_bytes_raw())
            >>> key = tensorizer.SigningKey.from_provider(service.sign, public_key)
        """
        _crypto.require_crypto()
        if not callable(sign):
            raise TypeError(f"sign: expected a callable with one argument, got {type(sign).__name__}")
        if not isinstance(public_key, PublicKey):
            raise TypeError(f"public_key: expected a PublicKey, got {type(public_key).__name__}")
        key = cls.__new__(cls)
        key._seed, key._signer, key._public_key = None, _C.Signer(sign, bytes(public_key)), public_key
        return key

    @property
    def public_key(self) -> PublicKey:
        """The public half, which checks signatures of this key."""
        return self._public_key

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes the private key to a PEM file that only its owner may read (mode 0600).

        Raises:
            FileExistsError: The file exists; it stays as it is.
            OSError: It cannot be written.
            ValueError: The key is from :meth:`from_provider`.

        Examples:
            >>> tensorizer.SigningKey.generate().save("mine.pem")
        """
        if self._seed is None:
            raise ValueError("this key stays with its provider, so it cannot be saved")
        _write_new(path, _pem("PRIVATE KEY", _SEED_PREFIX + self._seed.export()), 0o600)

    @classmethod
    def _of(cls, seed: _C.SecretKey) -> SigningKey:
        key = cls.__new__(cls)
        key._seed, key._signer = seed, _C.Signer(seed)
        key._public_key = PublicKey.from_bytes(key._signer.public_key)
        return key

    def __repr__(self) -> str:
        return f"SigningKey(<hidden>, public_key={self._public_key})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SigningKey cannot be pickled: save() it, and let only whoever signs read the file")


_OneKey = Union[PublicKey, str, os.PathLike[str]]
#: Keys that signatures are checked with; any one of several suffices.
PublicKeyArgument = Optional[Union[_OneKey, Sequence[_OneKey]]]


def _pem(label: str, der: bytes) -> bytes:
    return f"-----BEGIN {label}-----\n{base64.b64encode(der).decode('ascii')}\n-----END {label}-----\n".encode("ascii")


def _write_new(path: Union[str, os.PathLike[str]], content: bytes, mode: Optional[int]) -> None:
    from tensorizer._io.new_files import FileAccess, NewFile

    with NewFile(os.path.abspath(path), None if mode is None else FileAccess(mode)) as file:
        file.write(content)
        file.publish(exclusive=True)

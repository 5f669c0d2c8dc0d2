"""What public functions are given and only pass on: the key, options for opening, threads, progress, who vouches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar, cast

from tensorizer._keys import check_decryption, check_encryption, public_key_bytes
from tensorizer._system.checks import thread_limit
from tensorizer._system.config import env_int

if TYPE_CHECKING:
    from tensorizer.progress import ProgressArgument


_Function = TypeVar("_Function", bound=Callable[..., Any])


def says_dtype(function: _Function) -> _Function:
    """For functions with a ``dtype=``: the error for ``torch_dtype=`` says so."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch_dtype" in kwargs:
            raise TypeError(f"{function.__qualname__}() has no argument torch_dtype=; did you mean dtype=?")
        return function(*args, **kwargs)

    wrapped = cast(_Function, call)
    wrapped.__kwdefaults__ = function.__kwdefaults__  # the same dictionary, for programs that change it
    return wrapped


class Trust(NamedTuple):
    """Who may vouch for a file, and whether somebody has to."""

    public_keys: tuple[bytes, ...] = ()
    required: bool = False

    def __repr__(self) -> str:
        return f"Trust({len(self.public_keys)} keys, required={self.required!r})"

    @classmethod
    def of(cls, public_key: Any, require_authenticated: Optional[bool]) -> Trust:
        """From the arguments of ``TensorDeserializer`` and what the environment says.

        Raises:
            ValueError: A key file that holds none; a variable that is not 0 or 1.
            TypeError: Arguments of other types.
        """
        if require_authenticated is None:
            require_authenticated = env_int("TENSORIZER_REQUIRE_AUTHENTICATED", 0, 1) == 1
        keys = () if public_key is None else public_key_bytes(public_key)
        return cls(keys, bool(require_authenticated))


NOBODY = Trust()


class Access(NamedTuple):
    """How one call gets at its files. Made by the public function that was called, and passed on as it is.

    :meth:`to_read` and :meth:`to_write` check what users gave.

    Attributes:
        encryption: ``DecryptionParams`` where files are read, ``EncryptionParams`` where they are written.
        stream_options: Keywords of ``stream_io.open_stream`` for URIs; whoever opens checks them.
        num_readers: Upper bound for reading threads, not checked yet: :attr:`max_workers` does that, so that a file
            that cannot be opened is reported first.
        progress: What users gave; ``progress_reporter`` checks it.
        trust: Who may vouch for what is read.
    """

    encryption: Any = None
    stream_options: Optional[Mapping[str, Any]] = None
    num_readers: Optional[int] = None
    progress: ProgressArgument = False
    trust: Trust = NOBODY

    def __repr__(self) -> str:
        """Without the key and the options, which may hold passwords."""
        return f"Access(num_readers={self.num_readers!r}, progress={self.progress!r}, trust={self.trust!r})"

    @classmethod
    def to_read(
        cls,
        encryption: Any = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        num_readers: Optional[int] = None,
        progress: ProgressArgument = False,
        trust: Trust = NOBODY,
    ) -> Access:
        """For reading.

        Raises:
            TypeError: `encryption` is neither ``DecryptionParams`` nor ``None``.
            ValueError: It holds no key.
        """
        if encryption is not None:
            check_decryption(encryption)
        return cls(encryption, stream_options, num_readers, progress, trust)

    @classmethod
    def to_write(
        cls,
        encryption: Any = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        progress: ProgressArgument = False,
    ) -> Access:
        """For writing. Raises ``TypeError`` if `encryption` is neither ``EncryptionParams`` nor ``None``."""
        if encryption is not None:
            check_encryption(encryption)
        return cls(encryption, stream_options, progress=progress)

    @property
    def max_workers(self) -> int:
        """The bound as the extension takes it: 0 for as many threads as are useful.

        Raises:
            TypeError: ``num_readers`` is no number.
            ValueError: It is below 1.
        """
        return 0 if self.num_readers is None else thread_limit("num_readers", self.num_readers)

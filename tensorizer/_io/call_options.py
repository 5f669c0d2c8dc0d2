"""What one call of a public function was given for all files that it opens: :class:`CallOptions`."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar, Union, cast

from tensorizer._keys import check_decryption, check_encryption, public_key_bytes
from tensorizer._system.config import env_int, suggestion, thread_limit

if TYPE_CHECKING:
    from tensorizer._io.http_options import CAInfo, HTTPOptions
    from tensorizer._progress import ProgressArgument

Made = TypeVar("Made")


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
    """The keys that may authenticate a file, and whether one of them has to."""

    public_keys: tuple[bytes, ...] = ()
    required: bool = False

    def __repr__(self) -> str:
        return f"Trust({len(self.public_keys)} keys, required={self.required!r})"

    @classmethod
    def of(cls, public_key: Any, require_authenticated: Optional[bool]) -> Trust:
        """From the arguments of ``TensorDeserializer`` and what the environment says.

        Raises:
            ValueError: A key file without a key; a variable that is not 0 or 1.
            TypeError: Arguments of other types.
        """
        if require_authenticated is None:
            require_authenticated = env_int("TENSORIZER_REQUIRE_AUTHENTICATED", 0, 1) == 1
        keys = () if public_key is None else public_key_bytes(public_key)
        return cls(keys, bool(require_authenticated))


NOBODY = Trust()


@dataclasses.dataclass(frozen=True, repr=False)
class StreamOptions:
    """The keywords of :func:`tensorizer.stream_io.open_stream`, where they are documented."""

    s3_access_key_id: Optional[str] = None
    s3_secret_access_key: Optional[str] = None
    s3_endpoint: Optional[str] = None
    s3_config_path: Optional[Union[str, bytes, os.PathLike[Any]]] = None
    buffer_size: Optional[int] = None
    force_http: Optional[bool] = None
    begin: Optional[int] = None
    end: Optional[int] = None
    s3_region_name: Optional[str] = None
    s3_signature_version: Optional[str] = None
    certificate_handling: Optional[CAInfo] = None
    s3_session_token: Optional[str] = None
    s3_profile: Optional[str] = None
    s3_client_factory: Optional[Callable[..., Any]] = None
    http_options: Optional[HTTPOptions] = None
    s3_extra_args: Optional[Mapping[str, Mapping[str, Any]]] = None
    memory_budget: Optional[int] = None
    cache: Any = None

    def __repr__(self) -> str:
        """Without the values, which may be secrets."""
        given = [name for name in _STREAM_KEYWORDS if getattr(self, name) is not None]
        return f"StreamOptions({', '.join(given)})"

    @classmethod
    def of(cls, given: Optional[Mapping[str, Any]]) -> StreamOptions:
        """From the argument ``stream_options`` of public functions.

        Raises:
            TypeError: Not a mapping, or an unknown name; the message has the name that was probably meant.
        """
        if not given and (given is None or isinstance(given, Mapping)):
            return _NONE_GIVEN
        if not isinstance(given, Mapping):
            raise TypeError(f"stream_options: expected a mapping of keywords, got {type(given).__name__}")
        for name in given:
            if name not in _STREAM_KEYWORDS:
                raise TypeError(f"stream_options: unknown keyword {name!r}; {_instead_of(str(name))}")
        return cls(**given)


_STREAM_KEYWORDS = tuple(field.name for field in dataclasses.fields(StreamOptions))
_NONE_GIVEN = StreamOptions()


def _instead_of(name: str) -> str:
    from tensorizer._io.http_options import HTTPOptions

    if name in {field.name for field in dataclasses.fields(HTTPOptions)}:
        return f"it is a field of HTTPOptions: write {{'http_options': HTTPOptions({name}=...)}}"
    return suggestion(name, _STREAM_KEYWORDS)


class SharedObjects:
    """What the files that one call opens have in common: the client of their store, settings, the cache.

    Safe for several threads. Copies and pickles of it begin empty, because clients belong to one process.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is made may need something else of it
        self._made: list[tuple[Any, Any]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedObjects, ()

    def get(self, key: Any, make: Callable[[], Made]) -> Made:
        """What was made for an equal `key`, or is made now."""
        with self._lock:
            for known, value in self._made:
                if known == key:
                    return cast(Made, value)
            value = make()
            self._made.append((key, value))
            return value


class CallOptions(NamedTuple):
    """How one call opens its files. Made by the public function that was called, and passed on as it is.

    :meth:`to_read` and :meth:`to_write` check what users gave.

    Attributes:
        encryption: ``DecryptionParams`` where files are read, ``EncryptionParams`` where they are written.
        stream: Keywords of ``stream_io.open_stream`` for URIs.
        num_readers: Upper bound for reading threads, not checked yet: :attr:`max_workers` does that, so that a file
            that cannot be opened is reported first.
        progress: What users gave; ``progress_reporter`` checks it.
        trust: The keys that may authenticate what is read.
        shared: What its files have in common; ``None`` shares nothing.
    """

    encryption: Any = None
    stream: StreamOptions = _NONE_GIVEN
    num_readers: Optional[int] = None
    progress: ProgressArgument = False
    trust: Trust = NOBODY
    shared: Optional[SharedObjects] = None

    def __repr__(self) -> str:
        """Without the key and the options, which may hold passwords."""
        return f"CallOptions(num_readers={self.num_readers!r}, progress={self.progress!r}, trust={self.trust!r})"

    @classmethod
    def to_read(
        cls,
        encryption: Any = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        num_readers: Optional[int] = None,
        progress: ProgressArgument = False,
        trust: Trust = NOBODY,
    ) -> CallOptions:
        """For reading.

        Raises:
            TypeError: `encryption` is neither ``DecryptionParams`` nor ``None``; an unknown keyword.
            ValueError: It holds no key.
        """
        if encryption is not None:
            check_decryption(encryption)
        stream = StreamOptions.of(stream_options)
        return cls(encryption, stream, num_readers, progress, trust, SharedObjects())

    @classmethod
    def to_write(
        cls,
        encryption: Any = None,
        stream_options: Optional[Mapping[str, Any]] = None,
        progress: ProgressArgument = False,
    ) -> CallOptions:
        """For writing.

        Raises:
            TypeError: `encryption` is neither ``EncryptionParams`` nor ``None``; an unknown keyword.
        """
        if encryption is not None:
            check_encryption(encryption)
        return cls(encryption, StreamOptions.of(stream_options), progress=progress, shared=SharedObjects())

    def reading(self, encryption: Any = None, trust: Trust = NOBODY) -> CallOptions:
        """For files that the same call reads with another key, with what it shares."""
        if encryption is not None:
            check_decryption(encryption)
        return CallOptions(encryption, self.stream, self.num_readers, False, trust, self.shared)

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """The result of `make`: one for all files of the call, as far as the `key` is equal."""
        return make() if self.shared is None else self.shared.get(key, make)

    @property
    def max_workers(self) -> int:
        """The bound as the extension takes it: 0 for as many threads as are useful.

        Raises:
            TypeError: ``num_readers`` is not a number.
            ValueError: It is below 1.
        """
        return 0 if self.num_readers is None else thread_limit("num_readers", self.num_readers)


#: For files that are opened without any options, as local ones are.
PLAIN = CallOptions()

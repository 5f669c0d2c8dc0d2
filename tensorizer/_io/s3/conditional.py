"""A small object that is replaced as a whole: read if it changed, written if no other process has written it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

from tensorizer._io.call_options import CallOptions
from tensorizer._io.s3.access import S3Options, params_of, parse_s3_uri, store_of
from tensorizer._io.s3.client import s3_code, translated
from tensorizer.errors import StreamError

_READS = 3  # of an object whose body breaks off

# How stores say that a condition was not met: the object is another one, is there, is not there, or is being written.
_NOT_MET = frozenset({404, 409, 412})


class Read(NamedTuple):
    """What was read, and what tells it from others: the ETag of an object."""

    content: bytes
    tag: Any


class NotMetError(Exception):
    """What was to be replaced is another one by now."""


class ConditionalObject:
    """The object; caches on the way are told not to keep it.

    Attributes:
        takes_conditions: Whether the store has not said yet that it knows no conditions.
    """

    def __init__(self, uri: str, call: CallOptions) -> None:
        self._location = parse_s3_uri(uri)
        self._call, self._options = call, S3Options.of(call.stream)
        self._write = False
        self._known_access: Any = None
        self.takes_conditions = True

    @property
    def _access(self) -> Any:
        if self._known_access is None:
            _, self._known_access = store_of(self._location, self._call, write=self._write)
            events = self._known_access.client.meta.events
            events.register("before-call.s3.GetObject", self._without_caches, unique_id=f"tensorizer-{id(self)}")
        return self._known_access

    def _without_caches(self, params: dict[str, Any], **_: Any) -> None:
        if params["url_path"].endswith(f"/{self._location.key}"):
            params["headers"]["Cache-Control"] = "no-cache"

    @property
    def client(self) -> Any:
        return self._access.client

    def for_writing(self) -> None:
        """From now on, credentials that may write sign the requests."""
        if not self._write:
            self._write, self._known_access = True, None

    def close(self) -> None:
        """Ends the connections of a client that was made here; the next request makes another one."""
        access, self._known_access = self._known_access, None
        if access is not None and self._options.client_factory is None:
            with contextlib.suppress(Exception):
                access.client.close()

    def read(self, known: Optional[Read]) -> Optional[Read]:
        """The object, which is `known` itself if it is still that one; ``None``: there is none.

        Raises:
            StreamError: The store refused, or did not answer.
        """
        client = self.client
        params = {**self._location.params, **params_of(client, "get_object", self._options.extra("get"))}
        if known is not None and known.tag:
            params["IfNoneMatch"] = known.tag
        for left in reversed(range(_READS)):
            try:
                with self._translated("read", passes=(304, 404)):
                    answer = client.get_object(**params)
                    found = Read(answer["Body"].read(), str(answer.get("ETag", "")))
                    return known if known is not None and known.content == found.content else found
            except _Status as told:
                return known if told.status == 304 else None
            except StreamError as error:
                if error.status is not None or not left:
                    raise
        raise AssertionError

    def write(self, content: bytes, known: Optional[Read]) -> Read:
        """Replaces `known`, or creates the object where that is ``None``.

        Raises:
            NotMetError: The object is another one by now.
            StreamError: The store refused, or did not answer.
        """
        failure: Exception
        try:
            written = self._put(content, known)
            if self.takes_conditions:
                return written
            failure = NotMetError()
        except (NotMetError, StreamError) as error:
            failure = error
        # The answer to an earlier try may have been lost; or the store knows no conditions.
        try:
            found = self.read(None)
        except OSError as error:
            raise (failure if isinstance(failure, StreamError) else error) from None  # the first tells more
        if found is None or found.content != content:
            raise failure
        return found

    def _put(self, content: bytes, known: Optional[Read]) -> Read:
        client = self.client
        extra = params_of(client, "put_object", self._options.extra("put"))
        params = {**self._location.params, **{name: value for name, value in extra.items() if name[:2] != "If"}}
        params.update(Body=content, ContentType="application/json", CacheControl="no-cache")
        conditions: Mapping[str, str] = {"IfNoneMatch": "*"} if known is None else {"IfMatch": known.tag}
        if self.takes_conditions and params_of(client, "put_object", conditions) == conditions:
            try:
                with self._translated("write", passes=(*_NOT_MET, 501)):
                    return Read(content, str(client.put_object(**params, **conditions)["ETag"]))
            except _Status as found:
                if found.status != 501:
                    if found.status == 404 and found.code == "NoSuchBucket":
                        raise found.error from None
                    raise NotMetError from None
                self.takes_conditions = False
        with self._translated("write"):
            return Read(content, str(client.put_object(**params)["ETag"]))

    @contextlib.contextmanager
    def _translated(self, operation: str, passes: tuple[int, ...] = ()) -> Iterator[None]:
        """Raises errors of botocore as the package's own, those with some statuses as :class:`_Status`."""
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            yield
        except (BotoCoreError, ClientError, ResponseParserError, StreamError) as error:
            told = translated(error, operation, self._access.describe(self._location))
            if told.status in passes:
                raise _Status(told, s3_code(error)) from error
            raise told from error


class _Status(Exception):
    """An answer that the caller has a use for."""

    def __init__(self, error: StreamError, code: str) -> None:
        super().__init__(str(error))
        self.error, self.status, self.code = error, error.status, code

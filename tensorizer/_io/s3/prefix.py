"""The objects below an ``s3://`` prefix: which there are, and deleting some."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tensorizer._io.s3.access import resolve
from tensorizer._io.s3.errors import s3_code, translated
from tensorizer._io.s3.options import S3Defaults, S3Options, parse_s3_uri

__all__ = ["S3Prefix"]

# Requests at the same time. One request for many objects is not known to every store.
_DELETIONS = 8


class S3Prefix:
    """A prefix, as if it were a folder: objects further down are not part of it.

    Raises:
        ValueError: Not an S3 URI.
    """

    def __init__(self, uri: str, options: S3Options, defaults: S3Defaults) -> None:
        location = parse_s3_uri(uri.rstrip("/") + "/_")  # URIs name objects
        self._bucket = location.bucket
        self._prefix = location.key[:-1]
        self._access = resolve(location, options, defaults, write=True)
        self._name = self._access.describe(location)

    def names(self) -> list[str]:
        """The names behind the prefix.

        Raises:
            OSError: The store refused, or did not answer.
        """
        pages = self._access.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix, Delimiter="/"
        )
        begin = len(self._prefix)
        found: list[str] = self._ask(
            "list", lambda: [item["Key"][begin:] for page in pages for item in page.get("Contents", ())]
        )
        return found

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; those that are gone already are no error. Raises as :meth:`names`."""
        if not names:
            return
        client = self._access.client  # made here: making clients is not safe from threads, using them is

        def delete(name: str) -> None:
            self._ask("delete", lambda: self._delete(client, self._prefix + name))

        with ThreadPoolExecutor(min(_DELETIONS, len(names)), "tensorizer-delete") as threads:
            list(threads.map(delete, names))

    def _delete(self, client: Any, key: str) -> None:
        try:
            client.delete_object(Bucket=self._bucket, Key=key)
        except Exception as error:
            if s3_code(error) not in ("404", "NoSuchKey"):
                raise

    def _ask(self, operation: str, request: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return request()
        except (BotoCoreError, ClientError) as error:
            raise translated(error, operation, self._name) from error

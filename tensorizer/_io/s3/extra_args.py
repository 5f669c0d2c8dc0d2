"""Parameters of S3 requests that callers add: ``s3_extra_args={"get": {...}, "put": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from tensorizer._system.redaction import hidden

__all__ = ["check_kinds", "check_names", "params_of"]

_METHODS = {
    "get": ("get_object",),
    "put": ("put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload"),
}
# What the requests set themselves.
_OWN = frozenset({"Bucket", "Key", "Body", "UploadId", "PartNumber", "MultipartUpload", "ContentLength", "ContentMD5"})
_OWN_OF_GET = frozenset({"Range", "IfMatch", "IfUnmodifiedSince"})


def check_kinds(extra_args: Optional[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The argument with text in it that no ``repr`` shows: some of it is a key.

    Raises:
        ValueError: Something else than ``get`` and ``put``.
        TypeError: No mappings.
    """
    if extra_args is None:
        return {}
    if not isinstance(extra_args, Mapping) or not all(isinstance(names, Mapping) for names in extra_args.values()):
        raise TypeError("s3_extra_args: wanted a mapping from 'get' and 'put' to mappings of parameters")
    unknown = sorted(map(str, extra_args.keys() - _METHODS.keys()))
    if unknown:
        raise ValueError(f"s3_extra_args: wanted 'get' and 'put', found {', '.join(unknown)}")
    return {
        kind: {name: hidden(value) if isinstance(value, str) else value for name, value in names.items()}
        for kind, names in extra_args.items()
    }


def check_names(client: Any, kind: str, given: Mapping[str, Any]) -> None:
    """Refuses names that no request of this kind has, as botocore knows them.

    Raises:
        ValueError: Such names, or names of what the requests set themselves.
    """
    if not given:
        return
    methods = _METHODS[kind]
    known = set().union(*(_members(client, method) for method in methods)) - _OWN
    if kind == "get":
        known -= _OWN_OF_GET
    wrong = sorted(name for name in given if name not in known or (kind == "put" and name.startswith("Checksum")))
    if wrong:
        raise ValueError(f"s3_extra_args[{kind!r}]: no parameters that {', '.join(methods)} can be given: {wrong}")


def params_of(client: Any, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those parameters that belong to one method of the client."""
    return {name: value for name, value in given.items() if name in _members(client, method)} if given else {}


def _members(client: Any, method: str) -> set[str]:
    operation = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
    return set(operation.input_shape.members)

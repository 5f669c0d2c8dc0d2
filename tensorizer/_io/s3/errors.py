"""What errors of botocore say, without secrets."""

from __future__ import annotations

from typing import Any

from tensorizer._system.redaction import without_secrets
from tensorizer.errors import StreamError, StreamNotFoundError

__all__ = ["explain", "s3_code", "translated"]

_HINTS = {
    "301": "the bucket is in another region or at another endpoint: set s3_region_name or s3_endpoint",
    "403": "the credentials do not allow this, or are wrong",
    "404": "there is no such bucket or key: check URI and endpoint",
    "RequestTimeTooSkewed": "the clock of this computer is wrong",
    "NoSuchBucket": "there is no such bucket at this endpoint",
}


def explain(error: Exception, operation: str, name: str) -> str:
    """A message for a botocore error: object, endpoint, source of credentials, status, S3 code, hint; no secret."""
    response = getattr(error, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    hint = _HINTS.get(code) or _HINTS.get(status)
    reason = f"status {status} [{code}]" if response else without_secrets(str(error))
    return f"Failed to {operation} {name}: {reason}" + (f"; {hint}" if hint else "")


def s3_code(error: Any) -> str:
    """The S3 error code of a botocore error; empty where there is none."""
    return str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))


def translated(error: Any, operation: str, name: str) -> StreamError:
    """The package's own error for one of botocore's."""
    status = (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    kind = StreamNotFoundError if status == 404 else StreamError
    result = kind(explain(error, operation, name))
    result.source, result.status = name, status
    return result

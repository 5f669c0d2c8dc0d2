"""What a caller says about an object in a store, and what programs may replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional
from urllib.parse import parse_qs

from tensorizer._io.options import HTTPOptions
from tensorizer._io.s3.extra_args import check_kinds
from tensorizer._io.uri import split_uri
from tensorizer._system import checks

if TYPE_CHECKING:
    from tensorizer._io.certificates import CAInfo
    from tensorizer._io.s3.credentials import ConfigPath, ParsedCredentials

__all__ = ["READ_ENDPOINT", "WRITE_ENDPOINT", "S3Defaults", "S3Location", "S3Options", "parse_s3_uri"]

# Where keys go for which nobody names an endpoint.
READ_ENDPOINT = "accel-object.ord1.coreweave.com"
WRITE_ENDPOINT = "object.ord1.coreweave.com"


class S3Location(NamedTuple):
    """A bucket, a key, and perhaps one version of the object."""

    bucket: str
    key: str
    version: Optional[str] = None

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}" + (f"?versionId={self.version}" if self.version else "")

    @property
    def is_express(self) -> bool:
        """Whether the bucket is one of S3 Express, which only AWS has: its requests are signed for sessions."""
        return self.bucket.endswith("--x-s3")

    @property
    def params(self) -> dict[str, Any]:
        """As requests for the object name it."""
        return {"Bucket": self.bucket, "Key": self.key, **({"VersionId": self.version} if self.version else {})}


def parse_s3_uri(uri: str) -> S3Location:
    """Splits ``s3://bucket/key[?versionId=...]``; the rest of the query, and a fragment, are no part of the key.

    Raises:
        TypeError: No ``str``.
        ValueError: Another scheme, no bucket, or keys in front of it.
    """
    parts = split_uri(checks.text("S3 URI", uri))
    if parts.scheme != "s3" or not parts.authority:
        raise ValueError("Invalid S3 URI: wanted s3://bucket/key, found another scheme or no bucket")
    if "@" in parts.authority:
        raise ValueError(
            "Invalid S3 URI: wanted s3://bucket/key, found an at sign in place of the bucket; keys are no part of the "
            "URI: pass s3_access_key_id and s3_secret_access_key"
        )
    version = parse_qs(parts.query).get("versionId", [None])[-1]
    return S3Location(parts.authority, parts.path.lstrip("/"), version)


_TEXTS = (
    "access_key_id", "secret_access_key", "endpoint", "region_name", "session_token", "profile",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class S3Options:
    """What the caller passed; the fields are keywords of :func:`tensorizer.stream_io.open_stream`, without ``s3_``."""

    access_key_id: Optional[str] = dataclasses.field(default=None, repr=False)
    secret_access_key: Optional[str] = dataclasses.field(default=None, repr=False)
    endpoint: Optional[str] = dataclasses.field(default=None, repr=False)  # may hold a password
    config_path: Optional[ConfigPath] = None
    force_http: Optional[bool] = None
    region_name: Optional[str] = None
    signature_version: Optional[str] = None
    session_token: Optional[str] = dataclasses.field(default=None, repr=False)
    profile: Optional[str] = None
    client_factory: Optional[Callable[..., Any]] = None
    extra_args: Optional[Mapping[str, Mapping[str, Any]]] = dataclasses.field(default=None, repr=False)
    memory_budget: Optional[int] = None
    certificate_handling: Optional[CAInfo] = None
    http_options: Optional[HTTPOptions] = None

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None:
                checks.text(f"s3_{name}", value)
        if self.memory_budget is not None:
            checks.integer("memory_budget", self.memory_budget, 1, wanted="a number of bytes above 0")
        if self.http_options is not None and not isinstance(self.http_options, HTTPOptions):
            raise TypeError(f"http_options: wanted HTTPOptions or None, found {type(self.http_options).__name__}")
        object.__setattr__(self, "extra_args", check_kinds(self.extra_args))

    def extra(self, kind: str) -> Mapping[str, Any]:
        """The caller's own parameters of ``"get"`` or ``"put"`` requests."""
        return (self.extra_args or {}).get(kind, {})


@dataclasses.dataclass(frozen=True)
class S3Defaults:
    """What :mod:`tensorizer.stream_io` lets programs replace, as it is at the time of one call.

    Attributes:
        infer_credentials: Finds keys from those of the arguments and a configuration file.
        enforce_scheme: Makes an endpoint a URL.
        read_endpoint: Used where nobody names one, for reads.
        write_endpoint: The same for writes.
        download_url: Makes the URLs of reads; ``None`` for the package's own.
        download: Opens objects for reading; ``None`` for the package's own.
        upload: Uploads local files; ``None`` for the package's own.
    """

    infer_credentials: Callable[[Optional[str], Optional[str], Optional[ConfigPath]], ParsedCredentials]
    enforce_scheme: Callable[[str, bool, bool], str]
    read_endpoint: str = READ_ENDPOINT
    write_endpoint: str = WRITE_ENDPOINT
    download_url: Optional[Callable[..., str]] = None
    download: Optional[Callable[..., Any]] = None
    upload: Optional[Callable[..., None]] = None

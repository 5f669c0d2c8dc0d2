"""What a caller says about an object in a store."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union
from urllib.parse import unquote_plus

from tensorizer._io.http_options import HTTPOptions
from tensorizer._io.uri import is_arn, split_uri
from tensorizer._system import checks

if TYPE_CHECKING:
    from tensorizer._io.call_options import StreamOptions
    from tensorizer._io.certificates import CAInfo

ConfigPath = Union[str, bytes, "os.PathLike[Any]"]

# Where keys go for which nobody names an endpoint.
READ_ENDPOINT = "accel-object.ord1.coreweave.com"
WRITE_ENDPOINT = "object.ord1.coreweave.com"


@dataclasses.dataclass
class Defaults:
    """What programs may assign in ``stream_io``: endpoints where nobody names one, and files of s3cmd."""

    read_endpoint: str = READ_ENDPOINT
    write_endpoint: str = WRITE_ENDPOINT
    config_paths: tuple[str, ...] = (os.path.expanduser("~/.s3cfg"),)


#: Looked up by every call.
DEFAULTS = Defaults()


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
    def is_of_aws(self) -> bool:
        """Whether only AWS has such buckets: those of S3 Express, and access points."""
        return self.is_express or is_arn(self.bucket)

    @property
    def params(self) -> dict[str, Any]:
        """As requests for the object name it."""
        return {"Bucket": self.bucket, "Key": self.key, **({"VersionId": self.version} if self.version else {})}


def parse_s3_uri(uri: str) -> S3Location:
    """Splits ``s3://bucket/key[?versionId=...]``. Everything else behind the first slash is the key, as it stands.

    Raises:
        TypeError: No ``str``.
        ValueError: Another scheme, no bucket or key, no version, or keys in front of the bucket.
    """
    parts = split_uri(checks.text("S3 URI", uri))
    if parts.scheme != "s3" or not parts.authority:
        raise ValueError("Invalid S3 URI: expected s3://bucket/key, got another scheme or no bucket")
    if "@" in parts.authority:
        raise ValueError(
            "Invalid S3 URI: expected s3://bucket/key, got an at sign in place of the bucket; keys are no part of the "
            "URI: pass s3_access_key_id and s3_secret_access_key"
        )
    if re.search("[?#]", parts.authority):
        raise ValueError("Invalid S3 URI: expected s3://bucket/key, got a ? or # in place of the first slash")
    if parts.authority.startswith("arn:") and not is_arn(parts.authority):
        raise ValueError(
            "Invalid S3 URI: expected the ARN of an access point (arn:aws:s3:REGION:ACCOUNT:accesspoint/NAME) and a "
            f"key, got {parts.authority}/{parts.path}"
        )
    if not parts.path:
        raise ValueError(f"Invalid S3 URI: expected s3://bucket/key, got no key behind s3://{parts.authority}")
    version = unquote_plus(parts.query.removeprefix("versionId=")) if parts.query else None
    if version == "":
        raise ValueError(f"{uri}: expected a version behind ?versionId=, got none")
    return S3Location(parts.authority, parts.path, version)


_TEXTS = (
    "access_key_id", "secret_access_key", "endpoint", "region_name", "session_token", "profile",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class S3Options:
    """All that is said of objects in a store, but which one: the keywords of :func:`tensorizer.stream_io.open_stream`,
    without ``s3_``, and the defaults that programs may assign in that module, as they are at the time of the call."""

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

    # Files of s3cmd that are looked for where no `config_path` is given.
    default_config_paths: tuple[str, ...] = ()
    # Where nobody names an endpoint.
    read_endpoint: str = dataclasses.field(default=READ_ENDPOINT, repr=False)
    write_endpoint: str = dataclasses.field(default=WRITE_ENDPOINT, repr=False)

    @classmethod
    def of(cls, stream: StreamOptions) -> S3Options:
        """From the keywords of ``open_stream`` that S3 uses, and the defaults as they are now."""
        return cls(
            access_key_id=stream.s3_access_key_id,
            secret_access_key=stream.s3_secret_access_key,
            endpoint=stream.s3_endpoint,
            config_path=stream.s3_config_path,
            force_http=stream.force_http,
            region_name=stream.s3_region_name,
            signature_version=stream.s3_signature_version,
            session_token=stream.s3_session_token,
            profile=stream.s3_profile,
            client_factory=stream.s3_client_factory,
            extra_args=stream.s3_extra_args,
            memory_budget=stream.memory_budget,
            certificate_handling=stream.certificate_handling,
            http_options=stream.http_options or HTTPOptions(),  # one for all objects of the call
            default_config_paths=DEFAULTS.config_paths,
            read_endpoint=DEFAULTS.read_endpoint,
            write_endpoint=DEFAULTS.write_endpoint,
        )

    @property
    def trust(self) -> Optional[CAInfo]:
        """Whom the caller trusts, where he says so: for the call, or in its settings."""
        http = self.http_options
        return self.certificate_handling or (None if http is None else http.certificate_handling)

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None:
                checks.text(f"s3_{name}", value)
        if self.memory_budget is not None:
            checks.integer("memory_budget", self.memory_budget, 1, wanted="a number of bytes above 0")
        if self.http_options is not None and not isinstance(self.http_options, HTTPOptions):
            raise TypeError(f"http_options: expected HTTPOptions or None, got {type(self.http_options).__name__}")
        object.__setattr__(self, "extra_args", _checked_kinds(self.extra_args))

    def extra(self, kind: str) -> Mapping[str, Any]:
        """The caller's own parameters of ``"get"`` or ``"put"`` requests."""
        return (self.extra_args or {}).get(kind, {})


# --- parameters of requests that callers add: s3_extra_args={"get": {...}, "put": {...}} ----------------------------

_METHODS = {
    "get": ("get_object",),
    "put": ("put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload"),
}
# What the requests set themselves.
_OWN = frozenset({"Bucket", "Key", "Body", "UploadId", "PartNumber", "MultipartUpload", "ContentLength", "ContentMD5"})
_OWN_OF_GET = frozenset({"Range", "IfMatch", "IfUnmodifiedSince"})


def _checked_kinds(extra_args: Optional[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The argument as it is now.

    Raises:
        ValueError: Something else than ``get`` and ``put``.
        TypeError: No mappings.
    """
    if extra_args is None:
        return {}
    if not isinstance(extra_args, Mapping) or not all(isinstance(names, Mapping) for names in extra_args.values()):
        raise TypeError("s3_extra_args: expected a mapping from 'get' and 'put' to mappings of parameters")
    unknown = sorted(map(str, extra_args.keys() - _METHODS.keys()))
    if unknown:
        raise ValueError(f"s3_extra_args: expected 'get' and 'put', got {', '.join(unknown)}")
    return {kind: dict(names) for kind, names in extra_args.items()}


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

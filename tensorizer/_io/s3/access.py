"""An object in a store: the arguments of the caller, the credentials, the endpoint, and signed requests.

The order of the sources of credentials and endpoint is that of docs/remote_stores.md, "S3".
"""

from __future__ import annotations

import configparser
import dataclasses
import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union
from urllib.parse import parse_qs, unquote_plus, urlsplit

from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.http_options import CAInfo, HTTPOptions, check_certificates
from tensorizer._io.s3.client import (
    check_endpoint,
    chosen_checksums,
    configured_endpoint,
    enforce_scheme,
    expect_answers,
    make_client,
    make_session,
    translated,
    trust_of_parts,
)
from tensorizer._io.uri import is_arn, split_uri
from tensorizer._system import locks
from tensorizer._system.config import integer, text
from tensorizer._system.redaction import shown_uri

if TYPE_CHECKING:
    from tensorizer import _C
    from tensorizer._io.call_options import StreamOptions

logger = logging.getLogger("tensorizer.s3")

_announced: set[tuple[str, str]] = set()  # what was logged already

ConfigPath = Union[str, bytes, "os.PathLike[Any]"]

# Where keys go if no endpoint is named.
READ_ENDPOINT = "accel-object.ord1.coreweave.com"
WRITE_ENDPOINT = "object.ord1.coreweave.com"


@dataclasses.dataclass
class Defaults:
    """What programs may assign in ``stream_io``: endpoints for calls that name none, and files of s3cmd."""

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
    if not isinstance(uri, str) or not uri.isascii():
        text("S3 URI", uri)
    parts = split_uri(uri)
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
    # For calls that name no endpoint.
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
                text(f"s3_{name}", value)
        if self.memory_budget is not None:
            integer("memory_budget", self.memory_budget, 1, wanted="a number of bytes above 0")
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


# --- credentials ------------------------------------------------------------------------------------------------------


class ParsedCredentials(NamedTuple):
    """What arguments and a configuration file of s3cmd say together. Shows no keys."""

    config_file: Optional[str]
    s3_endpoint: Optional[str]
    s3_access_key: Optional[str]
    s3_secret_key: Optional[str]
    use_https: Optional[bool]

    def __repr__(self) -> str:
        endpoint = self.s3_endpoint and shown_uri(self.s3_endpoint)
        return f"ParsedCredentials(config_file={self.config_file!r}, s3_endpoint={endpoint!r}, keys redacted)"


def infer_credentials(
    s3_access_key_id: Optional[str],
    s3_secret_access_key: Optional[str],
    s3_config_path: Optional[ConfigPath],
    default_paths: Sequence[str],
) -> ParsedCredentials:
    """Keys from the arguments, and where one is missing from a configuration file of s3cmd.

    Without `s3_config_path` that is the first of `default_paths` that exists.

    Raises:
        ValueError: A key is still missing, or there is no default file.
        FileNotFoundError: ``s3_config_path`` does not exist.
        configparser.Error: The file is no INI file.
    """
    if s3_access_key_id is not None and s3_secret_access_key is not None:
        return ParsedCredentials(None, None, s3_access_key_id, s3_secret_access_key, None)
    path = _config_file(s3_config_path, default_paths)
    parser = configparser.ConfigParser(interpolation=None)  # a secret may hold a percent sign
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file, source=path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"S3 credentials were not provided, and {path} cannot be read: {error}") from None
    except configparser.Error as error:  # which quotes lines
        line = getattr(error, "lineno", None) or next((number for number, _ in getattr(error, "errors", ())), "?")
        clean = type(error).__new__(type(error))  # of the same kind, without the lines
        configparser.Error.__init__(clean, f"{path}, line {line}: not as files of s3cmd are ({type(error).__name__})")
        raise clean from None
    if "default" not in parser:
        raise ValueError(f"S3 credentials were not provided, and {path} has no section [default]")
    section = parser["default"]
    found = ParsedCredentials(
        config_file=path,
        s3_endpoint=section.get("host_base") or None,
        s3_access_key=s3_access_key_id or section.get("access_key") or None,
        s3_secret_key=s3_secret_access_key or section.get("secret_key") or None,
        use_https={"True": True, "False": False}.get(section.get("use_https", "")),
    )
    if found.s3_access_key is None or found.s3_secret_key is None:
        missing = "s3_access_key_id" if found.s3_access_key is None else "s3_secret_access_key"
        raise ValueError(f"S3 credentials are not complete: {missing} was not provided, and is not in {path} either")
    return found


def _config_file(wanted: Optional[ConfigPath], default_paths: Sequence[str]) -> str:
    if wanted:
        path = os.path.expanduser(os.fsdecode(wanted))
        if not os.path.exists(path):
            raise FileNotFoundError(f"s3_config_path does not exist: {path}")
        return path
    for candidate in default_paths:
        if os.path.exists(candidate):
            return candidate
    raise ValueError("S3 credentials were not provided, and there is no .s3cfg file")


class _Identity(NamedTuple):
    """Whose credentials requests are signed with. Shows no keys."""

    keys: tuple[Optional[str], Optional[str]]  # (None, None): those of the AWS chain, if there are any
    source: str
    unsigned: bool = False
    from_chain: bool = False
    refreshes: bool = False  # the credentials change from time to time

    def __repr__(self) -> str:
        return f"_Identity({self.source!r}, keys redacted)"

    @property
    def has_keys(self) -> bool:
        """Whether arguments or a configuration file of s3cmd gave keys."""
        return not self.unsigned and None not in self.keys


class S3Access:
    """A boto3 client, made when first used, and what messages say about it. Shows no keys.

    Attributes:
        endpoint: URL of the store; ``None`` for AWS's own.
        source: Where the credentials came from, in words.
        refreshes: Whether the credentials change from time to time.
        checksums: What the user's AWS settings say of checksums of requests: ``"when_supported"``,
            ``"when_required"``, or ``None`` for nothing.
    """

    def __init__(
        self,
        make_client: Callable[[], Any],
        endpoint: Optional[str],
        identity: _Identity,
        options: S3Options,
        checksums: Optional[str] = None,
        session: Any = None,
    ) -> None:
        self._make_client = make_client
        self._session = session
        self._options = options
        self._client: Any = None
        self._lock = threading.Lock()
        locks.makers[self] = threading.Lock
        self.endpoint = endpoint
        self.source = identity.source
        self.refreshes = identity.refreshes
        self.checksums = checksums

    @property
    def client(self) -> Any:
        with self._lock:  # botocore makes clients of one session in one thread only
            if self._client is None:
                self._client = self._make_client()
        return self._client

    @functools.cached_property
    def host(self) -> str:
        """Host and port, for messages."""
        return split_uri(self.endpoint or self.client.meta.endpoint_url).authority.rpartition("@")[2]

    @property
    def is_secure(self) -> bool:
        """Whether the store is reached over TLS."""
        return not (self.endpoint or self.client.meta.endpoint_url).lower().startswith("http:")

    @functools.cached_property
    def reads(self) -> _C.HttpOptions:
        """How objects are requested from it, where no headers were signed."""
        return self.reads_with({})

    def reads_with(self, headers: Mapping[str, str]) -> _C.HttpOptions:
        """How an object is requested with headers that were signed."""
        options = self._options
        check_certificates(options.certificate_handling)
        http = options.http_options or HTTPOptions()
        return http._native(headers, options.certificate_handling, secure=self.is_secure)

    def signed(self, location: S3Location, extra: Mapping[str, Any]) -> SignedRead:
        """The request for an object, good for 24 to 48 hours; plain where there are no credentials.

        Raises:
            StreamError: There are none, and there should be.
        """
        from botocore.exceptions import NoCredentialsError

        name, seconds = self.describe(location), url_seconds()
        try:
            request = presign(self.client, "get_object", {**location.params, **extra}, seconds)
        except NoCredentialsError as error:
            raise translated(error, "read", name) from error
        lifetime = _CHANGING_SECONDS if self.refreshes else max(60.0, seconds - _RENEW_SECONDS)
        return SignedRead(request.url, request.headers, _SESSION_SECONDS if location.is_express else lifetime, name)

    @property
    def trust_of_parts(self) -> Optional[CAInfo]:
        """Whom those requests of an upload trust that boto3 does not send; ``None`` for what variables and system say.

        Raises:
            StreamError: The AWS settings name a file that is not there.
        """
        trust = self._options.trust
        if trust is not None or self._session is None or not self.is_secure:
            return trust
        return trust_of_parts(self._session)

    def describe(self, location: S3Location) -> str:
        """The object as messages call it."""
        return f"{location} (endpoint {self.host}, {self.source})"

    def announce(self) -> None:
        """Says once per process what is used."""
        if (self.host, self.source) not in _announced:
            _announced.add((self.host, self.source))
            logger.info("S3 endpoint %s, %s", self.host, self.source)


def resolve(location: S3Location, options: S3Options, call: CallOptions = PLAIN, *, write: bool) -> S3Access:
    """Finds credentials and endpoint. The reads and writes of one call have one client where these are the same.

    Args:
        location: Of the object.
        options: What the caller passed. Its default endpoints are used where no source names one, unless the
            credentials are of the AWS chain, or the bucket is one that only AWS has.
        call: Shares the client.
        write: For writing. Without any credentials, reads go on unsigned.

    Raises:
        ValueError: Plain HTTP without permission; a malformed endpoint; a token without keys; a configuration
            file that was named, and is missing or holds no keys.
        configparser.Error: The configuration file is not an INI file.
        botocore.exceptions.BotoCoreError: Half of the keys, an unknown profile.
    """
    if options.client_factory is not None:
        client = call.once(options.client_factory, options.client_factory)
        expect_answers(client)
        identity = _Identity((None, None), "credentials of the client factory", refreshes=True)
        config = getattr(client.meta, "config", None)
        checksums = getattr(config, "request_checksum_calculation", None)
        required = "when_required" if checksums == "when_required" else None  # the other value is a mere default
        access = S3Access(lambda: client, client.meta.endpoint_url, identity, options, required)
        access.announce()
        return access
    if options.session_token is not None and None in (options.access_key_id, options.secret_access_key):
        raise ValueError("s3_session_token belongs to keys: pass s3_access_key_id and s3_secret_access_key with it")
    config = _file_or_arguments(options)
    session = make_session(options.profile)  # boto3 makes one client of a session, not two
    identity = _identify(session, options, config, anonymous=not write)
    endpoint = _endpoint(session, options, config)
    is_default = endpoint is None and not identity.from_chain and not location.is_of_aws
    if is_default:
        default = options.write_endpoint if write else options.read_endpoint
        endpoint = _as_url(default, options, config, allow_http=False) if default else None
    access = _access(session, options, identity, endpoint, location, call)
    access.announce()
    if is_default and identity.has_keys:
        _warn_of_default(access)
    return access


def store_of(location: S3Location, call: CallOptions, *, write: bool) -> tuple[S3Options, S3Access]:
    """What the caller said, and the access to the store, of which one call has one for all its objects.

    Copies of a call, with which it shares the access, may say other arguments of requests.
    """
    options = call.once(("arguments", call.stream), lambda: S3Options.of(call.stream))

    def found() -> S3Access:
        return resolve(location, options, call, write=write)

    return options, call.once(("store", location.bucket, write), found)


def named_endpoint(options: S3Options) -> Optional[str]:
    """URL of the store that reads go to; ``None`` if no source names one. Asks for no credentials."""
    if options.client_factory is not None:
        url: str = options.client_factory().meta.endpoint_url
        return url
    return _endpoint(make_session(options.profile), options, _file_or_arguments(options))


def explicit_access(
    location: S3Location,
    access_key_id: Optional[str],
    secret_access_key: Optional[str],
    endpoint: Optional[str],
    region_name: Optional[str],
    signature_version: Optional[str],
    certificate_handling: Optional[CAInfo] = None,
    *,
    write: bool,
) -> S3Access:
    """The arguments or the AWS chain, at exactly this endpoint; no configuration file of s3cmd is read."""
    options = S3Options(
        access_key_id=access_key_id,
        secret_access_key=secret_access_key,
        region_name=region_name,
        signature_version=signature_version,
        certificate_handling=certificate_handling,
    )
    if endpoint and "://" not in endpoint:
        endpoint = "https://" + endpoint
    session = make_session(None)
    identity = _identify(session, options, None, anonymous=not write)
    return _access(session, options, identity, endpoint or None, location)


def _warn_of_default(access: S3Access) -> None:
    """Warns once per host that keys go to a host that the caller did not name."""
    if (access.host, "") not in _announced:
        _announced.add((access.host, ""))
        logger.warning(
            "no S3 endpoint was named: requests signed with %s go to the default host %s; "
            "pass s3_endpoint or set AWS_ENDPOINT_URL_S3",
            access.source,
            access.host,
        )


def _file_or_arguments(options: S3Options) -> Optional[ParsedCredentials]:
    """``None`` sends the search on to the AWS chain. A profile is part of that chain and goes before ``~/.s3cfg``."""
    incomplete = options.access_key_id is None or options.secret_access_key is None
    if options.profile is not None and incomplete and options.config_path is None:
        return None
    try:
        return infer_credentials(
            options.access_key_id, options.secret_access_key, options.config_path, options.default_config_paths
        )
    except (ValueError, FileNotFoundError) as error:
        if options.config_path is None:
            return None
        raise ValueError(f"s3_config_path: {error}") from None


def _identify(session: Any, options: S3Options, config: Optional[ParsedCredentials], anonymous: bool) -> _Identity:
    if config is not None:
        keys = (config.s3_access_key, config.s3_secret_key)
    else:
        keys = (options.access_key_id, options.secret_access_key)
    if keys == ("", ""):
        return _Identity(keys, "anonymous", unsigned=True)
    if config is not None and config.config_file is not None:
        return _Identity(keys, f"credentials from {config.config_file}")
    if keys != (None, None):
        return _Identity(keys, "credentials from the arguments")
    chain = session.get_credentials()
    if chain is None:
        return _Identity(keys, "anonymous" if anonymous else "no credentials", unsigned=anonymous)
    source = f"credentials from the AWS chain ({chain.method})"
    return _Identity(keys, source, from_chain=True, refreshes=hasattr(chain, "refresh_needed"))


def _endpoint(session: Any, options: S3Options, config: Optional[ParsedCredentials]) -> Optional[str]:
    """URL of the store; ``None`` if no source names one."""
    endpoint = options.endpoint or (config.s3_endpoint if config is not None else None)
    if endpoint:
        return _as_url(endpoint, options, config, allow_http=False)
    endpoint = configured_endpoint(session)
    return None if endpoint is None else _as_url(endpoint, options, config, allow_http=True)


def _as_url(endpoint: str, options: S3Options, config: Optional[ParsedCredentials], allow_http: bool) -> str:
    force_http = options.force_http
    if force_http is None:
        force_http = config is not None and config.use_https is False
    return enforce_scheme(endpoint, allow_http, force_http)


def _access(
    session: Any,
    options: S3Options,
    identity: _Identity,
    endpoint: Optional[str],
    location: S3Location,
    call: CallOptions = PLAIN,
) -> S3Access:
    if endpoint is not None:
        check_endpoint(endpoint)

    def make() -> Any:
        from botocore import UNSIGNED

        keys = (None, None, None) if identity.unsigned else (*identity.keys, options.session_token)
        # Sessions have signatures of their own, which botocore finds where it may choose.
        named = None if location.is_express else options.signature_version or "s3v4"
        signature = UNSIGNED if identity.unsigned else named
        region, http = options.region_name, options.http_options
        return make_client(session, endpoint, keys, region, signature, options.trust, http)

    checksums = chosen_checksums(session, "request_checksum_calculation")
    signing = (options.session_token, options.region_name, options.signature_version, location.is_express)
    key = ("client", options.profile, identity, endpoint, signing, options.trust, options.http_options)
    access = S3Access(lambda: call.once(key, make), endpoint, identity, options, checksums, session)
    if None in identity.keys and identity.keys != (None, None):
        access.client  # noqa: B018 - botocore says which half is missing
    return access


# --- presigned requests: their URLs, and the headers that were signed with them -------------------------------------

_DAY = 86400
# Presigned URLs are replaced this long before they expire.
_RENEW_SECONDS = 3600.0
# Signatures of credentials that change are worth no more than the credentials; those of S3 Express end after 300 s.
_CHANGING_SECONDS = 300.0
_SESSION_SECONDS = 60.0


class SignedRead(NamedTuple):
    """The request for an object, for how many seconds it is used, and what messages call the object."""

    url: str
    headers: dict[str, str]
    seconds: float
    name: str

    def __repr__(self) -> str:
        return f"SignedRead({self.name!r})"


def url_seconds() -> int:
    """Until the end of the next day: equal requests of one day get URLs that expire together, which caches like."""
    now = int(time.time())
    return (now // _DAY + 2) * _DAY - now


# The request that botocore is about to sign in this thread.
_signing = threading.local()


class SignedRequest(NamedTuple):
    """What has to be sent as it is. Shows nothing of it."""

    url: str
    headers: dict[str, str]

    def __repr__(self) -> str:
        return "SignedRequest(<hidden>)"


def presign(client: Any, method: str, params: dict[str, Any], seconds: int) -> SignedRequest:
    """Signs one request. Some of the parameters become part of the URL, others headers.

    Raises:
        botocore.exceptions.BotoCoreError: No credentials, a parameter that is missing or has another type.
    """
    _signing.headers = {}
    events = getattr(client.meta, "events", None)
    if events is not None:
        events.register("before-sign.s3", _remember, unique_id="tensorizer-presign")
    url = client.generate_presigned_url(method, Params=params, ExpiresIn=seconds)
    if not isinstance(url, str):  # of a client that the caller made; the extension would quote it
        raise TypeError(f"s3_client_factory: expected str from generate_presigned_url, got {type(url).__name__}")
    headers, _signing.headers = _signing.headers, {}
    return SignedRequest(url, {name: value for name, value in headers.items() if _is_sent(name, url)})


def _remember(request: Any, **_: Any) -> None:
    _signing.headers = {
        name.lower(): value.decode() if isinstance(value, bytes) else str(value)
        for name, value in request.headers.items()
    }


def _is_sent(name: str, url: str) -> bool:
    """Whether the header goes with the request, or is part of the URL already (signatures of version 2)."""
    query = parse_qs(urlsplit(url).query)
    if "X-Amz-SignedHeaders" in query:
        return name != "host" and name in query["X-Amz-SignedHeaders"][0].split(";")
    return "Signature" not in query and name not in ("host", "user-agent", "date", "expect", "content-length")

"""Who we are to an object store, and where it is: credentials, endpoint, and the boto3 client that follows from them.

The order of the sources is that of docs/remote.md, "S3". boto3 is imported when a client is first needed.
"""

from __future__ import annotations

import configparser
import dataclasses
import logging
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union
from urllib.parse import urlsplit

from tensorizer import stream_io
from tensorizer._crypto.key_material import hidden
from tensorizer._io.options import CAInfo
from tensorizer._system.config import env_text
from tensorizer._version import __version__

__all__ = [
    "S3Access",
    "S3Location",
    "S3Settings",
    "access_at",
    "enforce_scheme",
    "explain",
    "infer_credentials",
    "parse_s3_uri",
    "resolve",
]

logger = logging.getLogger("tensorizer.s3")

PathArgument = Union[str, bytes, "os.PathLike[Any]"]

# Stores that know buckets as host names only.
_VIRTUAL_HOSTS = ("cwobject.com", "cwlota.com")
_announced: set[tuple[str, str]] = set()  # what was logged already


class S3Location(NamedTuple):
    """A bucket and a key."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class ParsedCredentials(NamedTuple):
    """What arguments and a configuration file of s3cmd say together. Shows no keys."""

    config_file: Optional[str]
    s3_endpoint: Optional[str]
    s3_access_key: Optional[str]
    s3_secret_key: Optional[str]
    use_https: Optional[bool]

    def __repr__(self) -> str:
        return f"ParsedCredentials(config_file={self.config_file!r}, s3_endpoint={self.s3_endpoint!r}, keys redacted)"


@dataclasses.dataclass(frozen=True)
class S3Settings:
    """What the caller passed; the fields are the keywords of :func:`tensorizer.stream_io.open_stream`."""

    access_key_id: Optional[str] = dataclasses.field(default=None, repr=False)
    secret_access_key: Optional[str] = dataclasses.field(default=None, repr=False)
    endpoint: Optional[str] = None
    config_path: Optional[PathArgument] = None
    force_http: Optional[bool] = None
    region_name: Optional[str] = None
    signature_version: Optional[str] = None
    session_token: Optional[str] = dataclasses.field(default=None, repr=False)
    profile: Optional[str] = None
    client_factory: Optional[Callable[..., Any]] = None


def parse_s3_uri(uri: str) -> S3Location:
    """Splits ``s3://bucket/key``; query and fragment are no part of the key.

    Raises:
        ValueError: Another scheme, or no bucket.
    """
    parts = urlsplit(uri)
    if parts.scheme.lower() != "s3" or not parts.netloc:
        raise ValueError(f"Invalid S3 URI: {uri}")
    return S3Location(parts.netloc, parts.path.lstrip("/"))


# -- credentials -------------------------------------------------------------------------------------------------------


def infer_credentials(
    s3_access_key_id: Optional[str],
    s3_secret_access_key: Optional[str],
    s3_config_path: Optional[PathArgument] = None,
) -> ParsedCredentials:
    """Keys from the arguments, and where one is missing from a configuration file of s3cmd.

    Raises:
        ValueError: A key is still missing, or there is no default file.
        FileNotFoundError: ``s3_config_path`` does not exist.
        configparser.Error: The file is no INI file.
    """
    if s3_access_key_id is not None and s3_secret_access_key is not None:
        return ParsedCredentials(None, None, s3_access_key_id, s3_secret_access_key, None)
    path = _config_file(s3_config_path)
    parser = configparser.ConfigParser(interpolation=None)  # a secret may hold a percent sign
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file, source=path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"S3 credentials were not provided, and {path} cannot be read: {error}") from None
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


def _config_file(wanted: Optional[PathArgument]) -> str:
    if wanted:
        path = os.path.expanduser(os.fsdecode(wanted))
        if not os.path.exists(path):
            raise FileNotFoundError(f"s3_config_path does not exist: {path}")
        return path
    for candidate in stream_io._s3_default_config_paths:
        if os.path.exists(candidate):
            return candidate
    raise ValueError("S3 credentials were not provided, and there is no .s3cfg file")


# -- endpoints ---------------------------------------------------------------------------------------------------------


def enforce_scheme(endpoint: str, allow_http: bool = False, force_http: bool = False) -> str:
    """The endpoint as a URL: ``https://`` unless it says otherwise and may.

    Raises:
        ValueError: Plain HTTP that nobody asked for, or another scheme.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        return ("http://" if force_http else "https://") + endpoint
    if scheme.lower() == "https":
        return "http://" + rest if force_http else endpoint
    if scheme.lower() == "http" and (allow_http or force_http):
        return endpoint
    raise ValueError(f"Non-HTTPS endpoint URLs are not allowed: found {scheme}://; pass force_http=True for plain HTTP")


def _configured_endpoint(session: Any) -> Optional[str]:
    """What the environment and the profile say, as botocore orders them."""
    from_environment = env_text("AWS_ENDPOINT_URL_S3") or env_text("AWS_ENDPOINT_URL")
    profile = session.get_scoped_config()  # also says whether AWS_PROFILE exists
    if from_environment:
        return from_environment
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    for section in (profile.get("s3"), services.get("s3"), profile):
        if isinstance(section, dict) and section.get("endpoint_url"):
            return str(section["endpoint_url"])
    return None


# -- both together -----------------------------------------------------------------------------------------------------


class _Identity(NamedTuple):
    """Whose credentials requests are signed with."""

    keys: tuple[Optional[str], Optional[str]]  # (None, None): the AWS chain's, or nobody's
    source: str
    unsigned: bool = False
    from_chain: bool = False
    refreshes: bool = False  # the credentials change from time to time


class S3Access:
    """A boto3 client, made when first used, and what messages say about it. Shows no keys.

    Attributes:
        endpoint: URL of the store; ``None`` for AWS's own.
        source: Where the credentials came from, in words.
        refreshes: Whether the credentials change from time to time.
        arguments: What :func:`tensorizer.s3.s3_download` takes behind the URI.
    """

    def __init__(
        self, make_client: Callable[[], Any], endpoint: Optional[str], identity: _Identity, settings: S3Settings
    ) -> None:
        self._make_client = make_client
        self._client: Any = None
        self.endpoint = endpoint
        self.source = identity.source
        self.refreshes = identity.refreshes
        self.arguments = (*identity.keys, endpoint, settings.region_name, settings.signature_version)

    @property
    def client(self) -> Any:
        if self._client is None:
            self._client = self._make_client()
        return self._client

    @property
    def host(self) -> str:
        """Host and port, for messages."""
        return urlsplit(self.endpoint or self.client.meta.endpoint_url).netloc.rpartition("@")[2]

    def describe(self, location: S3Location) -> str:
        """The object as messages call it."""
        return f"{location} (endpoint {self.host}, {self.source})"

    def announce(self) -> None:
        """Says once per process what is used."""
        if (self.host, self.source) not in _announced:
            _announced.add((self.host, self.source))
            logger.info("S3 endpoint %s, %s", self.host, self.source)


def resolve(
    settings: S3Settings, default_endpoint: str, certificates: Optional[CAInfo] = None, anonymous: bool = False
) -> S3Access:
    """Finds credentials and endpoint.

    Args:
        settings: What the caller passed.
        default_endpoint: Used where no source names one, unless the credentials are of the AWS chain.
        certificates: Whom boto3 trusts; ``None`` for its own default.
        anonymous: Without any credentials, go on unsigned, as reads may.

    Raises:
        ValueError: Plain HTTP that nobody asked for; a token without keys.
        configparser.Error: The configuration file is no INI file.
        botocore.exceptions.BotoCoreError: Half of the keys, an unknown profile.
    """
    if settings.client_factory is not None:
        client = settings.client_factory()
        identity = _Identity((None, None), "credentials of the client factory", refreshes=True)
        access = S3Access(lambda: client, client.meta.endpoint_url, identity, settings)
        access.announce()
        return access
    if settings.session_token is not None and None in (settings.access_key_id, settings.secret_access_key):
        raise ValueError("s3_session_token belongs to keys: pass s3_access_key_id and s3_secret_access_key with it")
    config = _file_or_arguments(settings)
    session = _session(settings.profile)
    identity = _identify(session, settings, config, anonymous)
    endpoint = _endpoint(session, settings, config, None if identity.from_chain else default_endpoint)
    access = _access(session, settings, identity, endpoint, certificates)
    access.announce()
    return access


def access_at(settings: S3Settings, endpoint: Optional[str], anonymous: bool) -> S3Access:
    """The arguments or the AWS chain, at exactly this endpoint; no configuration file of s3cmd is read."""
    session = _session(None)
    return _access(session, settings, _identify(session, settings, None, anonymous), endpoint, None)


def _identify(session: Any, settings: S3Settings, config: Optional[ParsedCredentials], anonymous: bool) -> _Identity:
    if config is not None:
        keys = (config.s3_access_key, hidden(config.s3_secret_key))
    else:
        keys = (settings.access_key_id, hidden(settings.secret_access_key))
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


def _endpoint(
    session: Any, settings: S3Settings, config: Optional[ParsedCredentials], default: Optional[str]
) -> Optional[str]:
    allow_http = False
    endpoint = settings.endpoint or (config.s3_endpoint if config is not None else None)
    if not endpoint:
        endpoint = _configured_endpoint(session)
        allow_http = endpoint is not None
    if not endpoint:
        endpoint = default
    if not endpoint:
        return None
    force_http = settings.force_http
    if force_http is None:
        force_http = config is not None and config.use_https is False
    result: str = stream_io._enforce_scheme(endpoint, allow_http, force_http)
    return result


def _access(
    session: Any,
    settings: S3Settings,
    identity: _Identity,
    endpoint: Optional[str],
    certificates: Optional[CAInfo],
) -> S3Access:
    access = S3Access(
        lambda: _make_client(session, settings, identity, endpoint, certificates), endpoint, identity, settings
    )
    if None in identity.keys and identity.keys != (None, None):
        access.client  # noqa: B018 - botocore says which half is missing
    return access


def _file_or_arguments(settings: S3Settings) -> Optional[ParsedCredentials]:
    """``None`` sends the search on to the AWS chain. A profile is part of that chain and goes before ``~/.s3cfg``."""
    incomplete = settings.access_key_id is None or settings.secret_access_key is None
    if settings.profile is not None and incomplete and settings.config_path is None:
        return None
    try:
        found: ParsedCredentials = stream_io._infer_credentials(
            settings.access_key_id, settings.secret_access_key, settings.config_path
        )
    except (ValueError, FileNotFoundError):
        return None
    return found


def _session(profile: Optional[str]) -> Any:
    import botocore.session

    return botocore.session.Session(profile=profile)


def _make_client(
    session: Any,
    settings: S3Settings,
    identity: _Identity,
    endpoint: Optional[str],
    certificates: Optional[CAInfo],
) -> Any:
    import boto3
    import botocore

    options: dict[str, Any] = {
        "user_agent": f"Tensorizer/{__version__} (Boto3/{boto3.__version__})",
        "signature_version": botocore.UNSIGNED if identity.unsigned else settings.signature_version or "s3v4",
        "retries": {"mode": "standard", "total_max_attempts": 5},
        # Newer releases add checksums by default, which other stores than AWS refuse.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    if endpoint is not None and urlsplit(endpoint).netloc.lower() in _VIRTUAL_HOSTS:
        options["s3"] = {"addressing_style": "virtual"}
    region = settings.region_name or session.get_config_variable("region") or "us-east-1"
    access_key, secret_key = (None, None) if identity.unsigned else identity.keys
    return boto3.Session(botocore_session=session).client(
        "s3",
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        aws_session_token=settings.session_token if access_key else None,
        verify=_boto_trust(session, certificates),
        config=_client_config(options),
    )


def _client_config(options: dict[str, Any]) -> Any:
    from botocore.config import Config

    try:
        return Config(**options)
    except TypeError:  # a release that knows no checksum settings does not add checksums either
        return Config(**{name: value for name, value in options.items() if "checksum" not in name})


def _boto_trust(session: Any, certificates: Optional[CAInfo]) -> Union[str, bool, None]:
    """boto3's own settings first, then the variables that reads honour too."""
    if certificates is not None:
        return False if certificates.allow_untrusted else certificates.cacert or certificates.capath
    if env_text("AWS_CA_BUNDLE") or env_text("REQUESTS_CA_BUNDLE") or session.get_config_variable("ca_bundle"):
        return None
    return env_text("CURL_CA_BUNDLE") or env_text("SSL_CERT_FILE")


# -- errors ------------------------------------------------------------------------------------------------------------

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
    reason = f"status {status} [{code}]" if response else _without_query(str(error))
    return f"Failed to {operation} {name}: {reason}" + (f"; {hint}" if hint else "")


def _without_query(text: str) -> str:
    return re.sub(r"\?[^\s\"']*", "", text)

"""Who we are to an object store, and where it is: credentials, endpoint, and the boto3 client that follows from them.

The order of the sources is that of docs/remote_stores.md, "S3".
"""

from __future__ import annotations

import configparser
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

from tensorizer._io.call_options import PLAIN, CallOptions
from tensorizer._io.certificates import CAInfo
from tensorizer._io.s3.client import (
    check_endpoint,
    chosen_checksums,
    configured_endpoint,
    enforce_scheme,
    expect_answers,
    make_client,
    make_session,
    trust_of_parts,
)
from tensorizer._io.s3.s3_options import ConfigPath, S3Location, S3Options
from tensorizer._io.uri import split_uri
from tensorizer._system import locks
from tensorizer._system.redaction import shown_uri

logger = logging.getLogger("tensorizer.s3")

_announced: set[tuple[str, str]] = set()  # what was logged already


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

    keys: tuple[Optional[str], Optional[str]]  # (None, None): the AWS chain's, or nobody's
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
        self._trust = options.trust
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

    @property
    def host(self) -> str:
        """Host and port, for messages."""
        return split_uri(self.endpoint or self.client.meta.endpoint_url).authority.rpartition("@")[2]

    @property
    def is_secure(self) -> bool:
        """Whether the store is reached over TLS."""
        return not (self.endpoint or self.client.meta.endpoint_url).lower().startswith("http:")

    @property
    def trust_of_parts(self) -> Optional[CAInfo]:
        """Whom those requests of an upload trust that boto3 does not send; ``None`` for what variables and system say.

        Raises:
            StreamError: The AWS settings name a file that is not there.
        """
        if self._trust is not None or self._session is None or not self.is_secure:
            return self._trust
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
        ValueError: Plain HTTP that nobody asked for; a malformed endpoint; a token without keys; a configuration
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
    """What the caller said, and the access to the store, of which one call has one for all its objects."""
    options = call.once(call.stream, lambda: S3Options.of(call.stream))
    key = (options, write, location.is_express, location.is_of_aws)
    return options, call.once(key, lambda: resolve(location, options, call, write=write))


def named_endpoint(options: S3Options) -> Optional[str]:
    """URL of the store that reads go to; ``None`` where nobody named one. Asks for no credentials."""
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
    *,
    write: bool,
) -> S3Access:
    """The arguments or the AWS chain, at exactly this endpoint; no configuration file of s3cmd is read."""
    options = S3Options(
        access_key_id=access_key_id,
        secret_access_key=secret_access_key,
        region_name=region_name,
        signature_version=signature_version,
    )
    if endpoint and "://" not in endpoint:
        endpoint = "https://" + endpoint
    session = make_session(None)
    identity = _identify(session, options, None, anonymous=not write)
    return _access(session, options, identity, endpoint or None, location)


def _warn_of_default(access: S3Access) -> None:
    """Says once per host that keys go to a host that nobody named."""
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
    """URL of the store; ``None`` where nobody named one."""
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

"""What botocore does for us: the client and its settings, signed requests, and its errors in our words.

boto3 is imported when it is first needed.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any, Optional

from tensorizer._io.http_options import CAInfo, HTTPOptions, TrustAnchors, named_trust
from tensorizer._io.uri import split_uri
from tensorizer._system import config
from tensorizer._system.config import env_text
from tensorizer._system.redaction import without_secrets
from tensorizer._version import __version__
from tensorizer.errors import StreamError, StreamNotFoundError

# What botocore knows about services, by the path it is read from. Reading it is most of the work of making a client.
_loaders: dict[Optional[str], Any] = {}

_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._~%-]+)?\])(?::[0-9]{0,5})?")

_AWS = "https://s3.amazonaws.com"

# Stores that know buckets as host names only.
_VIRTUAL_HOSTS = ("cwobject.com", "cwlota.com")


def enforce_scheme(endpoint: str, allow_http: bool = False, force_http: bool = False) -> str:
    """The endpoint as a URL: ``https://`` unless it says otherwise and may.

    Raises:
        ValueError: Plain HTTP that the caller did not ask for, or another scheme.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        return ("http://" if force_http else "https://") + endpoint
    if scheme.lower() == "https":
        return "http://" + rest if force_http else endpoint
    if scheme.lower() == "http" and (allow_http or force_http):
        return endpoint
    got = "http://; force_http=True allows plain HTTP" if scheme.lower() == "http" else "another scheme"
    raise ValueError(f"Non-HTTPS endpoint URLs are not allowed: expected https://, got {got}")


def check_endpoint(endpoint: Any) -> None:
    """Rejects what is not the URL of a store; botocore quotes it, and what was meant for another argument may be a key.

    Raises:
        TypeError: No ``str``.
        ValueError: No host and port, or a login in front of them.
    """
    authority = split_uri(config.text("S3 endpoint", endpoint)).authority
    if "@" in authority:
        raise ValueError(
            "S3 endpoint: expected a host, got an at sign; keys are no part of it: pass s3_access_key_id and "
            "s3_secret_access_key"
        )
    if not _HOST_AND_PORT.fullmatch(authority):
        raise ValueError("S3 endpoint: expected a host, with https:// and a port or without, got something else")


def make_session(profile: Optional[str]) -> Any:
    """A botocore session; an unknown profile shows when something is asked of it.

    Sessions of a process share what botocore reads from its own files, and nothing else: no keys, no connections.
    """
    import botocore.session

    session = botocore.session.Session(profile=profile)
    session.lazy_register_component("data_loader", lambda: _loader(session))
    return session


def _loader(session: Any) -> Any:
    from botocore.loaders import create_loader

    path = session.get_config_variable("data_path")
    return _loaders.setdefault(path, create_loader(path))


def configured_endpoint(session: Any) -> Optional[str]:
    """The endpoint that environment and profile name for S3, in botocore's own order; ``None`` where they name none."""
    profile = session.get_scoped_config()  # also says whether AWS_PROFILE exists
    try:
        from botocore.configprovider import ConfiguredEndpointProvider
    except ImportError:  # a release that reads no endpoints
        return env_text("AWS_ENDPOINT_URL_S3") or env_text("AWS_ENDPOINT_URL")
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    endpoint = ConfiguredEndpointProvider(session.full_config, profile, "s3").provide()
    return None if endpoint is None else str(endpoint)


def chosen_checksums(session: Any, what: str) -> Optional[str]:
    """What environment or profile say of ``request_checksum_calculation`` or ``response_checksum_validation``."""
    value = env_text(f"AWS_{what.upper()}") or session.get_scoped_config().get(what)
    return None if value is None else str(value).lower()


def make_client(
    session: Any,
    endpoint: Optional[str],
    keys: tuple[Optional[str], Optional[str], Optional[str]],
    region: Optional[str],
    signature: Any,
    certificates: Optional[CAInfo],
    http: Optional[HTTPOptions] = None,
) -> Any:
    """A client of one store.

    Args:
        session: From :func:`make_session`.
        endpoint: URL of the store; ``None`` for AWS's own.
        keys: CallOptions key, secret key and token; ``None`` for those of the AWS chain.
        region: ``None`` for that of the configuration, else ``us-east-1``.
        signature: Version of signatures, or ``botocore.UNSIGNED``; ``None`` leaves the choice to botocore.
        certificates: Whom to trust; ``None`` for what variables or boto3 say.
        http: Of its settings, the proxies.
    """
    import boto3

    settings: dict[str, Any] = {
        "user_agent": f"Tensorizer/{__version__} (Boto3/{boto3.__version__})",
        "retries": {"mode": "standard", "total_max_attempts": 5},
    }
    if signature is not None:
        settings["signature_version"] = signature
    # Newer releases add checksums by default, which some other stores than AWS refuse.
    for what in ("request_checksum_calculation", "response_checksum_validation"):
        settings[what] = chosen_checksums(session, what) or "when_required"
    if endpoint is not None and split_uri(endpoint).authority.lower() in _VIRTUAL_HOSTS:
        settings["s3"] = {"addressing_style": "virtual"}
    settings["proxies"] = _proxies(http, endpoint)
    trust = _trust(session, certificates)
    client = boto3.Session(botocore_session=session).client(
        "s3",
        endpoint_url=endpoint,
        region_name=region or session.get_config_variable("region") or "us-east-1",
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
        aws_session_token=keys[2],
        verify=(trust.file or None) if trust.verify else False,
        config=_config(settings),
    )
    if trust.path:
        _trust_folder(client, trust)
    expect_answers(client)
    return client


def _config(settings: dict[str, Any]) -> Any:
    from botocore.config import Config

    try:
        return Config(**settings)
    except TypeError:  # a release that knows no checksum settings does not add checksums either
        return Config(**{name: value for name, value in settings.items() if "checksum" not in name})


def _proxies(http: Optional[HTTPOptions], endpoint: Optional[str]) -> Optional[dict[str, str]]:
    """The proxies as botocore takes them; ``None`` leaves it to the environment.

    Of a proxy of another kind, such as SOCKS, its errors show the password. It cannot use one: the login is left out.
    """
    from botocore.utils import get_environ_proxies

    chosen = _chosen_proxies(http, endpoint)
    found = get_environ_proxies(endpoint or _AWS) if chosen is None else chosen
    shown = {kind: _without_login(proxy) for kind, proxy in found.items()}
    return chosen if shown == found else shown


def _without_login(proxy: str) -> str:
    scheme, separator, rest = proxy.partition("://")
    is_known = not separator or scheme in ("http", "https")
    return proxy if is_known else f"{scheme}://{rest.rpartition('@')[2]}"


def _chosen_proxies(http: Optional[HTTPOptions], endpoint: Optional[str]) -> Optional[dict[str, str]]:
    """Those of the settings; ``None`` where they leave it to the environment."""
    if http is None or http.proxy is None:
        return None
    from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

    if not http.proxy or proxy_bypass_environment(split_uri(endpoint or _AWS).authority):
        return {}
    return {"http": http.proxy, "https": http.proxy}


def trust_of_parts(session: Any) -> Optional[CAInfo]:
    """Whom the AWS settings trust, for the parts of an upload that begins by boto3; ``None`` where they do not say, or
    a variable says it.

    Raises:
        StreamError: They name no file.
    """
    bundle = session.get_config_variable("ca_bundle")
    if bundle is None or named_trust(None) is not None:
        return None
    if not os.path.isfile(bundle):
        raise StreamError(
            f"no certificate to trust: AWS_CA_BUNDLE or ca_bundle names {bundle}: expected a readable file"
        )
    return CAInfo(cacert=bundle)


def _trust(session: Any, certificates: Optional[CAInfo]) -> TrustAnchors:
    """boto3's own settings first, then the variables that reads honour too."""
    own = session.get_config_variable("ca_bundle")
    if certificates is None and own:
        return TrustAnchors(path=own) if os.path.isdir(own) else TrustAnchors(own)
    return named_trust(certificates) or TrustAnchors()


def _trust_folder(client: Any, trust: TrustAnchors) -> None:
    """Has connections of the client trust the certificates in a folder, which botocore knows nothing of."""
    connections = client._endpoint.http_session
    set_up = connections._setup_ssl_cert

    def with_folder(pool: Any, *arguments: Any) -> None:
        set_up(pool, *arguments)
        pool.ca_certs, pool.ca_cert_dir = trust.file or None, trust.path

    connections._setup_ssl_cert = with_folder


# --- answers that mean nothing ----------------------------------------------------------------------------------------

# What a store says when it has done its part. A gateway or a login page answers with status 200 and something else.
_TOLD = {
    "CreateMultipartUpload": "UploadId",
    "UploadPart": "ETag",
    "CompleteMultipartUpload": "ETag",
    "PutObject": "ETag",
    "ListObjectsV2": "IsTruncated",
}


def expect_answers(client: Any) -> None:
    """Has the client's writes and lists raise ``StreamError`` where boto3 takes a success that says nothing for one.

    A client that was told already stays as it is.
    """
    events = getattr(client.meta, "events", None)
    if events is not None:
        for operation in _TOLD:
            events.register(f"after-call.s3.{operation}", _expect_answer, unique_id=f"tensorizer-{operation}")


def _expect_answer(http_response: Any, parsed: Any, model: Any, **_: Any) -> None:
    wanted = _TOLD[model.name]
    if http_response.status_code < 300 and parsed.get(wanted) in (None, ""):
        raise StreamError(f"the answer to {model.name} has no {wanted}; the server does not speak S3")
    if parsed.get("IsTruncated") and not parsed.get("NextContinuationToken"):  # where boto3 takes the list for whole
        raise StreamError(f"the answer to {model.name} is cut short, and does not say how to go on")


# --- errors, without secrets ----------------------------------------------------------------------------------------

NO_CREDENTIALS = "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"

_HINTS = {
    "301": "the bucket is in another region or at another endpoint: set s3_region_name or s3_endpoint",
    "403": "the credentials do not allow this, or are wrong",
    "404": "there is no such bucket or key: check URI and endpoint",
    "RequestTimeTooSkewed": "the clock of this computer is wrong",
    "NoSuchBucket": "there is no such bucket at this endpoint",
    "NoSuchUpload": "somebody else, or a rule of the bucket, has ended the upload",
}


def explain(error: Exception, operation: str, name: str) -> str:
    """A message for a botocore error: object, endpoint, source of credentials, status, S3 code, hint; no secret."""
    response = getattr(error, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    hint = _HINTS.get(code) or _HINTS.get(status)
    if type(error).__name__ == "NoCredentialsError":
        return f"Failed to {operation} {name}: {NO_CREDENTIALS}"
    said = str(error).partition("\n")[0]  # a page may follow
    reason = f"status {status} [{code}]" if response else without_secrets(said)
    return f"Failed to {operation} {name}: {reason}" + (f"; {hint}" if hint else "")


def s3_code(error: Any) -> str:
    """The S3 error code of a botocore error; empty for other errors."""
    return str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))


@functools.cache
def _no_credentials() -> type[StreamError]:
    """An error of the package that programs catch as botocore's, too, as they did with earlier releases."""
    from botocore.exceptions import NoCredentialsError

    return type("NoCredentialsError", (StreamError, NoCredentialsError), {"__module__": __name__})


def translated(error: Any, operation: str, name: str) -> StreamError:
    """The package's own error for one of botocore's."""
    status = (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    kind: type[StreamError] = StreamNotFoundError if status == 404 else StreamError
    if type(error).__name__ == "NoCredentialsError":
        kind = _no_credentials()
    result = kind(explain(error, operation, name))
    result.source, result.status = name, status
    return result

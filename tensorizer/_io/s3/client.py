"""The boto3 client: its session, its settings, and what botocore knows about endpoints and checksums.

boto3 is imported when it is first needed.
"""

from __future__ import annotations

import re
from typing import Any, Optional, Union

from tensorizer._io.certificates import CAInfo
from tensorizer._io.uri import split_uri
from tensorizer._system import checks
from tensorizer._system.config import env_text
from tensorizer._version import __version__

__all__ = ["check_endpoint", "chosen_checksums", "configured_endpoint", "enforce_scheme", "make_client", "make_session"]

# What botocore knows about services, by the path it is read from. Reading it is most of the work of making a client.
_loaders: dict[Optional[str], Any] = {}

_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._~%-]+)?\])(?::[0-9]{0,5})?")

# Stores that know buckets as host names only.
_VIRTUAL_HOSTS = ("cwobject.com", "cwlota.com")


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
    found = "http://" if scheme.lower() == "http" else "another scheme"
    raise ValueError(f"Non-HTTPS endpoint URLs are not allowed: found {found}; pass force_http=True for plain HTTP")


def check_endpoint(endpoint: Any) -> None:
    """Refuses what is no URL of a store; botocore quotes it, and what was meant for another argument may be a key.

    Raises:
        TypeError: No ``str``.
        ValueError: No host and port, or a login in front of them.
    """
    authority = split_uri(checks.text("S3 endpoint", endpoint)).authority
    if "@" in authority:
        raise ValueError(
            "S3 endpoint: wanted a host, found an at sign; keys are no part of it: pass s3_access_key_id and "
            "s3_secret_access_key"
        )
    if not _HOST_AND_PORT.fullmatch(authority):
        raise ValueError("S3 endpoint: wanted a host, with https:// and a port or without, found something else")


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
) -> Any:
    """A client of one store.

    Args:
        session: From :func:`make_session`.
        endpoint: URL of the store; ``None`` for AWS's own.
        keys: Access key, secret key and token; ``None`` for those of the AWS chain.
        region: ``None`` for that of the configuration, else ``us-east-1``.
        signature: Version of signatures, or ``botocore.UNSIGNED``; ``None`` leaves the choice to botocore.
        certificates: Whom to trust; ``None`` for boto3's own default.
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
    return boto3.Session(botocore_session=session).client(
        "s3",
        endpoint_url=endpoint,
        region_name=region or session.get_config_variable("region") or "us-east-1",
        aws_access_key_id=keys[0],
        aws_secret_access_key=keys[1],
        aws_session_token=keys[2],
        verify=_trust(session, certificates),
        config=_config(settings),
    )


def _config(settings: dict[str, Any]) -> Any:
    from botocore.config import Config

    try:
        return Config(**settings)
    except TypeError:  # a release that knows no checksum settings does not add checksums either
        return Config(**{name: value for name, value in settings.items() if "checksum" not in name})


def _trust(session: Any, certificates: Optional[CAInfo]) -> Union[str, bool, None]:
    """boto3's own settings first, then the variables that reads honour too."""
    if certificates is not None:
        return False if certificates.allow_untrusted else certificates.cacert or certificates.capath
    if env_text("AWS_CA_BUNDLE") or env_text("REQUESTS_CA_BUNDLE") or session.get_config_variable("ca_bundle"):
        return None
    return env_text("CURL_CA_BUNDLE") or env_text("SSL_CERT_FILE")

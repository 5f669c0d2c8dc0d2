"""Keys from arguments and from configuration files of s3cmd."""

from __future__ import annotations

import configparser
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

from tensorizer._system.redaction import shown_uri

__all__ = ["ConfigPath", "ParsedCredentials", "infer_credentials"]

ConfigPath = Union[str, bytes, "os.PathLike[Any]"]


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

    Args:
        s3_access_key_id: One of the keys.
        s3_secret_access_key: The other one.
        s3_config_path: The file; ``None`` for the first of `default_paths` that exists.
        default_paths: Where such files usually are.

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

"""A boto3 client for a place in the store, for everybody who has boto3."""

from __future__ import annotations

from typing import Any

from benchmarks.contender import S3Place


def client(place: S3Place) -> Any:
    """The client; the bytes that it sends carry no second checksum, as older stores want it."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=place.endpoint,
        region_name="us-east-1",
        aws_access_key_id=place.access_key,
        aws_secret_access_key=place.secret_key,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )

"""boto3's transfer manager, which sends a file that is finished already."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contender import Contender, S3Place, State


class Boto3(Contender):
    name = "boto3"
    label = "boto3, finished file"
    suffix = ".tensors"
    shares = "ours"

    def import_library(self) -> None:
        import boto3.s3.transfer  # noqa: F401

    def version(self) -> str:
        import boto3

        return str(boto3.__version__)

    def upload_s3(self, state: State, finished: Path, place: S3Place) -> None:
        from benchmarks.servers.s3_client import client

        client(place).upload_file(str(finished), place.bucket, place.key)

"""runai-model-streamer, which reads safetensors files with many threads into one buffer."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contender import Contender, S3Place, State


class RunaiStreamer(Contender):
    name = "runai"
    label = "runai-model-streamer"
    suffix = ".safetensors"
    packages = ("runai-model-streamer[s3]", "safetensors", "numpy")

    def import_library(self) -> None:
        import runai_model_streamer  # noqa: F401

    def version(self) -> str:
        from importlib.metadata import version

        return version("runai-model-streamer")

    def prepare(self, state: State, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(state, path)

    def load(self, path: Path) -> State:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return dict(streamer.get_tensors())

    def load_gpu(self, path: Path) -> State:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return {name: tensor.to("cuda:0") for name, tensor in streamer.get_tensors()}

    def load_s3(self, place: S3Place) -> State:
        import os

        os.environ.update(
            AWS_ACCESS_KEY_ID=place.access_key,
            AWS_SECRET_ACCESS_KEY=place.secret_key,
            AWS_ENDPOINT_URL=place.endpoint,
            AWS_DEFAULT_REGION="us-east-1",
            AWS_EC2_METADATA_DISABLED="true",
            RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0",
        )
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(place.uri)
            return dict(streamer.get_tensors())

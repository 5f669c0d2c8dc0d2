"""The existing ``tensorizer`` release, in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.contender import Contender, HttpPlace, S3Place, State
from benchmarks.sync import fsync_path

VERSION = "2.12.1"


class Reference(Contender):
    name = "reference"
    label = f"tensorizer {VERSION}"
    suffix = ".tensors"
    packages = (f"tensorizer=={VERSION}", "numpy")
    role = "reference"
    import_time = True
    cannot_write = ("many",)  # its index has room for about 3,500 tensors

    def import_library(self) -> None:
        import tensorizer

        if tensorizer.__version__ != VERSION:
            raise RuntimeError(f"expected tensorizer {VERSION}, got {tensorizer.__version__}")

    def version(self) -> str:
        return VERSION

    def prepare(self, state: State, path: Path) -> None:
        self.save(state, path)

    def load(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(str(path), device="cpu")

    load_buffered = load

    def load_verified(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(str(path), device="cpu", verify_hash=True)

    def load_one(self, path: Path, name: str) -> State:
        from tensorizer import TensorDeserializer

        with TensorDeserializer(str(path), device="cpu", lazy_load=True) as tensors:
            return {name: tensors[name]}

    def prepare_encrypted(self, state: State, path: Path) -> None:
        self.save_encrypted(state, path)

    def load_encrypted(self, path: Path) -> State:
        from benchmarks.models import KEY
        from tensorizer import DecryptionParams, TensorDeserializer

        return TensorDeserializer(str(path), device="cpu", encryption=DecryptionParams.from_key(KEY))

    def save_encrypted(self, state: State, path: Path, *, sync: bool = False) -> None:
        from benchmarks.models import KEY
        from tensorizer import EncryptionParams, TensorSerializer

        serializer = TensorSerializer(str(path), encryption=EncryptionParams(KEY))
        serializer.write_state_dict(state)
        serializer.close()
        if sync:
            fsync_path(path)

    def load_gpu(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(str(path), device="cuda:0")

    def load_gpu_encrypted(self, path: Path) -> State:
        from benchmarks.models import KEY
        from tensorizer import DecryptionParams, TensorDeserializer

        return TensorDeserializer(str(path), device="cuda:0", encryption=DecryptionParams.from_key(KEY))

    def save_gpu(self, state: State, path: Path) -> None:
        self.save(state, path)

    def save_gpu_encrypted(self, state: State, path: Path) -> None:
        self.save_encrypted(state, path)

    def load_http(self, place: HttpPlace) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(place.url, device="cpu")

    def open_http(self, place: HttpPlace) -> int:
        from tensorizer import TensorDeserializer

        with TensorDeserializer(place.url, device="cpu", lazy_load=True) as tensors:
            return len(tensors)

    def load_s3(self, place: S3Place) -> State:
        from tensorizer import TensorDeserializer
        from tensorizer.stream_io import open_stream

        with open_stream(place.uri, "rb", **self._s3_options(place)) as stream:
            return TensorDeserializer(stream, device="cpu")

    def upload_s3(self, state: State, finished: Path, place: S3Place) -> None:
        from tensorizer import TensorSerializer
        from tensorizer.stream_io import open_stream

        serializer = TensorSerializer(open_stream(place.uri, "wb", **self._s3_options(place)))
        serializer.write_state_dict(state)
        serializer.close()

    def load_redis(self, uri: str) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(uri, device="cpu")

    def _s3_options(self, place: S3Place) -> dict[str, Any]:
        return {
            "s3_access_key_id": place.access_key,
            "s3_secret_access_key": place.secret_key,
            "s3_endpoint": place.endpoint,
            "force_http": True,
        }

    def save(self, state: State, path: Path, *, sync: bool = False) -> None:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(path))
        serializer.write_state_dict(state)
        serializer.close()
        if sync:
            fsync_path(path)


class ReferenceReaders(Contender):
    """The same with several connections, which it opens when told to."""

    name = "reference-8"
    label = f"{Reference.label}, 8 readers"
    suffix = Reference.suffix
    packages = Reference.packages
    shares = Reference.name

    def import_library(self) -> None:
        Reference().import_library()

    def version(self) -> str:
        return VERSION

    def load_http(self, place: HttpPlace) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(place.url, device="cpu", num_readers=8)

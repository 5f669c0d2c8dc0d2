"""This project, as installed in the environment that runs the benchmark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from benchmarks.contender import Contender, HttpPlace, S3Place, State

if TYPE_CHECKING:
    import torch


class Ours(Contender):
    name = "ours"
    label = "this project"
    suffix = ".tensors"
    role = "ours"
    import_time = True

    def import_library(self) -> None:
        import tensorizer._C  # noqa: F401  (its absence means another project of the same name)
        from tensorizer import TensorDeserializer, TensorSerializer  # noqa: F401 - resolved on demand

    def version(self) -> str:
        import tensorizer

        return str(tensorizer.__version__)

    def prepare(self, state: State, path: Path) -> None:
        self.save(state, path)

    def load(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(path, device="cpu")

    def load_direct(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(path, device="cpu", direct_io="always")

    def load_buffered(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(path, device="cpu", direct_io="never")

    def load_mapped(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(path, device="cpu", mmap=True)

    def load_verified(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(path, device="cpu", verify_hash=True)

    def stream(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        from tensorizer import load_stream

        return load_stream(path, verify=False)

    def stream_http(self, place: HttpPlace) -> Iterator[tuple[str, torch.Tensor]]:
        from tensorizer import load_stream

        return load_stream(place.url, verify=False)

    def load_one(self, path: Path, name: str) -> State:
        from tensorizer import TensorDeserializer

        with TensorDeserializer(path, device="cpu", lazy_load=True) as tensors:
            return {name: tensors[name]}

    def dcp_writer(self, path: Path) -> Any:
        from tensorizer.distributed import TensorizerWriter

        return TensorizerWriter(path)

    def dcp_reader(self, path: Path) -> Any:
        from tensorizer.distributed import TensorizerReader

        return TensorizerReader(path)

    def dcp_model_reader(self, path: Path) -> Any:
        return self.dcp_reader(path)

    def prepare_encrypted(self, state: State, path: Path) -> None:
        self.save_encrypted(state, path)

    def load_encrypted(self, path: Path) -> State:
        return self._decrypt(path, None)

    def load_encrypted_on(self, path: Path, threads: int = 1) -> State:
        return self._decrypt(path, threads)

    def _decrypt(self, path: Path, threads: Optional[int]) -> State:
        from benchmarks.models import KEY
        from tensorizer import DecryptionParams, TensorDeserializer

        return TensorDeserializer(path, device="cpu", encryption=DecryptionParams.from_key(KEY), num_readers=threads)

    def save_encrypted(self, state: State, path: Path, *, sync: bool = False) -> None:
        from benchmarks.models import KEY
        from tensorizer import EncryptionParams, TensorSerializer

        serializer = TensorSerializer(path, encryption=EncryptionParams(KEY), fsync=sync)
        serializer.write_state_dict(state)
        serializer.close()

    def load_gpu(self, path: Path) -> State:
        return self._on_gpu(path)

    def load_gpu_encrypted(self, path: Path) -> State:
        return self._decrypt_on_gpu(path, "0")

    def load_gpu_decrypting(self, path: Path) -> State:
        return self._decrypt_on_gpu(path, "1")

    def prepare_crc32(self, state: State, path: Path) -> None:
        self.save_crc32(state, path)

    def prepare_sha256(self, state: State, path: Path) -> None:
        self._save(state, path, "sha256", sync=False)

    def load_gpu_verified(self, path: Path) -> State:
        return self._on_gpu(path, verify_hash=True)

    def load_gpu_float32(self, path: Path) -> State:
        import torch

        return self._on_gpu(path, dtype=torch.float32)

    def load_gpu_http(self, place: HttpPlace) -> State:
        return self._on_gpu(place.url)

    def _decrypt_on_gpu(self, path: Path, by_device: str) -> State:
        from benchmarks.models import KEY
        from tensorizer import DecryptionParams

        os.environ["TENSORIZER_CUDA_DECRYPT"] = by_device
        return self._on_gpu(path, encryption=DecryptionParams.from_key(KEY))

    def _on_gpu(self, place: Union[Path, str], **options: Any) -> State:
        from benchmarks import gpu
        from tensorizer import TensorDeserializer

        if gpu.is_fake():
            gpu.fake_device()
        return TensorDeserializer(place, device=gpu.DEVICE, **options)

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

        return TensorDeserializer(place.uri, device="cpu", stream_options=self._s3_options(place))

    def upload_s3(self, state: State, finished: Path, place: S3Place) -> None:
        from tensorizer import TensorSerializer

        with TensorSerializer(place.uri, stream_options=self._s3_options(place)) as serializer:
            serializer.write_state_dict(state)

    def load_redis(self, uri: str) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(uri, device="cpu")

    def from_pretrained(self, folder: Path) -> torch.nn.Module:
        from tensorizer.integrations.huggingface import from_pretrained

        model: torch.nn.Module = from_pretrained(folder)
        return model

    def _s3_options(self, place: S3Place) -> dict[str, object]:
        return {
            "s3_access_key_id": place.access_key,
            "s3_secret_access_key": place.secret_key,
            "s3_endpoint": place.endpoint,
            "force_http": True,
        }

    def save(self, state: State, path: Path, *, sync: bool = False) -> None:
        self._save(state, path, ("crc32", "sha256"), sync)

    def save_crc32(self, state: State, path: Path, *, sync: bool = False) -> None:
        self._save(state, path, "crc32", sync)

    def _save(self, state: State, path: Path, hashes: object, sync: bool) -> None:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(path, hashes=hashes, fsync=sync)
        serializer.write_state_dict(state)
        serializer.close()

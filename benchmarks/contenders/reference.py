"""The existing ``tensorizer`` release, in an environment of its own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.contender import Contender, State
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
            raise RuntimeError(f"wanted tensorizer {VERSION}, found {tensorizer.__version__}")

    def version(self) -> str:
        return VERSION

    def prepare(self, state: State, path: Path) -> None:
        self.save(state, path)

    def load(self, path: Path) -> State:
        from tensorizer import TensorDeserializer

        return TensorDeserializer(str(path), device="cpu")

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

    def save_gpu(self, state: State, path: Path) -> None:
        self.save(state, path)

    def save(self, state: State, path: Path, *, sync: bool = False) -> None:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(path))
        serializer.write_state_dict(state)
        serializer.close()
        if sync:
            fsync_path(path)

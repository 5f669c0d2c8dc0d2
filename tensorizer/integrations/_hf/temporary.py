"""P3: libraries that only read files get them, in a private folder that is gone when they have read it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tensorizer._files.convert import convert
from tensorizer.integrations._hf.place import is_weight
from tensorizer.integrations._hf.weights import Weights

__all__ = ["private_copy", "write_safetensors"]

_IN_MEMORY = "/dev/shm"


@contextlib.contextmanager
def private_copy(folder: Path, nbytes: int) -> Iterator[Path]:
    """A copy of the small files of a folder, for its weights to be put beside; removed at the end, whatever ends it.

    Args:
        folder: Where the files are.
        nbytes: What will be written beside them; it goes to memory where there is twice the room.
    """
    room = None
    if os.path.isdir(_IN_MEMORY) and os.access(_IN_MEMORY, os.W_OK):
        room = _IN_MEMORY if shutil.disk_usage(_IN_MEMORY).free > 2 * nbytes else None
    target = Path(tempfile.mkdtemp(prefix="tensorizer-", dir=room))  # mode 700
    try:
        shutil.copytree(folder, target, dirs_exist_ok=True, ignore=_weights)
        os.chmod(target, 0o700)  # copytree gave it the mode of the source
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _weights(folder: str, names: list[str]) -> set[str]:
    indexes = {name for name in names if name.endswith(".json") and is_weight(name.partition(".index")[0])}
    return indexes | {name for name in names if is_weight(name)}


def write_safetensors(weights: Weights, target: Path, allow_plaintext_temp: bool) -> None:
    """The weights as a plain ``.safetensors`` file.

    Raises:
        ValueError: They are encrypted, and nobody said that their plaintext may be written to a file.
    """
    if weights.encrypted and not allow_plaintext_temp:
        raise ValueError(
            f"{weights.label}: encrypted, and the library reads its weights from files alone: "
            "allow_plaintext_temp=True writes them decrypted to a private temporary folder"
        )
    if weights.pickled:
        from tensorizer.torch import save_file

        save_file(weights.state_dict(), target, {"format": "pt"})
        return
    convert(
        weights.source,
        target,
        format="safetensors",
        decryption=weights.options.encryption,
        public_key=weights.options.public_key,
        check=False,
        flatten=True,
        stream_options=weights.place.stream_options,
    )

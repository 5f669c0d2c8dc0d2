"""Read tensors as NumPy arrays, bfloat16 included, one at a time and without keeping them.

python numpy_arrays.py                # writes a small file and reads it back
python numpy_arrays.py model.tensors  # describes your own
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from tensorizer import TensorDeserializer, TensorSerializer, TensorType


def write_sample(path: Path) -> None:
    with TensorSerializer(path) as serializer:
        serializer.write_tensor(0, "counts", TensorType.PARAM, np.arange(6, dtype=np.int64).reshape(2, 3))
        serializer.write_tensor(0, "weights", TensorType.PARAM, torch.linspace(-1, 1, 5, dtype=torch.bfloat16))
        serializer.write_tensor(0, "mask", TensorType.BUFFER, torch.tensor([True, False]))


def bfloat16_to_float32(raw: np.ndarray) -> np.ndarray:
    """NumPy has no bfloat16: the raw 16 bits are the upper half of a float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def describe(path: Path) -> None:
    with TensorDeserializer(path, device="cpu", lazy_load=True) as deserializer:
        arrays = deserializer.read_numpy_arrays(allow_raw_data=True, cache=False)
        for _, tensor_type, name, array, is_opaque, torch_dtype in arrays:
            if is_opaque and torch_dtype == "torch.bfloat16":
                array = bfloat16_to_float32(array.view(np.uint16))
            shown = torch_dtype if is_opaque else array.dtype
            values = np.array2string(array.reshape(-1)[:6], precision=3, threshold=6)
            print(f"{tensor_type.name:10} {name}: {shown} {array.shape} {values}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a .tensors file; without it a sample is made")
    args = parser.parse_args()
    if args.file is not None:
        describe(args.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        sample = Path(folder) / "sample.tensors"
        write_sample(sample)
        describe(sample)


if __name__ == "__main__":
    main()

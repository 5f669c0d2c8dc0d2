"""A program, ``save FOLDER`` or ``load FOLDER``, that runs under a reference release and under this package.

Both sides save the same objects, and each checks the files of the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

KEY = bytes(range(32))


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.tied = torch.nn.Linear(3, 4, bias=False)
        self.tied.weight = self.linear.weight


def state() -> dict:
    torch.manual_seed(1)
    base = torch.randn(8, 4)
    return {
        "base": base,
        "row": base[3],
        "transposed": base.t(),
        "bits": base.view(torch.int32),
        "half": torch.randn(5).half(),
        "bfloat16": torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16)),
        "empty": torch.empty(0, 2),
        "meta": torch.empty(3, device="meta"),
        "others": [1, "two", (3.5, None)],
    }


def check(loaded: dict) -> None:
    expected = state()
    for name, value in expected.items():
        if name == "meta":
            assert loaded[name].is_meta
        elif isinstance(value, torch.Tensor):
            assert loaded[name].dtype == value.dtype, name
            assert loaded[name].stride() == value.stride(), name
            assert torch.equal(loaded[name], value), name
        else:
            assert loaded[name] == value
    pointer = loaded["base"].untyped_storage().data_ptr()
    assert all(loaded[name].untyped_storage().data_ptr() == pointer for name in ("row", "transposed", "bits"))
    assert isinstance(loaded["bfloat16"], torch.nn.Parameter)


def save(folder: Path) -> None:
    from tensorizer import EncryptionParams
    from tensorizer.torch_compat import tensorizer_saving

    with tensorizer_saving():
        torch.save(state(), folder / "state.pt")
        torch.save(state(), folder / "old-format.pt", _use_new_zipfile_serialization=False)
        torch.save(Plain().state_dict(), folder / "module.pt")
    with tensorizer_saving(folder / "elsewhere.bin", encryption=EncryptionParams(KEY)):
        torch.save(state(), folder / "encrypted.pt")


def load(folder: Path) -> None:
    from tensorizer import DecryptionParams
    from tensorizer.torch_compat import tensorizer_loading

    with tensorizer_loading(device="cpu"):
        check(torch.load(folder / "state.pt"))
        check(torch.load(folder / "old-format.pt"))
        module = torch.load(folder / "module.pt")
    assert module["linear.weight"].is_set_to(module["tied.weight"])
    with tensorizer_loading(
        folder / "elsewhere.bin", device="cpu", verify_hash=True, encryption=DecryptionParams.from_key(KEY)
    ):
        check(torch.load(folder / "encrypted.pt"))


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))

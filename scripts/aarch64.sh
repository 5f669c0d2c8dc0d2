#!/usr/bin/env bash
# Compiles csrc/ and its tests for aarch64 with Debian's cross compiler and runs them with qemu-user. Wants root.
# usage: aarch64.sh [GTEST ARGUMENTS]
# Headers and libraries come from a Debian of that architecture in build/aarch64/root, unpacked and never run.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/system-packages.sh aarch64
build=$PWD/build/aarch64 target=aarch64-linux-gnu
root=$build/root

if [ ! -e "$build/root-is-complete" ]; then
  rm -rf "$root"
  mkdir -p "$build"
  mirror=$(cd scripts/packaging && python3 -c 'import sources; print(sources.debian_mirror())')
  mmdebstrap --quiet --architectures=arm64 --variant=extract --mode=root \
    --include=libc6-dev,libstdc++-12-dev,libcurl4-openssl-dev,libsodium-dev,libssl-dev,libhiredis-dev,libisal-dev,libgtest-dev \
    bookworm "$root" "$mirror"
  # Links from the root's top lead out of it.
  find "$root/usr/lib/$target" -lname '/*' | while read -r link; do
    ln -sfn "$(realpath --no-symlinks --relative-to="$(dirname "$link")" "$root$(readlink "$link")")" "$link"
  done
  touch "$build/root-is-complete"
fi

export PKG_CONFIG_LIBDIR=$root/usr/lib/$target/pkgconfig:$root/usr/share/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake -S tests/native -B "$build/tests" -G Ninja "${launcher[@]}" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=$target-g++ -DCMAKE_SYSROOT="$root" -DCMAKE_FIND_ROOT_PATH="$root" \
  -DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY \
  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;$root" -DCMAKE_LIBRARY_ARCHITECTURE=$target \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -DNDEBUG" >/dev/null
cmake --build "$build/tests" --parallel "${JOBS:-2}" --target native_tests -- --quiet
# Tests that start themselves again in a new process cannot do that below qemu-user.
again='FakeCudaRules.*:CudaDriver.*:SecretKey.IsReadOnlyAndKeptOutOfCoreDumps'
qemu-aarch64 -L "$root" "$build/tests/native_tests" --gtest_brief=1 "--gtest_filter=-$again" "$@"

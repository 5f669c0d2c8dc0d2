#!/usr/bin/env bash
# Runs what is built for aarch64 with qemu-user. Wants root.
# usage: aarch64.sh tests [GTEST ARGUMENTS]   compiles csrc/ and its tests with Debian's cross compiler
#        aarch64.sh wheel FOLDER              uses the wheel of FOLDER for Python 3.11; needs a package index
# Headers, libraries and Python come from a Debian of that architecture in build/aarch64/root, unpacked and never run.
# TORCH: another requirement than the last torch whose default build for aarch64 is for the CPU.
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
    --include=libc6-dev,libstdc++-12-dev,libcurl4-openssl-dev,libsodium-dev,libssl-dev,libhiredis-dev,libisal-dev,libgtest-dev,python3-pip,libpython3.11-dev \
    bookworm "$root" "$mirror"
  # Links from the root's top lead out of it.
  find "$root/usr/lib/$target" -lname '/*' | while read -r link; do
    ln -sfn "$(realpath --no-symlinks --relative-to="$(dirname "$link")" "$root$(readlink "$link")")" "$link"
  done
  touch "$build/root-is-complete"
fi

run_tests() {
  export PKG_CONFIG_LIBDIR=$root/usr/lib/$target/pkgconfig:$root/usr/share/pkgconfig PKG_CONFIG_SYSROOT_DIR=$root
  local launcher=() again
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  cmake -S tests/native -B "$build/tests" -G Ninja "${launcher[@]}" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=$target-g++ -DCMAKE_SYSROOT="$root" -DCMAKE_FIND_ROOT_PATH="$root" \
    -DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY \
    -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;$root" -DCMAKE_LIBRARY_ARCHITECTURE=$target \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -DNDEBUG" >/dev/null
  cmake --build "$build/tests" --parallel "${JOBS:-2}" --target native_tests -- --quiet
  # Below qemu-user tests cannot start themselves again in a new process, and threads of a forked child end qemu itself.
  again='FakeCudaRules.*:CudaDriver.*:*FakeDriverWouldNotice:SecretKey.IsReadOnlyAndKeptOutOfCoreDumps'
  again+=':Fork.TheThreadsOfAChildWaitForEachOther:ProcessPool.AForkedChildWaitsForNoJobOfItsParentAndHasJobsOfItsOwn'
  again+=':HttpWalk.*'  # it counts frames, and -O1 leaves more of them than a build does
  qemu-aarch64 -L "$root" "$build/tests/native_tests" --gtest_brief=1 "--gtest_filter=-$again" "$@"
}

use_wheel() {
  local wheels=("$1"/tensorizer-*-cp311-cp311-manylinux_2_28_aarch64.whl) site=$build/site
  local python=(qemu-aarch64 -L "$root" "$root/usr/bin/python3.11")
  [ -e "${wheels[0]}" ] || { echo "aarch64.sh: no wheel of Python 3.11 for aarch64 in $1" >&2; return 1; }
  # The build changed pyconfig.h of x86-64 to that of aarch64; so this must be what it would change nothing in.
  PYTHONPATH=scripts/packaging "${python[@]}" -c '
import sysconfig
from build_wheel import for_machine

theirs = open(sysconfig.get_paths()["include"] + "/../aarch64-linux-gnu/python3.11/pyconfig.h").read()
assert for_machine(for_machine(theirs, "x86_64"), "aarch64") == theirs
'
  local install=("${python[@]}" -m pip --disable-pip-version-check install --quiet --no-compile --root-user-action ignore --target "$site")
  [ -e "$site/torch" ] || "${install[@]}" "${TORCH:-torch==2.8.0}" numpy "${wheels[0]}"
  "${install[@]}" --upgrade --no-deps "${wheels[0]}"
  PYTHONPATH=$site "${python[@]}" scripts/packaging/smoke.py "$site"
}

case ${1:-} in
  tests) run_tests "${@:2}" ;;
  wheel) use_wheel "${2:?usage: aarch64.sh wheel FOLDER}" ;;
  *) echo "usage: aarch64.sh tests [GTEST ARGUMENTS], or aarch64.sh wheel FOLDER" >&2; exit 2 ;;
esac

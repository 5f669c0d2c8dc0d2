#!/usr/bin/env bash
# Installs the Debian packages that a group of commands needs: as root by apt, otherwise prints the command to type.
# usage: system-packages.sh [--print] build|test|native|lint|constant-time|wheels|wheels-all|aarch64|docs|site
# With --print it only says what the group is, but for packages of Python.
# Quick when nothing is missing. Systems without dpkg are left alone: the build names what it misses there.
# Who is not root goes on without what only some tests need, except with TENSORIZER_REQUIRE_SERVERS=1 (make test-all).
set -euo pipefail

only_print=
[ "${1:-}" != --print ] || { only_print=yes; shift; }
group=${1:?build, test, native, lint, constant-time, wheels, wheels-all, aarch64, docs or site}
build=(g++ make pkg-config libcurl4-openssl-dev libsodium-dev libssl-dev libhiredis-dev libisal-dev)
native=(cmake ninja-build libgtest-dev ccache binutils clang)
of_tests=(nginx-light redis-server memcached swift-proxy swift-object swift-container swift-account curl openssl patch)
wheels=(git make perl cmake nasm patch binutils)
other_processor=binutils-aarch64-linux-gnu
[ "$(uname -m)" != aarch64 ] || other_processor=binutils-x86-64-linux-gnu
aarch64=(g++-aarch64-linux-gnu qemu-user mmdebstrap)
lint=(git)
docs=(git)  # and what python_packages adds
site=(chromium fonts-dejavu-core)

missing_of() {
  local package
  for package in "$@"; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true) in
      installed) ;;
      *) printf '%s\n' "$package" ;;
    esac
  done
}

# Debian's own python3 comes without the headers and without ensurepip; any other Python brings both.
python_packages() {
  local python=${PYTHON:-python3}
  if ! command -v "$python" >/dev/null; then
    echo python3 python3-dev python3-venv
  elif ! "$python" - <<'PY' 2>/dev/null
import ensurepip, os, sysconfig, venv
raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
PY
  then
    echo python3-dev python3-venv
  fi
}

# The runtime of the sanitizers has the version of clang in its package's name. Where clang brings it along, as on Ubuntu 22.04,
# it is there already.
sanitizer_runtime() {
  local runtime version
  runtime=$(clang --rtlib=compiler-rt -print-libgcc-file-name 2>/dev/null) || return 0
  version=$(clang -dumpversion)
  [ -e "$runtime" ] || echo "libclang-rt-${version%%.*}-dev"
}

# Packages such as redis-server start a service when installed; a policy file for the time of the installation says no.
forbid_services() {
  policy=/usr/sbin/policy-rc.d
  [ -e $policy ] && return
  printf '#!/bin/sh\nexit 101\n' >$policy
  chmod +x $policy
  trap 'rm -f "$policy"' EXIT
}

install() {
  if [ "$(id -u)" != 0 ]; then
    echo "tensorizer: this needs system packages; please type"
    echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends $*"
    echo "and run make again."
    return 1
  fi
  echo "== system packages: $*"
  forbid_services
  export DEBIAN_FRONTEND=noninteractive
  local log
  log=$(mktemp)
  apt-get -q update </dev/null >"$log" 2>&1 || echo "apt-get update failed; trying with the lists at hand" >&2
  if ! apt-get -q install -y --no-install-recommends "$@" </dev/null >>"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "tensorizer: apt-get could not install: $* (its words are above)" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

[ -n "$only_print" ] || command -v dpkg-query >/dev/null || exit 0
some_tests=()
case $group in
  build) wanted=("${build[@]}") ;;
  test) wanted=("${build[@]}") some_tests=("${of_tests[@]}") ;;
  native) wanted=("${build[@]}" "${native[@]}") ;;
  lint) wanted=("${build[@]}" "${native[@]}" "${lint[@]}") ;;
  constant-time) wanted=("${build[@]}" "${native[@]}" "${lint[@]}" valgrind) ;;
  wheels) wanted=("${wheels[@]}") ;;
  wheels-all) wanted=("${wheels[@]}" "$other_processor") ;;
  aarch64) wanted=("${native[@]}" "${aarch64[@]}") ;;
  docs) wanted=("${docs[@]}") ;;
  site) wanted=("${site[@]}") ;;
  *) echo "unknown group: $group" >&2; exit 2 ;;
esac
if [ -n "$only_print" ]; then
  printf '%s\n' "${wanted[@]}" "${some_tests[@]}"
  exit
fi
# Libraries may come from a prefix instead of the system (TENSORIZER_DEPS_PREFIX, see setup.py).
if [ -n "${TENSORIZER_DEPS_PREFIX:-}" ]; then
  mapfile -t wanted < <(printf '%s\n' "${wanted[@]}" | grep -Ev '^lib(curl4-openssl|sodium|ssl|hiredis|isal)-dev$')
fi
mapfile -t missing < <(missing_of "${wanted[@]}")
read -r -a python < <(python_packages; echo) || true
missing+=("${python[@]}")
mapfile -t left_out < <(missing_of "${some_tests[@]}")
if [ ${#left_out[@]} != 0 ]; then
  if [ "$(id -u)" = 0 ] || [ "${TENSORIZER_REQUIRE_SERVERS:-}" = 1 ]; then
    missing+=("${left_out[@]}")
  else
    echo "== not installed, so tests that need them are left out: ${left_out[*]}"
  fi
fi
[ ${#missing[@]} = 0 ] || install "${missing[@]}"
case " ${wanted[*]} " in
  *" clang "*)
    runtime=$(sanitizer_runtime)
    [ -z "$runtime" ] || install "$runtime"
    ;;
esac

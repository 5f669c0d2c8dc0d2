#!/usr/bin/env bash
# usage: try_sdist.sh FOLDER: installs the source distribution of FOLDER on a Debian that has no compiler, then on one
# that has a compiler alone, which must fail with one line that says what to install, then with the libraries that it
# names, and uses it. For a container that is thrown away; needs a network. TORCH and TORCH_INDEX as for bare.sh.
set -euo pipefail
shopt -s nullglob
folder=${1:?usage: try_sdist.sh FOLDER}
sources=("$folder"/tensorizer-*.tar.gz)
if [ ${#sources[@]} != 1 ]; then
  echo "try_sdist.sh: ${#sources[@]} source distributions in $folder: expected one" >&2
  exit 1
fi
scripts=$(cd "$(dirname "$0")" && pwd)
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install -y --no-install-recommends python3 python3-venv
python3 -m venv /tmp/sdist
bin=/tmp/sdist/bin
"$bin/pip" install --quiet 'setuptools>=64' wheel ninja
"$bin/pip" install --quiet "${TORCH:-torch}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
install=("$bin/pip" install --no-build-isolation "${sources[0]}")

# must_fail TEXT: the installation fails, and TEXT is in the line that says what to do.
must_fail() {
  if "${install[@]}" >/tmp/without.log 2>&1; then
    echo "built without what it needs: wanted a line with '$1'"
    exit 1
  fi
  grep -o 'tensorizer: an up-to-date pip .*' /tmp/without.log | head -n 1 | grep -F "$1" || {
    cat /tmp/without.log
    echo "does not say in one line what it needs: wanted '$1'"
    exit 1
  }
}

if command -v c++ || command -v g++; then
  echo "there is a compiler already: wanted a container without one"
  exit 1
fi
must_fail 'needs a compiler of C++20'
apt-get -q install -y --no-install-recommends g++ make python3-dev
must_fail 'apt-get install lib'
"$scripts/../system-packages.sh" build
"${install[@]}"
"$bin/python" "$scripts/smoke.py" /tmp/sdist

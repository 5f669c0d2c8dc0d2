#!/usr/bin/env bash
# usage: try_sdist.sh FOLDER: installs the source distribution of FOLDER on a Debian that has a compiler alone, which
# must fail with the advice to update pip, then with the libraries it names, and uses it. For a container that is
# thrown away; needs a network. TORCH and TORCH_INDEX as for bare.sh.
set -euo pipefail
shopt -s nullglob
sources=("$1"/tensorizer-*.tar.gz)
scripts=$(cd "$(dirname "$0")" && pwd)
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install -y --no-install-recommends g++ make python3 python3-dev python3-venv
python3 -m venv /tmp/sdist
bin=/tmp/sdist/bin
"$bin/pip" install --quiet 'setuptools>=64' wheel ninja
"$bin/pip" install --quiet "${TORCH:-torch}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
install=("$bin/pip" install --no-build-isolation "${sources[0]}")
if "${install[@]}" >/tmp/without.log 2>&1; then
  echo "built without any library"
  exit 1
fi
grep -o 'tensorizer: an up-to-date pip .*' /tmp/without.log | head -n 1 | grep 'apt-get install' || {
  cat /tmp/without.log
  echo "does not say in one line what it needs"
  exit 1
}
"$scripts/../system-packages.sh" build
"${install[@]}"
mkdir -p /tmp/sdist-files
"$bin/python" "$scripts/smoke.py" --folder /tmp/sdist-files --inside /tmp/sdist

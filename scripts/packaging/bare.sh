#!/usr/bin/env bash
# usage: bare.sh FOLDER: installs the wheel of FOLDER on a machine that has nothing, and uses it: files, https, rediss
# and proxies with the certificates of other distributions. For a container that is thrown away; needs a network.
# TORCH: another requirement than `torch`. TORCH_INDEX: an index of CPU builds of it.
set -euo pipefail
shopt -s nullglob
folder=${1:?usage: bare.sh FOLDER}
wheels=("$folder"/tensorizer-*.whl)
[ ${#wheels[@]} != 0 ] || { echo "bare.sh: no wheel in $folder" >&2; exit 1; }
folder=$(cd "$folder" && pwd)
scripts=$(cd "$(dirname "$0")" && pwd)
if command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get -q update
  packages=(python3 python3-venv)
  [ "$(. /etc/os-release && echo "$ID $VERSION_ID")" != "ubuntu 20.04" ] || packages=(python3.9 python3.9-venv)
  apt-get -q install -y --no-install-recommends "${packages[@]}"
  python=${packages[0]}
  install=(apt-get -q install -y --no-install-recommends openssl redis-server util-linux)
else
  dnf -y install python3.11
  python=python3.11
  redis=redis
  dnf -q list redis >/dev/null 2>&1 || redis=redis6  # Amazon Linux
  install=(dnf -y install openssl "$redis" util-linux)
fi
"$python" -m venv /tmp/bare
bin=/tmp/bare/bin
"$bin/pip" install --quiet --upgrade 'pip>=20.3'
"$bin/pip" install --quiet "${TORCH:-torch}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
tag=$("$bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
# By its name: never a later release of the index in its place.
wheels=("$folder"/tensorizer-*-"$tag-$tag"-*"$(uname -m)".whl)
[ ${#wheels[@]} != 0 ] || { echo "bare.sh: no wheel for $tag on $(uname -m) in $folder" >&2; exit 1; }
"$bin/pip" install --quiet "${wheels[@]}"
"$bin/python" "$scripts/smoke.py" /tmp/bare
# Up to here nothing was installed but Python. The tests bring servers along.
"${install[@]}"
"$bin/pip" install --quiet pytest pytest-timeout pytest-xdist hypothesis psutil
mkdir /tmp/bare-suite  # without the package: the tests then import the wheel
cp -r "$scripts/../../tests" "$scripts/../../pyproject.toml" /tmp/bare-suite
cd /tmp/bare-suite
"$bin/python" -m pytest -q -m '' tests/io/test_certificates.py

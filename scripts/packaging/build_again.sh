#!/usr/bin/env bash
# usage: build_again.sh FOLDER PYTHON: builds the wheel of PYTHON once more, in another folder, with another time zone, umask,
# locale and nothing kept but the downloads; fails unless it is equal byte for byte to the one of its name in FOLDER.
# TOOLS: a Python with the packages of requirements/packaging.txt.
set -euo pipefail
: "${2:?usage: build_again.sh FOLDER PYTHON}"
folder=$(cd "$1" && pwd) python=$(realpath --no-symlinks "$2")
tools=$(realpath --no-symlinks "${TOOLS:?a Python with the packages of requirements/packaging.txt}")
cd "$(dirname "$0")/../.."
again=$(mktemp -d)
trap 'rm -rf "$again"' EXIT
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH TZ=Pacific/Chatham LANG=C.UTF-8 PYTHONHASHSEED=4711
umask 077
mkdir "$again/sources" "$again/cache"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$again/sources"
cp -r .cache/packaging/sources "$again/cache"
cd "$again/sources"
"$tools" scripts/packaging/build_wheel.py --cache "$again/cache" --out "$again/dist" "$python"
for wheel in "$again"/dist/*.whl; do
  cmp "$wheel" "$folder/${wheel##*/}" && echo "${wheel##*/}: equal"
done

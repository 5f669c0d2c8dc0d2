#!/usr/bin/env bash
# usage: build.sh ZENSICAL FOLDER: builds the site into FOLDER; warnings are errors.
# Zensical wants docs/ and mkdocs.yml in one folder, and has its cache there; so it works in a new one.
set -euo pipefail
: "${2:?usage: build.sh ZENSICAL FOLDER}"
program=$(realpath --no-symlinks "$1") folder=$(realpath --no-symlinks "$2")
cd "$(dirname "$0")/../.."
top=$(mktemp -d)
trap 'rm -rf "$top"' EXIT
ln -s "$PWD"/{scripts,tensorizer} "$top"
cp -r docs scripts/site/mkdocs.yml "$top"  # it refuses pages that a link leads to
cd "$top"
PYTHONPATH=scripts/site "$program" build --strict --config-file mkdocs.yml
rm -rf "$folder"
mv site "$folder"

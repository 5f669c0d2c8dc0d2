#!/usr/bin/env bash
# usage: ci_wheels.sh FOLDER: the release wheels of this machine's architecture, built by cibuildwheel in its containers.
set -euo pipefail
cd "$(dirname "$0")/../.."
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
docker info >/dev/null 2>&1 || export CIBW_CONTAINER_ENGINE=podman
command -v cibuildwheel >/dev/null && exec cibuildwheel --output-dir "$1"
exec pipx run --spec "$(sed -n 's/^\(cibuildwheel==[0-9.]*\).*/\1/p' requirements/dev.txt)" cibuildwheel --output-dir "$1"

#!/usr/bin/env bash
# usage: ci_wheels.sh FOLDER: the release wheels of this machine's architecture, built by cibuildwheel in its images.
set -euo pipefail
cd "$(dirname "$0")/../.."
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
pipx run --spec cibuildwheel==4.3.5 cibuildwheel --output-dir "$1"

#!/usr/bin/env bash
# usage: ci_repair.sh WHEEL FOLDER: the finished and checked wheel in FOLDER.
set -euo pipefail
wheel=$1 folder=$2
scripts=$(cd "$(dirname "$0")" && pwd)
/finish/bin/python "$scripts/finish_wheel.py" "$wheel" --prefix /deps --out "$folder"
/finish/bin/python "$scripts/check_wheel.py" "$folder"

#!/usr/bin/env bash
# usage: ci_repair.sh WHEEL FOLDER: the finished and checked wheel in FOLDER. `python` is the one that built it.
set -euo pipefail
wheel=$1 folder=$2
scripts=$(cd "$(dirname "$0")" && pwd)
headers=$(python -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent / "include")')
/finish/bin/python "$scripts/finish_wheel.py" "$wheel" --prefix /deps --headers "$headers" --out "$folder"
/finish/bin/python "$scripts/check_wheel.py" --forbid "$PWD" /deps /finish -- "$folder"

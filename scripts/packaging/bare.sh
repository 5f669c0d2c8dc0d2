#!/usr/bin/env bash
# usage: bare.sh FOLDER: installs the wheel of FOLDER on a machine that has nothing, and uses it.
set -euo pipefail
folder=$(cd "$1" && pwd)
scripts=$(cd "$(dirname "$0")" && pwd)
if command -v apt-get >/dev/null; then
  apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends python3 python3-venv
  python=python3
  command -v python3.9 >/dev/null && python=python3.9
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))'; then  # Ubuntu 20.04 has 3.8
    DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends python3.9 python3.9-venv
    python=python3.9
  fi
else
  dnf -y install python3.11
  python=python3.11
fi
"$python" -m venv /tmp/bare
/tmp/bare/bin/pip install --quiet --upgrade 'pip>=20.3'
/tmp/bare/bin/pip install --quiet torch ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
/tmp/bare/bin/pip install --quiet --find-links "$folder" --only-binary tensorizer --pre tensorizer
mkdir -p /tmp/bare-files
/tmp/bare/bin/python "$scripts/smoke.py" --folder /tmp/bare-files --inside /tmp/bare

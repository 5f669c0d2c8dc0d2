#!/usr/bin/env bash
# Compiles what uses libcurl as if its headers were of release 7.68, the oldest that will do: the version says so, and
# every name that came later may not be used. CURL_HEADERS=folder takes real headers of an old release instead.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
flags=(-std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-missing-field-initializers -Wno-deprecated-declarations -I csrc)
if [ -n "${CURL_HEADERS:-}" ]; then
  flags+=(-isystem "$CURL_HEADERS")
else
  {
    echo '#include <curl/curl.h>'
    echo '#undef LIBCURL_VERSION_NUM'
    echo '#define LIBCURL_VERSION_NUM 0x074400'
    # A poisoned name may not appear below, a macro of that name would not be stopped.
    grep -vE '^(#|$)' scripts/curl-names-after-7.68.txt | while read -r name; do
      printf '#undef %s\n#pragma GCC poison %s\n' "$name" "$name"
    done
  } >"$folder/old_curl.h"
  flags+=(-include "$folder/old_curl.h")
fi
for file in $(grep -rlE '#include (<curl/|"io/(curl|http)/)' csrc --include='*.cpp' | grep -v '^csrc/bind/' | sort); do
  ${CXX:-c++} "${flags[@]}" "$file" || { echo "$file needs a libcurl newer than 7.68" >&2; exit 1; }
done

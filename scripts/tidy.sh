#!/usr/bin/env bash
# clang-tidy over folders of csrc/. usage: tidy.sh [FOLDER...]; without folders, those that differ from main; where nothing
# does, all of them, folder by folder as one file, and without the analyzer, which takes three times as long as everything
# else together. What passed is not checked again until it, a header or the settings change.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/tidy
tidy=${CLANG_TIDY:-clang-tidy}

folders=("$@") without="" together=OFF
if [ ${#folders[@]} = 0 ] && git rev-parse --verify --quiet origin/main >/dev/null; then
  mapfile -t folders < <(git diff --name-only "$(git merge-base HEAD origin/main)" -- csrc | cut -d/ -f2 | sort -u)
fi
if [ ${#folders[@]} = 0 ]; then
  without="--checks=-clang-analyzer-*" together=ON build=build/tidy-together
fi

cmake -S tests/native -B $build -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
  -DTENSORIZER_SANITIZE=address,undefined -DTENSORIZER_BY_FOLDER=$together -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null
# Everything a verdict depends on but the file itself.
common=$without$($tidy --version)$(cat csrc/.clang-tidy $build/compile_commands.json $(find csrc -name '*.h' | sort) | sha256sum)

check() {
  local file=$1 mark errors
  mark=$build/passed/$({ echo "$common"; sed -nE 's/^#include "(.*\.cpp)"$/\1/p' "$file" | xargs -r cat; cat "$file"; } \
    | sha256sum | cut -c1-32)
  [ -e "$mark" ] && return
  errors=$(mktemp)
  if ! $tidy --quiet --config-file=csrc/.clang-tidy $without -p $build "$file" 2>"$errors"; then
    grep -v 'warnings generated' "$errors" >&2 || true
    rm -f "$errors"
    echo "clang-tidy: $file" >&2
    return 1
  fi
  rm -f "$errors"
  touch "$mark"
}
export -f check
export build common tidy without
mkdir -p $build/passed
files=()
if [ $together = ON ]; then
  mapfile -t files < <(find $build -path '*/tensorizer_core.dir/Unity/*.cxx' | sort; find csrc/crypto/kernels -name '*.cpp' | sort)
  echo "clang-tidy: csrc (${#files[@]} times)"
else
  for folder in "${folders[@]}"; do
    [ -d "csrc/$folder" ] && [ "$folder" != bind ] || continue
    mapfile -t -O ${#files[@]} files < <(find "csrc/$folder" -name '*.cpp' | sort)
  done
  echo "clang-tidy: ${folders[*]} (${#files[@]} files)"
fi
[ ${#files[@]} = 0 ] || printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "${JOBS:-2}" bash -c 'set -euo pipefail; check "$1"' _

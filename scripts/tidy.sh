#!/usr/bin/env bash
# clang-tidy over folders of csrc/. usage: tidy.sh [FOLDER...]; without folders, those that differ from main; where nothing
# does, all of them, but without the analyzer, which takes three times as long as everything else together.
# A file that passed is not checked again until it, a header or the settings change.
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/tidy

folders=("$@") without=""
if [ ${#folders[@]} = 0 ] && git rev-parse --verify --quiet origin/main >/dev/null; then
  mapfile -t folders < <(git diff --name-only "$(git merge-base HEAD origin/main)" -- csrc | cut -d/ -f2 | sort -u)
fi
if [ ${#folders[@]} = 0 ]; then
  without="--checks=-clang-analyzer-*"
  mapfile -t folders < <(find csrc -mindepth 1 -maxdepth 1 -type d ! -name bind -printf '%f\n' | sort)
fi

cmake -S tests/native -B $build -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
  -DTENSORIZER_SANITIZE=address,undefined -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null
# Everything a verdict depends on but the file itself.
common=$without$(cat .clang-tidy $build/compile_commands.json $(find csrc -name '*.h' | sort) | sha256sum)

check() {
  local file=$1 mark
  mark=build/tidy/passed/$({ echo "$common"; cat "$file"; } | sha256sum | cut -c1-32)
  [ -e "$mark" ] && return
  if ! clang-tidy --quiet $without -p build/tidy "$file" 2>/tmp/tidy.$$.err; then
    grep -v 'warnings generated' /tmp/tidy.$$.err >&2 || true
    rm -f /tmp/tidy.$$.err
    echo "clang-tidy: $file" >&2
    return 1
  fi
  rm -f /tmp/tidy.$$.err
  touch "$mark"
}
export -f check
export common without
mkdir -p $build/passed
files=()
for folder in "${folders[@]}"; do
  [ -d "csrc/$folder" ] && [ "$folder" != bind ] || continue
  mapfile -t -O ${#files[@]} files < <(find "csrc/$folder" -name '*.cpp' | sort)
done
echo "clang-tidy: ${folders[*]} (${#files[@]} files)"
[ ${#files[@]} = 0 ] || printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "${JOBS:-2}" bash -c 'set -euo pipefail; check "$1"' _

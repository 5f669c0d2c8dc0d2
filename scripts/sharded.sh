#!/usr/bin/env bash
# Runs a program of GoogleTest, built with sanitizers or without, in JOBS processes at a time; prints what each said, one
# after the other. usage: sharded.sh PROGRAM ARGUMENTS...
set -euo pipefail
here=$(dirname "$0")
jobs=${JOBS:-2}
# Tests differ by minutes, so whoever is done early takes another share.
export GTEST_TOTAL_SHARDS=$((jobs == 1 ? 1 : 8 * jobs)) here folder
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
share() {
  local index=$1
  shift
  GTEST_SHARD_INDEX=$index "$here/sanitized.sh" "$@" >"$folder/$index" 2>&1
}
export -f share
failed=0
seq 0 $((GTEST_TOTAL_SHARDS - 1)) | xargs -P "$jobs" -I{} bash -c 'share "$@"' _ {} "$@" || failed=1
for ((index = 0; index < GTEST_TOTAL_SHARDS; index++)); do
  cat "$folder/$index"
done
exit $failed

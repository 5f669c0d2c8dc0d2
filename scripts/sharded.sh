#!/usr/bin/env bash
# Runs a program of GoogleTest, built with sanitizers or without, in JOBS processes that share its tests; prints what each
# said, one after the other. usage: sharded.sh PROGRAM ARGUMENTS...
set -euo pipefail
shards=${JOBS:-2}
folder=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$folder"' EXIT
for ((shard = 0; shard < shards; shard++)); do
  GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "$(dirname "$0")/sanitized.sh" "$@" >"$folder/$shard" 2>&1 &
  pids+=($!)
done
failed=0
for ((shard = 0; shard < shards; shard++)); do
  wait "${pids[shard]}" || failed=1
  cat "$folder/$shard"
done
exit $failed

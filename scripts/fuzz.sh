#!/usr/bin/env bash
# Builds the libFuzzer targets of tests/native and runs each for FUZZ_SECONDS (default 8). What a run finds interesting is
# kept in build/fuzz/corpus/TARGET for the next one; seeds are cut from the golden files by tests/native/make_seeds.py.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-8} build=build/fuzz programs=build/native-asan
scripts/native.sh native-asan fuzzers

python=.venv/bin/python
[ -x $python ] || python=${PYTHON:-python3}
[ ! -e tests/native/make_seeds.py ] || $python tests/native/make_seeds.py tests/vectors/golden $build/seeds

ran=0
for source in tests/native/fuzz_*.cpp; do
  [ -e "$source" ] || break
  target=$(basename "$source" .cpp)
  corpus=$build/corpus/$target
  mkdir -p "$corpus"
  folders=("$corpus")
  [ -d "$build/seeds/$target" ] && folders+=("$build/seeds/$target")
  echo "== $target for $seconds s"
  if ! scripts/sanitized.sh "$programs/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$build/$target-" "${folders[@]}" >"$build/$target.log" 2>&1; then
    tail -n 60 "$build/$target.log"
    echo "fuzz: $target failed; the input lies in $build/$target-*"
    exit 1
  fi
  grep -E 'number_of_executed_units' "$build/$target.log" || true
  ran=$((ran + 1))
done
echo "fuzz: $ran targets passed"

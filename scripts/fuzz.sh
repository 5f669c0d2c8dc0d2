#!/usr/bin/env bash
# Builds the libFuzzer targets of tests/native and runs each for FUZZ_SECONDS (default 8), JOBS at a time. What a run finds
# interesting is kept in build/fuzz/corpus/TARGET for the next one; seeds are cut from the golden files by
# tests/native/make_seeds.py.
set -euo pipefail
cd "$(dirname "$0")/.."
export seconds=${FUZZ_SECONDS:-8} build=build/fuzz programs=build/native-asan
scripts/native.sh native-asan fuzzers

python=.venv/bin/python
[ -x $python ] || python=${PYTHON:-python3}
[ ! -e tests/native/make_seeds.py ] || $python tests/native/make_seeds.py tests/vectors/golden $build/seeds

fuzz() {
  local target=$1 corpus=$build/corpus/$1
  mkdir -p "$corpus"
  local folders=("$corpus")
  [ -d "$build/seeds/$target" ] && folders+=("$build/seeds/$target")
  if ! scripts/sanitized.sh "$programs/$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$build/$target-" "${folders[@]}" >"$build/$target.log" 2>&1; then
    tail -n 60 "$build/$target.log"
    echo "fuzz: $target failed; the input lies in $build/$target-*"
    return 1
  fi
  echo "== $target for $seconds s: $(sed -nE 's/^stat::number_of_executed_units: *//p' "$build/$target.log") runs"
}
export -f fuzz

mkdir -p $build
mapfile -t targets < <(find tests/native -maxdepth 1 -name 'fuzz_*.cpp' -printf '%f\n' | sed 's/\.cpp$//' | sort)
printf '%s\0' "${targets[@]}" | xargs -0 -n 1 -P "${JOBS:-2}" bash -c 'set -euo pipefail; fuzz "$1"' _
echo "fuzz: ${#targets[@]} targets passed"

#!/usr/bin/env bash
# Builds the module and runs the GPU tests with the Python and torch of this machine, without network and without root.
#
# usage: gpu_check.sh [--fake] [--sanitize TOOL] [PYTEST ARGUMENTS...]
#        gpu_check.sh --build [--fake] [COMMAND...]
#   --build  no tests: only make build/gpu-venv, an environment over that Python in which this checkout is importable, and run
#            COMMAND with what it needs
#   --sanitize TOOL  only the tests whose kernels decrypt, under that tool of NVIDIA's compute-sanitizer:
#            memcheck, racecheck, initcheck, synccheck
#   --fake   the same steps over the fake driver of tests/native/fake_cuda, on a machine without a GPU
#
# Machines with GPUs often have another Python and torch than the machine one works on, and no way out. What the build
# needs beside a compiler can be brought along (on a machine of the same distribution, with network):
#     scripts/gpu_deps.sh fetch deps/ && rsync -a . gpu-machine:tensorizer/
# and is unpacked here:
#     scripts/gpu_deps.sh unpack deps/ build/deps && TENSORIZER_DEPS_PREFIX=build/deps/usr make gpu-check
# Environment: PYTHON (python3), TENSORIZER_DEPS_PREFIX (see setup.py), JOBS (all cores), GPU_WHEELS (a folder of wheels to
# take ninja, setuptools and pytest from, where the machine's Python lacks them).
set -euo pipefail
cd "$(dirname "$0")/.."

fake=
build_only=
runner=()
while :; do
  case "${1:-}" in
    --fake) fake=1 ;;
    --build) build_only=1 ;;
    --sanitize)
      runner=(compute-sanitizer --tool "${2:?--sanitize wants the name of a tool}" --error-exitcode 1 --target-processes all)
      shift
      ;;
    *) break ;;
  esac
  shift
done
python=${PYTHON:-python3}
site=build/gpu-site
mkdir -p build

say() { echo "tensorizer: $*" >&2; }
if [ ${#runner[@]} -gt 0 ]; then
  command -v "${runner[0]}" >/dev/null || { say "there is no compute-sanitizer here (it comes with CUDA's toolkit)" && exit 1; }
  set -- -k "decrypt or forged" "$@"
fi
has() { "$python" -c "import $1" 2>/dev/null; }

# An environment of its own, so that processes started without PYTHONPATH find all of it too. It sees what PYTHON sees, be
# that a system's or a virtual environment.
"$python" -m venv --without-pip --clear build/gpu-venv
"$python" - "$PWD" "$PWD/$site" >build/gpu-paths <<'PY'
import site, sys, sysconfig
paths = sysconfig.get_paths()
places = [*sys.argv[1:], paths["purelib"], paths["platlib"], site.getusersitepackages(), *site.getsitepackages()]
print(*dict.fromkeys(places), sep="\n")
PY
cp build/gpu-paths "$(echo build/gpu-venv/lib/python3*/site-packages)/tensorizer-gpu.pth"
pip=("$python" -m pip)
python=$PWD/build/gpu-venv/bin/python

missing=()
for module in torch numpy psutil setuptools ninja pytest; do
  has "$module" || missing+=("$module")
done
if [ ${#missing[@]} -gt 0 ] && [ -n "${GPU_WHEELS:-}" ]; then
  "${pip[@]}" install --quiet --no-index --find-links "$GPU_WHEELS" --no-deps --target "$site" "${missing[@]}" \
    iniconfig packaging pluggy
  missing=()
fi
if [ ${#missing[@]} -gt 0 ]; then
  say "$python lacks: ${missing[*]} (bring their wheels and set GPU_WHEELS=folder)"
  exit 1
fi
# ninja as a program: its package brings one, which may not be on the path
command -v ninja >/dev/null || PATH="$("$python" -c 'import ninja; print(ninja.BIN_DIR)'):$PATH"

"$python" - <<'PY'
import platform, torch
print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
for i in range(torch.cuda.device_count()):
    print(f"cuda:{i}: {torch.cuda.get_device_name(i)}, {torch.cuda.mem_get_info(i)[1] / 2**30:.0f} GiB")
PY
if [ -z "$fake" ] && ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
  say "torch finds no CUDA device here (--fake runs the same steps over the fake driver)"
  exit 1
fi

# Libraries below the prefix need each other; the loader looks for those along this path only.
if [ -n "${TENSORIZER_DEPS_PREFIX:-}" ]; then
  for folder in "$TENSORIZER_DEPS_PREFIX"/lib "$TENSORIZER_DEPS_PREFIX"/lib64 "$TENSORIZER_DEPS_PREFIX"/lib/*-linux-gnu; do
    if [ -d "$folder" ]; then LD_LIBRARY_PATH="$(realpath "$folder")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; fi
  done
  export LD_LIBRARY_PATH
fi

echo "== building tensorizer._C"
MAX_JOBS=${JOBS:-$(nproc)} "$python" setup.py --quiet build_ext --inplace >build/gpu-build.log 2>&1 || {
  grep -vE '^\[[0-9]+/[0-9]+\]' build/gpu-build.log >&2
  exit 1
}

if [ -n "$build_only" ]; then
  [ $# = 0 ] || exec "$@"
  exit
fi
echo "== tests"
if [ -n "$fake" ]; then
  exec ${runner[@]+"${runner[@]}"} "$python" -m pytest -q -p no:cacheprovider tests/load/test_cuda_pipeline.py "$@"
fi
# By name: to collect the others takes packages that this machine need not have.
export TENSORIZER_REQUIRE_GPU=1
exec ${runner[@]+"${runner[@]}"} "$python" -m pytest -q -p no:cacheprovider -m gpu \
  tests/load/test_cuda_pipeline.py tests/save/test_torch_compat.py "$@"

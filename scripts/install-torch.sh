#!/usr/bin/env bash
# Installs a CPU build of torch: what pip's configured index offers, else what the index TORCH_INDEX offers, else one line
# says what to set. usage: install-torch.sh PYTHON REQUIREMENT
set -euo pipefail
python=${1:?the python of an environment} requirement=${2:?a requirement such as torch==2.13.0+cpu}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# The ordinary index has no "+cpu" builds, so pip's first answer there is quick. One try again: an index that is out of reach is
# no reason to wait for minutes.
install() { "$python" -m pip install -qq --disable-pip-version-check "$requirement" "$@" >>"$log" 2>&1; }
install && exit
if [ -n "${TORCH_INDEX:-}" ]; then
  echo "== $requirement from $TORCH_INDEX"
  install --retries 1 --extra-index-url "$TORCH_INDEX" && exit
fi
echo "tensorizer: pip found no $requirement for $("$python" -V 2>&1), neither where it is configured to look nor in ${TORCH_INDEX:-TORCH_INDEX, which is empty}:" \
  "set TORCH_INDEX to an index of CPU builds of torch, or TORCH=${requirement%+cpu} for the default build (on Linux with several GB of CUDA libraries);" \
  "pip said: $(grep -v '^ *$' "$log" | tail -n 1)" >&2
exit 1

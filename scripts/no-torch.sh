#!/usr/bin/env bash
# Says what to do when pip has no CPU build of torch for this Python. usage: no-torch.sh REQUIREMENT
cat >&2 <<TEXT

tensorizer: pip found no $1 for $(python3 --version 2>&1).
The CPU build is on PyTorch's own package index: pytorch.org, "Get Started", names its address. Then type either
    TORCH_INDEX=<that address> make ...
or, to take the default build of the package index (on Linux with several GB of CUDA libraries),
    make TORCH=${1%+cpu} ...
TEXT

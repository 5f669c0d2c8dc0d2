"""Marks of tests that want a later torch than the oldest one that the package supports."""

from __future__ import annotations

import pytest
import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

READS_PICKLES = RELEASE >= (2, 6)
HAS_CHECKPOINTS = RELEASE >= (2, 5)

reads_pickles = pytest.mark.skipif(not READS_PICKLES, reason="pickles are read with torch 2.6 or later")
has_checkpoints = pytest.mark.skipif(
    not HAS_CHECKPOINTS, reason="these tests use what torch.distributed has since torch 2.5"
)

"""This project as its wheel has it: the newest one of ``dist/`` for this Python, in an environment of its own."""

from __future__ import annotations

from benchmarks.contenders.ours import Ours


class OursWheel(Ours):
    name = "ours-wheel"
    label = "this project, wheel"
    role = "variant"
    wheel = True
    by_name_only = True

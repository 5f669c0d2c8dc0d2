"""Speed and memory of this project beside others, measured side by side: ``make bench`` or ``python -m benchmarks``.

``cases/`` says what is measured, ``contenders/`` who takes part (one file each), ``runner.py`` takes turns. Every
single measurement is a process of its own (``worker.py``), in the environment of its contender.
"""

"""``python -m tensorizer``: the command line."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from tensorizer import cli

    cli.begin_program()
    from tensorizer.cli.main import main

    sys.exit(main())

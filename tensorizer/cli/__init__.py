"""The command line, ``tensorizer`` or ``python -m tensorizer``: it parses and prints, and no more.

Nothing here imports torch before a command needs it, so that ``--help`` answers at once.
"""

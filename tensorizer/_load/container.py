"""The open file by its earlier name, while other branches import it from here."""

from tensorizer._load.open_file import OpenFile as Container

__all__ = ["Container"]

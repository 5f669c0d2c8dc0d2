"""The tensors of an open file by their earlier name, while other branches import them from here."""

from tensorizer._load.open_file import OpenFile as LoadedTensors

__all__ = ["LoadedTensors"]

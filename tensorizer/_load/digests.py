"""Names that moved, while other branches import them from here."""

from typing import Optional

import torch

from tensorizer._format.names import listed
from tensorizer._load.open_file import OpenFile
from tensorizer._load.reader import missing_hashes

__all__ = ["holds", "listed", "missing_hashes"]


def holds(file: OpenFile, i: int, tensor: torch.Tensor) -> Optional[bool]:
    return file.holds(i, tensor)

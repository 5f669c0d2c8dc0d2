"""Names that moved, while other branches import them from here."""

from tensorizer._format.names import listed
from tensorizer._load.reader import missing_hashes

__all__ = ["listed", "missing_hashes"]

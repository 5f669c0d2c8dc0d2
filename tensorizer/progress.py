"""Progress of a load or a save: silent by default, a bar or a callable on request."""

from __future__ import annotations

from tensorizer._progress import Progress as Progress

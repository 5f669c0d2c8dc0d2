"""Paths in the checkout, for tests and the programs that they start."""

import re
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parents[1]
EXAMPLES = ROOT / "examples"


def snippet(page: str, words: str) -> str:
    """The only block of Python with these words on a page of the documentation."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), re.M | re.S)
    (found,) = (block for block in blocks if words in block)
    return found

"""Which digests are stored with each tensor."""

from __future__ import annotations

from collections.abc import Collection
from typing import Union

__all__ = ["HASH_NAMES", "check_hashes"]

HASH_NAMES = ("crc32", "sha256")


def check_hashes(hashes: Union[str, Collection[str], None], encrypted: bool) -> frozenset[str]:
    """The chosen names; without a CRC-32 for encrypted tensors, whose four bytes would say too much about short ones.

    Raises:
        ValueError: Another name.
    """
    chosen = frozenset((hashes,) if isinstance(hashes, str) else hashes or ())
    unknown = sorted(map(str, chosen.difference(HASH_NAMES)))
    if unknown:
        raise ValueError(f"hashes: wanted names out of {', '.join(HASH_NAMES)}, found {', '.join(unknown)}")
    return chosen - {"crc32"} if encrypted else chosen

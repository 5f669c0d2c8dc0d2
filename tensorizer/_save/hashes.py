"""Which digests are stored with each tensor."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Optional, Union

from tensorizer import _C
from tensorizer._crypto.keys import signer_of

__all__ = ["HASH_NAMES", "check_hashes", "check_signer"]

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


def check_signer(signing_key: Any, hashes: Collection[str], encrypted: bool) -> Optional[_C.Signer]:
    """What signs a file whose tensors get these digests.

    Raises:
        TypeError: Neither a ``SigningKey`` nor ``None``.
        ValueError: Nothing would bind the data of the file to the signature.
    """
    signer = signer_of(signing_key)
    if signer is not None and "sha256" not in hashes and not encrypted:
        raise ValueError(
            "signing_key: wanted 'sha256' among hashes, which is what a signature of a file in clear covers"
        )
    return signer

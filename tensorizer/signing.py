"""Ed25519 keys, which sign files and check their signatures.

``docs/signing.md`` shows how a release job signs models and how programs check them.
"""

from __future__ import annotations

from tensorizer._signing import PublicKey as PublicKey
from tensorizer._signing import SigningKey as SigningKey

"""The keys with which tensors are encrypted and decrypted.

``docs/encryption.md`` shows their use, and ``docs/security.md`` says what encryption protects.
"""

from __future__ import annotations

from tensorizer._encryption import DecryptionParams as DecryptionParams
from tensorizer._encryption import EncryptionParams as EncryptionParams

"""Limits how much an archive may unpack to. A few bytes of a hostile archive can unpack to a full disk."""

from __future__ import annotations

import zipfile

from tensorizer.errors import FormatError

#: An archive of small files, such as a tokenizer, is never larger than this, packed or unpacked.
MAX_NBYTES = 2 << 30

# zlib packs JSON and vocabularies to a tenth of their size; at most it packs to a thousandth.
_MAX_RATIO = 100
_FREE_NBYTES = 1 << 20  # the ratio says nothing about small archives
_MAX_FILES = 10_000


def check_zip(archive: zipfile.ZipFile, name: str, nbytes: int) -> None:
    """Checks how many bytes the files of an archive unpack to, before any of them is unpacked.

    Args:
        archive: The archive. zipfile unpacks no more than its directory says.
        name: Name of the archive, for messages.
        nbytes: Size of the archive.

    Raises:
        FormatError: The archive has too many files or unpacks to too many bytes.
    """
    files = archive.infolist()
    packed = [info.file_size for info in files if info.compress_type != zipfile.ZIP_STORED]
    if len(packed) > _MAX_FILES:
        raise FormatError(f"{name}: expected an archive of at most {_MAX_FILES} packed files, got {len(packed)}")
    if sum(packed) > MAX_NBYTES:
        raise FormatError(f"{name}: expected an archive that unpacks to at most {MAX_NBYTES} bytes, got {sum(packed)}")
    unpacked_nbytes = sum(info.file_size for info in files)  # files that are not packed may overlap
    if unpacked_nbytes > max(_FREE_NBYTES, _MAX_RATIO * nbytes):
        raise FormatError(
            f"{name}: expected an archive that unpacks to at most {_MAX_RATIO} times its {nbytes} bytes, "
            f"got {unpacked_nbytes} bytes"
        )

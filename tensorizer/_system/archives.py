"""How much an archive may unpack to: a few bytes of one that somebody else made can stand for a full disk."""

from __future__ import annotations

import zipfile

from tensorizer.errors import FormatError

#: An archive of small files, such as a tokenizer, is no larger, packed or unpacked.
MAX_NBYTES = 2 << 30

# JSON and vocabularies are packed to a tenth; zlib can pack to a thousandth.
_MAX_RATIO = 100
_FREE_NBYTES = 1 << 20  # of small archives the ratio says nothing
_MAX_FILES = 10_000


def check_zip(archive: zipfile.ZipFile, name: str, nbytes: int) -> None:
    """Bounds what the files of an archive unpack to, before any is.

    Args:
        archive: Its files are unpacked to no more than its directory says.
        name: Of the archive, for messages.
        nbytes: Of the archive.

    Raises:
        FormatError: Too many files, or too many bytes.
    """
    files = archive.infolist()
    packed = [info.file_size for info in files if info.compress_type != zipfile.ZIP_STORED]
    if len(packed) > _MAX_FILES:
        raise FormatError(f"{name}: expected an archive of at most {_MAX_FILES} packed files, got {len(packed)}")
    if sum(packed) > MAX_NBYTES:
        raise FormatError(f"{name}: expected an archive that unpacks to at most {MAX_NBYTES} bytes, got {sum(packed)}")
    unpacked_nbytes = sum(info.file_size for info in files)  # files that are not packed may lie upon each other
    if unpacked_nbytes > max(_FREE_NBYTES, _MAX_RATIO * nbytes):
        raise FormatError(
            f"{name}: expected an archive that unpacks to at most {_MAX_RATIO} times its {nbytes} bytes, "
            f"got {unpacked_nbytes} bytes"
        )

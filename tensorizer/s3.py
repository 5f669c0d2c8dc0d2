"""Object stores that speak S3, by the names that callers import from here; the work is done in ``_io.s3``."""

from __future__ import annotations

from tensorizer._io.s3.objects import open_read, open_sink, open_write, s3_download, s3_upload

__all__ = ["open_read", "open_sink", "open_write", "s3_download", "s3_upload"]

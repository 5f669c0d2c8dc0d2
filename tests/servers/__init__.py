"""Servers that tests start on loopback and stop again, well-behaved and otherwise."""

from __future__ import annotations

__all__ = ["missing_servers", "needs"]


def needs(name: str) -> str:
    """The reason of a skipped test, which conftest.py sums up: ``name`` is one of those below."""
    return f"needs {name}, which is not installed"


def missing_servers() -> list[str]:
    """Those that are not installed, so that tests which need them are skipped."""
    from servers import nginx
    from servers.redis_server import redis_is_installed
    from servers.s3_server import s3_is_installed

    found = {"nginx": nginx.PROGRAM is not None, "Redis": redis_is_installed(), "OpenStack Swift": s3_is_installed()}
    return [name for name, is_there in found.items() if not is_there]

"""Runs programs in their own mount namespace, so that their mounts end with them, even if they are killed."""

import functools
import subprocess
import tempfile

import pytest

_PROBE = """mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay none -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" /etc"""


def with_mounts(commands, *program):
    """The command that runs ``program`` after the shell's ``commands``, which may mount."""
    return ["unshare", "--mount", "sh", "-ec", f'{commands}\nexec "$@"', "sh", *map(str, program)]


@functools.cache
def _refusal():
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--mount", "sh", "-ec", _PROBE, "sh", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except OSError as error:
            return str(error)
        return "" if done.returncode == 0 else done.stderr.strip() or f"unshare ended with {done.returncode}"


def require_mounts():
    """Skips the test if this user may not mount tmpfs and overlayfs, or the system has no namespaces."""
    if _refusal():
        pytest.skip(f"cannot mount here: {_refusal()}")

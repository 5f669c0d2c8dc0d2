"""Other releases of Debian: their Python, compilers and libraries, with this machine's kernel and network. Wants root.

A release is unpacked once, by mmdebstrap, and kept in ``.cache/packaging``. A command sees it as it was unpacked, and a
copy of this repository at its own path, without what was built; what it changes there is gone afterwards, what it
writes below ``.cache/roots/SUITE`` stays.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

from lock import debian_mirror

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "packaging"
# What Debian's own Python comes without, and itself.
PYTHON = ("python3", "python3-dev", "python3-venv")
# The release of Debian whose python3 is that Python.
SUITES = {"3.9": "bullseye", "3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}
# Where Debian keeps the certificates that are trusted; those of this machine are lent to a root with a network.
CERTIFICATES = ("/etc/ssl/certs", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates")
BUILT = ("build", "dist", "site", "tensorizer/*.so")


def can_make_roots() -> bool:
    return shutil.which("mmdebstrap") is not None and os.geteuid() == 0


def packages_of(group: str) -> list[str]:
    """What ``scripts/system-packages.sh`` installs for a group of commands."""
    command = [str(ROOT / "scripts" / "system-packages.sh"), "--print", group]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def packages_of_builders() -> list[str]:
    """What a root needs in which wheels are built."""
    return ["git", "ca-certificates", "ccache", *PYTHON, *packages_of("wheels")]


def debian_root(suite: str, packages: Sequence[str], cache: Path) -> Optional[Path]:
    """A Debian with ``packages`` and what they need, nothing else, made once; None where this machine cannot."""
    wanted = " ".join(sorted(packages))
    root = cache / "roots" / f"{suite}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"
    stamp = root.with_suffix(".stamp")
    if stamp.exists():
        return root
    if not can_make_roots():
        return None
    try:
        mirror = debian_mirror()
    except LookupError as error:
        print(error, file=sys.stderr)
        return None
    print(f"== Debian {suite} with {wanted}", flush=True)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    options = ["--variant=minbase", "--mode=root", f"--include={','.join(packages)}"]
    options.append('--aptopt=Acquire::Check-Valid-Until "false"')  # a mirror may be a snapshot; signatures are checked
    # In a namespace of its own no mount of /proc or /dev is left when it is killed.
    command = ["unshare", "--mount", "mmdebstrap", *options, suite, str(root), mirror]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode != 0:
        print("\n".join(made.stdout.strip().splitlines()[-5:]), file=sys.stderr)
        return None
    stamp.touch()
    return root


# In a mount namespace of its own: all of it is gone when the command ends. Arguments: the root, three lists of folders
# (one a line) and the command.
IN_ROOT = """set -ef
root=$1 lent=$2 copied=$3 shared=$4
shift 4
newline='
'
IFS=$newline
mount -t tmpfs none "$WORK"
overlay() {
  mkdir -p "$WORK/$3/changes" "$WORK/$3/work" "$2"
  mount -t overlay none -o "lowerdir=$1,upperdir=$WORK/$3/changes,workdir=$WORK/$3/work" "$2"
}
inside=$WORK/root
overlay "$root" "$inside" 0
count=0
for folder in $copied; do
  count=$((count + 1))
  overlay "$folder" "$inside$folder" $count
done
for folder in $shared; do
  mkdir -p "$inside$folder"
  mount --bind "$folder" "$inside$folder"
done
for folder in $lent; do
  mkdir -p "$inside$folder"
  mount --bind -o ro "$folder" "$inside$folder"
done
mount -t proc none "$inside/proc"
mount --rbind /dev "$inside/dev"
cp -L /etc/resolv.conf /etc/hosts "$inside/etc/" || :
unset IFS
exec chroot "$inside" "$@"
"""


def run_in_root(
    root: Path,
    command: Sequence[str],
    *,
    lent: Sequence[object] = (),
    copied: Sequence[object] = (),
    shared: Sequence[object] = (),
    environment: Optional[Mapping[str, str]] = None,
) -> int:
    """Runs ``command`` with ``root`` as its file system; its exit status.

    Args:
        root: Of :func:`debian_root`. The command may write into it: nothing of that stays.
        command: A program of the root and its arguments.
        lent: Folders of this machine that it may read, each at its own path.
        copied: Folders that it may write into without changing them.
        shared: Folders that it may change.
        environment: Besides ``PATH`` and a locale.
    """
    lists = ["\n".join(map(str, folders)) for folders in (lent, copied, shared)]
    with tempfile.TemporaryDirectory() as work:
        variables = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "WORK": work, **(environment or {})}
        # It ends with this process, however that ends.
        unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        started = [*unshare, "sh", "-c", IN_ROOT, "sh", str(root)]
        return subprocess.run([*started, *lists, *command], env=variables, check=False).returncode


def run_with_repository(suite: str, packages: Sequence[str], command: Sequence[str]) -> Optional[int]:
    """Runs ``command`` in a Debian, in a copy of this repository; its exit status, None where there is no such root."""
    root = debian_root(suite, packages, CACHE)
    if root is None:
        return None
    kept = kept_folder(suite)
    kept.mkdir(parents=True, exist_ok=True)
    script = f'cd "$1"; shift; rm -rf {" ".join(BUILT)}; exec "$@"'
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "TORCH_INDEX"))}
    passed_on["HOME"] = "/root"
    return run_in_root(
        root,
        ["/bin/bash", "-ec", script, "bash", str(ROOT), *command],
        lent=[folder for folder in CERTIFICATES if Path(folder).is_dir()],
        copied=[ROOT],
        shared=[kept],
        environment=passed_on,
    )


def kept_folder(suite: str) -> Path:
    """What commands in a root of ``suite`` write here stays."""
    return ROOT / ".cache" / "roots" / suite

"""Reads how much memory the container leaves, from the control groups (v1 and v2) of this process.

A process in a container sees the memory of the whole machine unless it asks its control groups. Without a limit, and on
systems whose files cannot be read, the answer is ``None``: callers use the number as a hint, so no error is raised.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Optional

# cgroup v1 says "no limit" with a number near 2**63 (rounded down to a page); nothing real comes close to this.
_UNLIMITED = 1 << 60

_ROOT = Path("/")  # tests replace it


def _read_text(path: Path) -> Optional[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _read_int(path: Path) -> Optional[int]:
    text = _read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:  # "max"
        return None


def _read_table(path: Path) -> dict[str, int]:
    """Reads a file of ``name number`` lines."""
    table = {}
    for line in (_read_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            table[name] = int(value)
    return table


def _group_paths(root: Path) -> dict[str, str]:
    """Maps controllers to the path of our group, from ``/proc/self/cgroup``. The v2 hierarchy has the name ``""``."""
    paths = {}
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def _groups(controller: str, root: Path) -> list[tuple[int, Path]]:
    """The folders whose limits apply, each with the version of its hierarchy: our group and all groups above it.

    The files of the memory controller may be in a v1 hierarchy, in the v2 hierarchy, or (hybrid) in both.
    """
    paths = _group_paths(root)
    found = []
    for line in (_read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            version, path = 2, paths.get("")
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            version, path = 1, paths.get(controller)
        else:
            continue
        if path is None:
            continue
        mount_point = root / _unescaped(fields[4]).lstrip("/")
        group = _group_folder(mount_point, _unescaped(fields[3]), path)
        found += [(version, folder) for folder in (group, *group.parents) if folder.is_relative_to(mount_point)]
    return found


def _unescaped(field: str) -> str:
    """Decodes a field of ``mountinfo``, which writes blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _group_folder(mount_point: Path, mount_root: str, group_path: str) -> Path:
    """The folder of a group below the mount point.

    A container may see the path that its group has on the host although only that group is mounted. Then, and whenever
    the folder does not exist, the mount point itself is the best answer.
    """
    relative = group_path
    if mount_root != "/" and (group_path == mount_root or group_path.startswith(mount_root + "/")):
        relative = group_path[len(mount_root) :]
    if ".." in Path(relative).parts:
        return mount_point
    folder = mount_point / relative.lstrip("/")
    return folder if folder.is_dir() else mount_point


def _group_limit(version: int, group: Path) -> Optional[int]:
    limit = _read_int(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
    return None if limit is None or limit >= _UNLIMITED else limit


def _group_memory_available(version: int, group: Path) -> Optional[int]:
    """Bytes that the group may still allocate. Its file cache counts as free, as in the kernel's own figures."""
    limit = _group_limit(version, group)
    if version == 2:
        usage = _read_int(group / "memory.current")
        reclaimable = ["inactive_file", "active_file", "slab_reclaimable"]
    else:
        usage = _read_int(group / "memory.usage_in_bytes")
        reclaimable = ["total_inactive_file", "total_active_file"]
    if limit is None or usage is None:
        return None
    table = _read_table(group / "memory.stat")
    used = max(0, usage - sum(table.get(name, 0) for name in reclaimable))
    return max(0, limit - used)


def memory_available(root: Path = _ROOT) -> Optional[int]:
    """Bytes this process may still allocate under the memory limits of its control groups; ``None`` without a limit.

    This is the smallest amount of the process's group and its ancestors. The cache of files counts as free.
    """
    amounts = (_group_memory_available(version, group) for version, group in _groups("memory", root))
    return min((amount for amount in amounts if amount is not None), default=None)


def memory_limit(root: Path = _ROOT) -> Optional[int]:
    """Bytes that the control groups of this process allow it; ``None`` without a limit."""
    limits = (_group_limit(version, group) for version, group in _groups("memory", root))
    return min((limit for limit in limits if limit is not None), default=None)


def available_nbytes() -> int:
    """Bytes that this process may still take from the machine and its groups. The cache of files counts as free."""
    group = memory_available()
    try:
        machine = (
            int(re.findall(r"^MemAvailable: *(\d+)", _read_text(Path("/proc/meminfo")) or "", re.MULTILINE)[0]) << 10
        )
    except IndexError:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return machine if group is None else min(machine, group)

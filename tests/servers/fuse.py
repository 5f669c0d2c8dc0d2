"""A file system that is not local: this program serves a folder by the kernel's protocol (FUSE)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["MountRules", "fuse_folder"]

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _UNLINK, _RENAME, _OPEN, _READ, _WRITE = 1, 2, 3, 4, 10, 12, 14, 15, 16
_STATFS, _RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _CREATE = 17, 18, 20, 25, 26, 27, 28, 29, 35
_RENAME2 = 45
_SET_MODE, _SET_SIZE = 1, 8
_REQUEST_NBYTES = 40
_MOST_WRITTEN = 1 << 17
_ROOT = 1
_INIT_ANSWER = struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 16, 12, _MOST_WRITTEN, 1, 0, 0, *[0] * 8)
_STATFS_ANSWER = struct.pack("<5Q4I6I", *[1 << 20] * 5, 4096, 255, 4096, 0, *[0] * 6)


@dataclasses.dataclass(frozen=True)
class MountRules:
    """The abilities of the file system beside reading and writing."""

    renames: bool = True
    any_order: bool = True  # otherwise bytes must be written in order, and a file is stored when it is closed
    modes: bool = True
    removes: bool = True
    failing_sync: int = 0  # its number, from 1 on


class _Refused(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


@dataclasses.dataclass
class _File:
    name: str
    content: bytearray = dataclasses.field(default_factory=bytearray)
    mode: int = 0o644
    is_failed: bool = False  # a write was refused: nothing is stored


class _Folder:
    """One flat folder in memory."""

    def __init__(self, rules: MountRules) -> None:
        self.rules = rules
        self._files: dict[int, _File] = {}
        self._next = _ROOT + 1
        self._syncs = 0

    def answer(self, operation: int, node: int, body: bytes) -> bytes:
        done = _OPERATIONS.get(operation)
        if done is None:
            raise _Refused(errno.ENOSYS)
        return done(self, node, body)

    def _named(self, name: str) -> int:
        for node, file in self._files.items():
            if file.name == name:
                return node
        raise _Refused(errno.ENOENT)

    def _attributes(self, node: int) -> bytes:
        # struct fuse_attr: inode, size, blocks, times, mode, links, owner, device, block size, flags
        mode, nbytes = stat.S_IFDIR | 0o700, 0
        if node != _ROOT:
            if node not in self._files:
                raise _Refused(errno.ENOENT)
            file = self._files[node]
            mode, nbytes = stat.S_IFREG | file.mode, len(file.content)
        sizes = (node, nbytes, (nbytes + 511) // 512, 0, 0, 0)
        return struct.pack("<6Q10I", *sizes, 0, 0, 0, mode, 1, os.geteuid(), os.getegid(), 0, 4096, 0)

    def _entry(self, node: int) -> bytes:
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self._attributes(node)

    def _init(self, node: int, body: bytes) -> bytes:
        return _INIT_ANSWER

    def _statfs(self, node: int, body: bytes) -> bytes:
        return _STATFS_ANSWER

    def _nothing(self, node: int, body: bytes) -> bytes:
        return b""

    def _fsync(self, node: int, body: bytes) -> bytes:
        self._syncs += 1
        if self._syncs == self.rules.failing_sync:
            raise _Refused(errno.EIO)
        return b""

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._named(_text(body)))

    def _getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0) + self._attributes(node)

    def _setattr(self, node: int, body: bytes) -> bytes:
        (valid,) = struct.unpack_from("<I", body)
        (nbytes,) = struct.unpack_from("<Q", body, 16)
        (mode,) = struct.unpack_from("<I", body, 68)
        file = self._files[node]
        if valid & _SET_MODE:
            if not self.rules.modes:
                raise _Refused(errno.ENOSYS)
            file.mode = stat.S_IMODE(mode)
        if valid & _SET_SIZE:
            if not self.rules.any_order and nbytes != 0:
                raise _Refused(errno.EINVAL)
            del file.content[nbytes:]
            file.content.extend(bytes(nbytes - len(file.content)))
        return self._getattr(node, body)

    def _open(self, node: int, body: bytes) -> bytes:
        return struct.pack("<Q2I", node, 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        _, mode = struct.unpack_from("<2I", body)
        made, self._next = self._next, self._next + 1
        self._files[made] = _File(_text(body[16:]), mode=stat.S_IMODE(mode) if self.rules.modes else 0o644)
        return self._entry(made) + self._open(made, body)

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, nbytes = struct.unpack_from("<2QI", body)
        return bytes(self._files[node].content[offset : offset + nbytes])

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, nbytes = struct.unpack_from("<2QI", body)
        file = self._files[node]
        if not self.rules.any_order and (file.is_failed or offset != len(file.content)):
            file.is_failed = True
            raise _Refused(errno.EINVAL)
        file.content.extend(bytes(max(0, offset - len(file.content))))
        file.content[offset : offset + nbytes] = body[40 : 40 + nbytes]
        return struct.pack("<2I", nbytes, 0)

    def _release(self, node: int, body: bytes) -> bytes:
        if self._files[node].is_failed:
            del self._files[node]
        return b""

    def _unlink(self, node: int, body: bytes) -> bytes:
        if not self.rules.removes:
            raise _Refused(errno.EPERM)
        del self._files[self._named(_text(body))]
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        return self._move(body[8:])

    def _rename2(self, node: int, body: bytes) -> bytes:
        return self._move(body[16:])

    def _move(self, names: bytes) -> bytes:
        if not self.rules.renames:
            raise _Refused(errno.ENOSYS)
        source, target = names.split(b"\0")[:2]
        moved = self._named(source.decode())
        with contextlib.suppress(_Refused):
            del self._files[self._named(target.decode())]
        self._files[moved].name = target.decode()
        return b""

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, room = struct.unpack_from("<2QI", body)
        answer = b""
        for number, (one, file) in enumerate(list(self._files.items())[offset:], offset + 1):
            name = file.name.encode()
            entry = struct.pack("<2Q2I", one, number, len(name), stat.S_IFREG >> 12) + name
            entry += bytes(-len(entry) % 8)
            if len(answer) + len(entry) > room:
                break
            answer += entry
        return answer


_OPERATIONS: dict[int, Callable[[_Folder, int, bytes], bytes]] = {
    _LOOKUP: _Folder._lookup,
    _GETATTR: _Folder._getattr,
    _SETATTR: _Folder._setattr,
    _UNLINK: _Folder._unlink,
    _RENAME: _Folder._rename,
    _RENAME2: _Folder._rename2,
    _OPEN: _Folder._open,
    _READ: _Folder._read,
    _WRITE: _Folder._write,
    _STATFS: _Folder._statfs,
    _RELEASE: _Folder._release,
    _FSYNC: _Folder._fsync,
    _FLUSH: _Folder._nothing,
    _INIT: _Folder._init,
    _OPENDIR: _Folder._open,
    _READDIR: _Folder._readdir,
    _RELEASEDIR: _Folder._nothing,
    _CREATE: _Folder._create,
}


def _text(body: bytes) -> str:
    return body.split(b"\0", 1)[0].decode()


@contextlib.contextmanager
def fuse_folder(path: Path, rules: MountRules = MountRules()) -> Iterator[None]:
    """Mounts an empty folder at `path`, which must exist.

    Raises:
        OSError: The kernel has no FUSE, or mounting is not allowed.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={device},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tests", os.fsencode(path), b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), "cannot mount a FUSE file system")
        thread = threading.Thread(target=_serve, args=(device, _Folder(rules)))
        thread.start()
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)
            thread.join()
    finally:
        os.close(device)


def _serve(device: int, folder: _Folder) -> None:
    while True:
        try:
            request = os.read(device, _MOST_WRITTEN + (1 << 16))
        except OSError as error:
            if error.errno == errno.ENODEV:  # it was unmounted
                return
            continue
        _, operation, unique, node = struct.unpack_from("<IIQQ", request)
        if operation == _FORGET:
            continue
        answer, failure = b"", 0
        try:
            answer = folder.answer(operation, node, request[_REQUEST_NBYTES:])
        except _Refused as refused:
            failure = refused.code
        except KeyError:
            failure = errno.ENOENT
        with contextlib.suppress(OSError):
            os.write(device, struct.pack("<IiQ", 16 + len(answer), -failure, unique) + answer)

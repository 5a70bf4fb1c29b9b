"""Files held open, and files mapped without staying open. They are immutable: a mapped file must not be truncated."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from quiver.errors import DiskFailed


class OpenFile:
    """A file of the store held open. It closes when its last user releases it, evicted or not."""

    __slots__ = ("__weakref__", "_mapped", "fd", "size_bytes")

    def __init__(self, path: Path) -> None:
        # Do not follow links or wait for fifos: under a digest's name they are strays, and must not block the open.
        self._take(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), str(path))

    @classmethod
    def adopt(cls, fd: int) -> OpenFile:
        """Take over a descriptor, which is closed with the file. Raises ``OSError`` if it is no regular file's."""
        self = cls.__new__(cls)
        self._take(fd, "a passed descriptor")
        return self

    def _take(self, fd: int, name: str) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self._mapped: memoryview | None = None
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
        self.size_bytes = found.st_size

    @property
    def linked(self) -> bool:
        """Whether the file still has a name. An evicted one occupies its room until nobody holds it open."""
        return os.fstat(self.fd).st_nlink > 0

    def map(self) -> memoryview:
        """Return the file mapped read-only. The mapping keeps no descriptor: a process may map thousands of shards.

        It is unmapped when the last view of it is gone. Raises ``DiskFailed``.
        """
        if not self.size_bytes:
            return memoryview(b"")
        with disk_errors(Path(f"/proc/self/fd/{self.fd}"), "map"):
            mapping = _Mapping(self.fd, self.size_bytes)
        return np.asarray(mapping).data

    def mapped(self) -> memoryview:
        """Return one mapping, made by the first call: it lasts as long as the file is held open."""
        if self._mapped is None:
            self._mapped = self.map()
        return self._mapped

    def read(self) -> memoryview:
        """Return a copy of the file's bytes: unlike with a mapping, a failing disk is an error, not a signal."""
        data = np.empty(self.size_bytes, np.uint8).data
        at = 0
        while at < len(data):
            count = os.preadv(self.fd, [data[at:]], at)
            if not count:
                break
            at += count
        return data[:at]


_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap = ctypes.CFUNCTYPE(
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
    use_errno=True,
)(("mmap", _libc))
_munmap = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(("munmap", ctypes.PyDLL(None)))
_FAILED: Final = ctypes.c_void_p(-1).value


class _Mapping:
    """A file mapped into memory for as long as this object lives.

    It calls the C library, since no alternative fits. Until Python 3.13 ``mmap.mmap`` keeps a duplicate of the
    descriptor, and most processes are limited to 1,024. Arrow reopens the file by its path in ``/proc``, which the
    mode of another user's file may forbid.

    The last view may be dropped anywhere, also in a C++ destructor, so unmapping keeps the GIL: a thread that requests
    the GIL while the interpreter ends is unwound, and C++ destructors do not survive that. For the same reason views
    are made by numpy, which is plain C.
    """

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, fd: int, size_bytes: int) -> None:
        address = _mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.__array_interface__ = {"version": 3, "data": (address, True), "typestr": "|u1", "shape": (size_bytes,)}
        weakref.finalize(self, _munmap, address, size_bytes).atexit = False


@contextlib.contextmanager
def disk_errors(root: Path, doing: str = "write to") -> Iterator[None]:
    """Raise the disk's errors as ``DiskFailed``, with what to do about them."""
    try:
        yield
    except OSError as error:
        what = {
            errno.ENOSPC: "the disk is full; free some room, or lower the capacity",
            errno.EDQUOT: "the disk quota is used up; free some room, or lower the capacity",
            errno.EROFS: "the disk is read-only",
        }.get(error.errno or 0, error.strerror or str(error))
        raise DiskFailed(f"cannot {doing} {root}: {what}") from error


def sync_folder(path: Path) -> None:
    """Make the folder's entries survive a power cut. Raises ``OSError``."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

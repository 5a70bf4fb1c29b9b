"""Files held open, and mapped without staying open. Immutable ones: nobody may shorten a file while it is mapped."""

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
    """A file of the store held open. It closes when the last one who uses it lets go, evicted or not."""

    __slots__ = ("__weakref__", "_mapped", "fd", "size_bytes")

    def __init__(self, path: Path) -> None:
        # Not followed and not waited for: a link or a fifo under a digest's name is a stray, and must not hang us.
        self._take(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), str(path))

    @classmethod
    def adopt(cls, fd: int) -> OpenFile:
        """Return the file behind a descriptor, which is closed with it. Raises ``OSError`` if it is no regular one."""
        self = cls.__new__(cls)
        self._take(fd, "what was passed")
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
        """Whether the file still has a name: one that was evicted keeps its room until nobody holds it open."""
        return os.fstat(self.fd).st_nlink > 0

    def map(self) -> memoryview:
        """Return the file mapped read-only. The mapping keeps no descriptor: a process may map thousands of shards.

        It ends when the last view of it is gone. Raises ``DiskFailed``.
        """
        if not self.size_bytes:
            return memoryview(b"")
        with disk_errors(Path(f"/proc/self/fd/{self.fd}"), "map"):
            mapping = _Mapping(self.fd, self.size_bytes)
        return np.asarray(mapping).data

    def mapped(self) -> memoryview:
        """Return ``map()``, made once: it stays as long as the file is held open."""
        if self._mapped is None:
            self._mapped = self.map()
        return self._mapped

    def read(self) -> memoryview:
        """Return the file's bytes, copied: unlike a mapping, a disk that fails here is an error and no signal."""
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
    """Memory that is a file, until this object goes.

    By the C library, since nothing else does it. ``mmap.mmap`` keeps a duplicate of the descriptor until Python 3.13,
    and 1,024 is all that most processes may have. Arrow opens the file anew by its path in ``/proc``, and the modes of
    a file that another user passed may forbid that.

    The last view may be dropped anywhere, in a destructor of C++ too, so unmapping keeps the GIL: a thread that wants
    it back while the interpreter ends is unwound, which C++ destructors do not survive. Views are numpy's for the same
    reason, which is plain C.
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
    """Raise what the disk refuses as ``DiskFailed``, with what to do about it."""
    try:
        yield
    except OSError as error:
        what = {
            errno.ENOSPC: "the disk is full; free some room, or lower the capacity",
            errno.EDQUOT: "the disk quota is used up; free some room, or lower the capacity",
            errno.EROFS: "the disk is read-only",
        }.get(error.errno or 0, error.strerror or str(error))
        raise DiskFailed(f"cannot {doing} {root}: {what}") from error

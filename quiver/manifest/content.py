"""The bytes of a manifest as they were when it was opened, in memory that no other process can change.

A mapped file would not do: ``cp new old`` writes into the mapped file, and if the file is truncated or the disk fails,
SIGBUS ends the process. So the file is read once (docs/adr/0015). Forked processes share this memory with their parent;
spawned ones get it as sealed memory, by ``share`` and ``adopt``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from quiver.errors import BadRequest, DiskFailed, NotFound
from quiver.manifest.container import INDEX_AGAIN, MAGIC

_PASSING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # the file may be fine
READ_BYTES: Final = 4 << 20
SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Content:
    """The bytes of one file. ``view`` is read-only and stays valid as long as anything refers to it."""

    __slots__ = ("_shared_fd", "view")

    def __init__(self, memory: mmap.mmap, shared_fd: int = -1) -> None:
        self.view = memoryview(memory).toreadonly()
        self._shared_fd = shared_fd

    @classmethod
    def read(cls, path: Path, size_bytes_max: int | None = None) -> Content:
        """Read a file of at most so many bytes.

        Raises ``NotFound``, ``DiskFailed``, and ``BadRequest`` for a file that cannot be a manifest.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # non-blocking: opening a FIFO must not hang
        except FileNotFoundError as error:
            raise NotFound(f"no manifest at {path}; make one with `quiver index SOURCE -o {path}`") from error
        except OSError as error:
            if error.errno in _PASSING:
                raise DiskFailed(f"cannot open the manifest {path}: {error.strerror}") from error
            raise NotFound(f"cannot open the manifest {path}: {error.strerror or error}") from error
        try:
            return cls(_read(fd, size_bytes_max))
        except BadRequest as error:
            raise BadRequest(f"{path} is not a manifest: {error}") from error
        except OSError as error:
            raise DiskFailed(f"cannot read the manifest {path}: {error.strerror or error}") from error
        finally:
            os.close(fd)

    @classmethod
    def adopt(cls, fd: int) -> Content:
        """Map what ``share`` returned in another process, and take over that descriptor. Raises ``OSError``."""
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError("the memory is not sealed: another process could change it")
        return cls(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), fd)

    def share(self) -> int | None:
        """Return a descriptor of sealed memory with the same bytes, for other processes; ``None`` if there is none.

        It is created once and closed with this object.
        """
        if self._shared_fd < 0:
            try:
                self._shared_fd = sealed(self.view, "quiver-manifest")
            except OSError:  # forbidden, or no memory for a second copy: each process then reads the file itself
                return None
        return self._shared_fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if getattr(self, "_shared_fd", -1) >= 0:
            close(self._shared_fd)


def _read(fd: int, size_bytes_max: int | None) -> mmap.mmap:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise BadRequest("it is no regular file")
    if not found.st_size:
        raise BadRequest(f"it is empty; {INDEX_AGAIN}")
    if os.pread(fd, len(MAGIC), 0) != MAGIC:  # before memory is allocated for a file of any size
        raise BadRequest(f"it is not an Arrow file; {INDEX_AGAIN}")
    if size_bytes_max is not None and found.st_size > size_bytes_max:
        raise BadRequest(f"it is of {found.st_size} bytes, and {size_bytes_max} are allowed")
    memory = mmap.mmap(-1, found.st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # reading 240 MB: 30 ms instead of 120, which clearing small pages takes
    with memoryview(memory) as view:
        at = 0
        while at < len(view):
            count = os.preadv(fd, [view[at : at + READ_BYTES]], at)
            if not count:
                raise BadRequest("it was truncated while it was read; open it again")
            at += count
    after = os.fstat(fd)
    if (after.st_size, after.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
        raise BadRequest("it changed while it was read; open it again when it is written")
    return memory


def sealed(view: memoryview, name: str) -> int:
    """Return a descriptor of new memory with these bytes, which nobody can change. Raises ``OSError``."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        at = 0
        while at < len(view):
            at += os.write(fd, view[at : at + READ_BYTES])
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd

"""Opens files below a folder so that no symbolic link leads out of it: the check and the open are one operation.

Uses ``openat2`` with ``RESOLVE_BENEATH`` if the kernel has it (Linux 5.6). That call rejects all absolute links, also
those that lead back into the folder. So a path that it rejects is walked name by name, with a descriptor for each
folder, as is every path if the kernel or a container's filter lacks the call. No process can swap a folder for a link
between a check and an open, since there is no separate check: only files below an open descriptor can be named.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from collections.abc import Sequence
from typing import Final

_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # non-blocking: a fifo must not hang us
_FOLDER: Final = os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY
LINKS_MAX: Final = 40  # as in the kernel
_OPENAT2: Final = 437  # the number of the call on all architectures that Python supports
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_BENEATH: Final = 0x08
_WALK: Final = frozenset({errno.EXDEV, errno.ENOSYS, errno.EPERM, errno.EAGAIN, errno.EINVAL, errno.E2BIG, errno.EINTR})


class _How(ctypes.Structure):
    """``struct open_how`` of the kernel."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_How), ctypes.c_size_t)


class Beneath:
    """A folder whose files are opened for reading. Links on the way to the folder itself are followed."""

    def __init__(self, folder: str) -> None:
        """Open the folder. Raises ``OSError``."""
        self._fd = os.open(folder, _FOLDER)
        self._names = {os.path.normpath(folder), os.path.realpath(folder)}

    def __enter__(self) -> Beneath:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def open(self, path: str) -> int:
        """Return a descriptor of the file at a relative path. Raises ``OSError``: ``EXDEV`` if the path leads out."""
        if not path or path.startswith("/") or "\0" in path:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
        how = _How(_READ, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
        fd: int = _syscall(_OPENAT2, self._fd, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number in _WALK:
            return self.walk(path)
        raise OSError(number, os.strerror(number), path)

    def walk(self, path: str) -> int:
        """Do what ``open`` does without ``openat2``; follow absolute links back into the folder as well."""
        waiting = deque(path.split("/"))
        folders = [os.dup(self._fd)]  # from the folder itself down to the current one
        links = 0
        try:
            while True:
                name = waiting.popleft() if waiting else "."
                if name in ("", ".") and waiting:
                    continue
                if name == "..":
                    if len(folders) == 1:
                        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
                    os.close(folders.pop())
                    continue
                last = not any(part not in ("", ".") for part in waiting)
                # A name followed by a slash must be a folder.
                kind = _READ | os.O_DIRECTORY if last and waiting else _READ if last else _FOLDER
                fd = _entered(name, folders[-1], kind)
                if fd is None:
                    links += 1
                    if links > LINKS_MAX:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    target = os.readlink(name, dir_fd=folders[-1])
                    if target.startswith("/"):
                        target = self._inside(target)
                        _close(folders[1:])
                        del folders[1:]
                    waiting.extendleft(reversed(target.split("/")))
                elif last:
                    return fd
                else:
                    folders.append(fd)
        finally:
            _close(folders)

    def _inside(self, target: str) -> str:
        """Return the rest of an absolute path that begins with this folder's, to be walked like any other."""
        for name in self._names:
            start = os.path.join(name, "")
            if target.startswith(start) or target == name:
                return target[len(start) :] or "."
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), target)


def _entered(name: str, folder: int, flags: int) -> int | None:
    """Return a descriptor of the entry of a folder, ``None`` if it is a symbolic link."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        try:
            os.readlink(name, dir_fd=folder)
        except OSError:
            raise error from None  # no link: a file in place of a folder
        return None


def _close(folders: Sequence[int]) -> None:
    for fd in folders:
        os.close(fd)

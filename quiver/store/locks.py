"""The locks of a store's folder. The holder of a lock may be suspended at any moment, so no wait for one is long.

    <root>/owner   held by those that use the folder, as long as they use it: one daemon alone, or all that share it
    <root>/lock    held briefly by a process that shares the folder, while it makes room: it only saves work

Anybody who may read such a file can lock it, so a folder of several users needs no common owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quiver.errors import BadRequest, DiskFailed, Misconfigured
from quiver.forks import LockedFile
from quiver.ring import check_url

FILE_MODE: Final = 0o666  # less the umask: in a group's folder several users may write the file
LOCK_SECONDS_MAX: Final = 0.25  # a healthy holder needs milliseconds; with the wait for a fill less than a second
LOCK_POLL_SECONDS: Final = 0.005  # flock has no timeout
URL_BYTES_MAX: Final = 1024


def open_lock(path: Path) -> int:
    """Open a lock file, creating it if it does not exist. Raises ``OSError``."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | flags)
    except FileNotFoundError:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE)
    except OSError:  # another user's file, or a read-only disk: reading suffices to lock it
        return os.open(path, os.O_RDONLY | flags)


def own(root: Path, url: str) -> LockedFile:
    """Claim a folder for the daemon at ``url`` alone. Raises ``Misconfigured`` if it is in use, ``DiskFailed``."""
    try:
        fd = open_lock(root / "owner")
    except OSError as error:
        raise DiskFailed(f"{root} cannot be locked: {error.strerror}; choose a folder that you may write to") from error
    file = LockedFile(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, url.encode()[:URL_BYTES_MAX], 0)
    except BlockingIOError:
        by_jobs = _is_shared(fd)
        file.close()
        if by_jobs:
            raise Misconfigured(
                f"{root} is in use: running jobs have it as an embedded cache (cache=file://{root});"
                " end them, or give the daemon another --data-dir"
            ) from None
        raise Misconfigured(f"{root} is in use by another daemon; give each its own --data-dir") from None
    except OSError as error:
        file.close()
        raise DiskFailed(f"{root} cannot be locked: {error.strerror}; choose a folder that you may write to") from error
    return file


def share(root: Path) -> LockedFile | None:
    """Claim a folder together with other processes; ``None`` if it cannot be locked, because it is read-only say.

    Raises ``Misconfigured`` if a daemon runs there: it keeps the inventory in memory, and would miss the changes of
    other processes.
    """
    try:
        file = LockedFile(open_lock(root / "owner"))
    except OSError:
        return None
    try:
        fcntl.flock(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        url = _url_in(file.fd)
        file.close()
        how = f'cache="{url}"' if url else "the address that it was given by --listen"
        raise Misconfigured(f"{root} is the folder of a running daemon; read through that daemon: {how}") from None
    except OSError:  # a file system without locks: no daemon can hold one there
        file.close()
        return None
    return file


class BriefLock:
    """``<root>/lock``: a caller waits for it briefly, then proceeds without it. Safe from threads."""

    def __init__(self, root: Path) -> None:
        self._path = root / "lock"
        self._is_stuck = False  # its holder exceeded the time limit: nobody waits until the lock was acquired again

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, or run the block without it."""
        file = self._acquired()
        try:
            yield
        finally:
            if file is not None:
                file.close()

    def _acquired(self) -> LockedFile | None:
        try:
            file = LockedFile(open_lock(self._path))
        except OSError:
            return None
        deadline = time.monotonic() + (0.0 if self._is_stuck else LOCK_SECONDS_MAX)
        while True:
            try:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(LOCK_POLL_SECONDS)
                    continue
                self._is_stuck = True
            except OSError:
                pass
            else:
                self._is_stuck = False
                return file
            file.close()
            return None


def _is_shared(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _url_in(fd: int) -> str:
    try:
        return check_url(os.pread(fd, URL_BYTES_MAX, 0).decode())
    except (OSError, UnicodeDecodeError, BadRequest):
        return ""

"""What must not cross a fork: locks that another thread may hold, and locks of files.

A forked child has one thread and a copy of every lock in its state at the fork: a lock that another thread held stays
held for ever. So every object that outlives a call makes its locks here, and in a child all of them are free. The data
that they guard may be half changed in a child: an object that a child can reach checks which process it belongs to, or
starts over there.

A file lock (``flock``) belongs to the open file description, of which a child has a copy: the lock would live as long
as the child, and a child that unlocks it unlocks it for its parent too. So a child closes its copies at once, and those
of its parent's connections, on which it would read its parent's answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

Made = TypeVar("Made")

_locks: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_closed: Final[weakref.WeakSet[Closable]] = weakref.WeakSet()
_files: Final[weakref.WeakSet[LockedFile]] = weakref.WeakSet()


def _freed_in_child(made: Made) -> Made:
    _locks.add(made)
    return made


def lock() -> threading.Lock:
    """Return a lock that is free in a forked child."""
    return _freed_in_child(threading.Lock())


def rlock() -> threading.RLock:
    """Return a re-entrant lock that is free in a forked child."""
    return _freed_in_child(threading.RLock())


def condition() -> threading.Condition:
    """Return a condition that is free and has no waiters in a forked child."""
    return _freed_in_child(threading.Condition())


def event() -> threading.Event:
    """Return an event that a forked child can set and wait for."""
    return _freed_in_child(threading.Event())


class Closable(Protocol):
    """What has something open."""

    def close(self) -> None: ...


def close_in_child(owner: Closable) -> None:
    """Have a child close its copies of what the parent has open, such as a connection: it is the parent's to use."""
    _closed.add(owner)


class LockedFile:
    """A file that is open for its lock. The lock ends with ``close`` or with the process that opened it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _files.add(self)

    def is_at(self, path: Path) -> bool:
        """Whether the file still has this name."""
        try:
            return self.fd >= 0 and os.path.samestat(os.fstat(self.fd), path.lstat())
        except OSError:
            return False

    def close(self) -> None:
        """Unlock and close the file. Does nothing in a child, or when called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked by other means may have a copy
            os.close(fd)


def _in_child() -> None:
    for made in list(_locks):
        made._at_fork_reinit()
    for owner in list(_closed):
        with contextlib.suppress(OSError):
            owner.close()
    for file in list(_files):
        fd, file.fd = file.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


os.register_at_fork(after_in_child=_in_child)

"""What must not cross a fork: locks that another thread may hold, and locks of files.

A child that is forked has one thread, and a copy of every lock as it was at that moment: one that another thread held
is held for ever. So whatever outlives a call makes its locks here, and a child finds all of them free. What they guard
may be half changed in a child: who can be reached from one looks whose process it is, or begins anew there.

A lock of a file (``flock``) belongs to the open file, of which a child has a copy: it would outlive its owner for as
long as the child does, and a child that unlocks it unlocks it for its parent. So a child closes its copies at once, and
those of its parent's connections, on which it would read its parent's answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from typing import Any, Final, Protocol, TypeVar

Made = TypeVar("Made")

_locks: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_closed: Final[weakref.WeakSet[Closable]] = weakref.WeakSet()
_files: Final[weakref.WeakSet[LockedFile]] = weakref.WeakSet()


def _freed_in_child(made: Made) -> Made:
    _locks.add(made)
    return made


def lock() -> threading.Lock:
    """Return a lock that a child finds free."""
    return _freed_in_child(threading.Lock())


def rlock() -> threading.RLock:
    """Return a lock that its holder may take again, and that a child finds free."""
    return _freed_in_child(threading.RLock())


def condition() -> threading.Condition:
    """Return a condition that a child finds free, and with nobody waiting."""
    return _freed_in_child(threading.Condition())


def event() -> threading.Event:
    """Return an event that a child can set and wait for."""
    return _freed_in_child(threading.Event())


class Closable(Protocol):
    """What has something open."""

    def close(self) -> None: ...


def close_in_child(owner: Closable) -> None:
    """Have a child close its copies of what the parent has open, such as a connection: it is the parent's to use."""
    _closed.add(owner)


class LockedFile:
    """A file open for its lock, which goes with ``close`` or with the process that opened it, and not in a child."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        _files.add(self)

    def close(self) -> None:
        """Unlock and close it. Does nothing in a child, nor the second time."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # not by closing alone: something forked without us may have a copy
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

"""The idle connections to a daemon: as many as were recently used at the same time.

A rack has some two thousand reader processes, and each connection that one of them keeps open costs a daemon a
descriptor. So a process keeps as many idle connections to a daemon as it used at the same time in the last half minute
or so: one, for a reader that sends each daemon one request per batch. It reuses the most recently used one first, so
that surplus ones stay idle.

Connections belong to the process that opened them. After a fork the child closes its copies of the parent's and opens
its own: two processes on one connection would read each other's answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from quiver import forks

IDLE_CONNECTIONS_MAX: Final = 8
WINDOW_SECONDS: Final = 15.0  # a peak of use counts for one to two windows


class Closable(Protocol):
    """A connection that can be kept."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Idle(Generic[C]):
    """The idle connections to one daemon. Safe from threads.

    Each use is ``take`` (or ``begin_use``, for a connection that is always opened), then ``keep`` or ``drop``. A forked
    child does not use its parent's connections. An object that survives forks (a ``Dataset``) makes its clients again
    in each process.
    """

    def __init__(self, kept_max: int = IDLE_CONNECTIONS_MAX, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept: list[C] = []  # the most recently used one is last
        self._kept_max = kept_max
        self._clock = clock
        self._used = 0  # at the moment
        self._peak, self._peak_before = 0, 0  # of ``_used``, in this window and in the one before
        self._window_ends = clock() + WINDOW_SECONDS
        self._closed = False
        self._owner = os.getpid()
        self._lock = forks.lock()

    def __repr__(self) -> str:
        return f"Idle({len(self.kept)} kept, {self._used} used)"

    def take(self) -> C | None:
        """Return the most recently used one; ``None`` if there is none: then the caller opens one."""
        with self._lock:
            foreign = self._foreign()
            self._use()
            taken = self.kept.pop() if self.kept else None
        _close(foreign)
        return taken

    def begin_use(self) -> None:
        """Count a connection that the caller opens."""
        with self._lock:
            self._use()

    def keep(self, connection: C) -> None:
        """End a use and keep the connection. Closes the oldest beyond the number recently used at the same time."""
        with self._lock:
            self._end_use()
            if self._owner != os.getpid() or self._closed:
                surplus = [connection]
            else:
                self.kept.append(connection)
                room = min(max(self._peak, self._peak_before) - self._used, self._kept_max)
                count = max(len(self.kept) - room, 0)
                surplus, self.kept = self.kept[:count], self.kept[count:]
        _close(surplus)

    def drop(self, connection: C | None) -> None:
        """End a use without a connection to keep: close it, if one was opened at all."""
        with self._lock:
            self._end_use()
        if connection is not None:
            connection.close()

    def clear(self) -> None:
        """Close what is kept."""
        with self._lock:
            kept, self.kept = self.kept, []
        _close(kept)

    def close(self) -> None:
        """Close what is kept, and from now on every connection that is given back."""
        self._closed = True
        self.clear()

    def _foreign(self) -> list[C]:
        """Remove and return the parent's connections, if this process was forked since they were opened."""
        if self._owner == os.getpid():
            return []
        # The child's copies of the parent's descriptors: the daemon sees a connection end only once all are closed.
        foreign, self.kept, self._owner = self.kept, [], os.getpid()
        self._used = self._peak = self._peak_before = 0
        return foreign

    def _use(self) -> None:
        self._roll()
        self._used += 1
        self._peak = max(self._peak, self._used)

    def _end_use(self) -> None:
        self._roll()
        self._used = max(self._used - 1, 0)

    def _roll(self) -> None:
        """Begin a new window if the last one has ended."""
        now = self._clock()
        if now >= self._window_ends:
            recent = now < self._window_ends + WINDOW_SECONDS
            self._peak_before, self._peak = (self._peak if recent else self._used), self._used
            self._window_ends = now + WINDOW_SECONDS


def _close(connections: list[C]) -> None:
    for connection in connections:
        connection.close()

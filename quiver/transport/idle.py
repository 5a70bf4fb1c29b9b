"""Connections to a daemon that nobody uses just now, as many as were lately used at once.

A rack has some two thousand reader processes, and each connection that one of them keeps costs every daemon a
descriptor. So a process keeps as many idle connections to a daemon as it used at once in the last half minute or so,
which is one for a reader that asks a daemon once per batch. It uses the last one first, so that surplus ones grow old.

Connections belong to the process that opened them. After a fork the child closes its end of the parent's and opens its
own: two processes on one connection would read each other's answers.
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
    """What can be kept."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Idle(Generic[C]):
    """The idle connections to one daemon. Safe from threads.

    Each use is ``take`` (or ``begin_use``, for a connection that is opened without looking here), then ``keep`` or
    ``drop``. A child that was forked leaves its parent's connections alone. What lives across forks (a ``Dataset``)
    makes its clients anew in each process.
    """

    def __init__(self, kept_max: int = IDLE_CONNECTIONS_MAX, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept: list[C] = []  # the one that was used last is last
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
        """Return the one that was used last; ``None`` if there is none, and the caller opens one."""
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
        """End a use and keep the connection. Closes the oldest that are more than were used at once."""
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
        """Close what is kept, and from now on what would be."""
        self._closed = True
        self.clear()

    def _foreign(self) -> list[C]:
        """Take the parent's connections out, if this process is a child that was forked since."""
        if self._owner == os.getpid():
            return []
        # This process's end of the parent's: the daemon sees no end of it until nobody has one any more.
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

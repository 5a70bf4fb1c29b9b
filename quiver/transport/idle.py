"""What connections to a daemon have in common: how slow it may be, and where those are that nobody uses.

Connections belong to the process that opened them. After a fork the child closes its end of the parent's and opens its
own: two processes on one connection would read each other's answers.
"""

from __future__ import annotations

import os
from typing import Final, Generic, Protocol, TypeVar

from quiver import forks
from quiver.errors import Unavailable

IDLE_CONNECTIONS_MAX: Final = 8


class Connection(Protocol):
    """What can be kept."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


class Idle(Generic[C]):
    """Connections that nobody uses just now, to be used again. Safe from threads.

    A child that was forked leaves its parent's alone. It may not be forked while another thread is in here, whose lock
    would be held for ever: what lives across forks (a ``Dataset``) makes its clients anew in each process.
    """

    def __init__(self, kept_max: int = IDLE_CONNECTIONS_MAX) -> None:
        self.kept: list[C] = []
        self._kept_max = kept_max
        self._closed = False
        self._owner = os.getpid()
        self._lock = forks.lock()

    def take(self) -> C | None:
        """Return the one that was used last, if there is any."""
        with self._lock:
            foreign: list[C] = []
            if self._owner != os.getpid():
                # This process's end of the parent's: a thread of the daemon's waits until nobody has one any more.
                foreign, self.kept, self._owner = self.kept, [], os.getpid()
            taken = self.kept.pop() if self.kept else None
        _close(foreign)
        return taken

    def keep(self, connection: C) -> None:
        """Keep it, or close it if there are enough, or none is wanted any more."""
        with self._lock:
            if self._owner == os.getpid() and not self._closed and len(self.kept) < self._kept_max:
                self.kept.append(connection)
                return
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


def unreachable(url: str, error: OSError) -> Unavailable:
    """Return what it means that no connection is made."""
    return Unavailable(url, f"cannot be reached ({error.strerror or error}); is the daemon running there?")


def no_answer(url: str, error: Exception) -> Unavailable:
    """Return what it means that a connection ends or falls silent."""
    return Unavailable(url, f"does not answer ({str(error) or type(error).__name__}); is the daemon running there?")


def _close(connections: list[C]) -> None:
    for connection in connections:
        connection.close()

"""One attempt at a request, which another attempt may overtake: late after a while, given up later, or cancelled.

The thread that waits for the answer calls ``on_late`` itself, from the wait, once the answer is late: no thread and no
timer is needed for a request that is not. An answer that is arriving is late only if, at its present rate, it will take
much longer than usual. ``cancel``, from any thread, ends the wait by shutting the connection down.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Protocol

RECONSIDER_SECONDS = 0.02  # at least, between two decisions whether an answer is late
MARGIN = 2.0  # times the usual, which an answer that is arriving may take


class Closable(Protocol):
    """A connection."""

    def shut(self) -> None:
        """End all reads and writes on it."""
        ...


class Attempt:
    """What one exchange, with all that precedes it on other connections, may take. Used once."""

    def __init__(
        self,
        wanted_bytes: int = 0,
        *,
        late_seconds: float = inf,
        on_late: Callable[[], bool] = lambda: True,
        limit_seconds: float = inf,
    ) -> None:
        """``on_late`` is called after ``late_seconds``, and again later if it returns ``False``: it could not act."""
        self.received_bytes = 0
        self.is_cancelled = False
        self._wanted_bytes = wanted_bytes
        self._begun_at = time.monotonic()
        self._late_seconds = late_seconds
        self._late_at = self._begun_at + late_seconds
        self._limit_at = self._begun_at + limit_seconds
        self._on_late = on_late
        self._first_byte_at = inf
        self._lock = threading.Lock()
        self._connection: Closable | None = None

    @property
    def due_at(self) -> float:
        """When to call ``check`` at the latest, on the monotonic clock."""
        return min(self._late_at, self._limit_at)

    def heard(self, count: int, now: float) -> None:
        """Record that so many bytes of the answer arrived."""
        self.received_bytes += count
        self._first_byte_at = min(self._first_byte_at, now)

    def check(self, now: float) -> None:
        """Act if the answer is late. Raises ``TimeoutError`` past the limit."""
        if now >= self._limit_at:
            raise TimeoutError("answers far more slowly than the other daemons")
        if now < self._late_at:
            return
        remaining = self._remaining_seconds(now)
        if now + remaining - self._begun_at <= MARGIN * self._late_seconds:
            self._late_at = now + max(remaining, RECONSIDER_SECONDS)
        elif self._on_late():
            self._late_at = inf
        else:
            self._late_at = now + max(self._late_seconds, RECONSIDER_SECONDS)

    def bind(self, connection: Closable) -> None:
        """Name the connection that ``cancel`` shuts down. Raises ``TimeoutError`` if it is cancelled already."""
        with self._lock:
            if self.is_cancelled:
                raise TimeoutError("was overtaken by another daemon")
            self._connection = connection

    def release(self) -> bool:
        """Forget the connection: the exchange has ended. Return whether it was cancelled before."""
        with self._lock:
            self._connection = None
            return self.is_cancelled

    def cancel(self) -> None:
        """End the attempt. Its thread gets an error, which it ignores."""
        with self._lock:
            self.is_cancelled = True
            connection, self._connection = self._connection, None
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.shut()

    def _remaining_seconds(self, now: float) -> float:
        """Return how long the rest of the answer takes at the rate at which it arrives."""
        if self.received_bytes == 0 or now <= self._first_byte_at:
            return inf
        rate = self.received_bytes / (now - self._first_byte_at)
        return max(self._wanted_bytes - self.received_bytes, 0) / rate

"""How fast the training loop reads while it has what to read, and whether it reads at all: others plan with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

WINDOW_SECONDS: Final = 0.5
WEIGHT: Final = 0.5  # of a new window against all before
IDLE_SECONDS: Final = (2.0, 30.0)  # at least, and at most, without a batch being asked for
IDLE_STEPS: Final = 5.0  # and so many of the loop's own steps


class Pace:
    """Time in which the loop waited because nothing was resident does not count: that is not how fast it is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = 0.0
        self._clock = clock
        self._last: float | None = None
        self._bytes = 0.0
        self._seconds = 0.0
        self._starved = 0.0

    def starved(self, seconds: float) -> None:
        """A batch could not be drawn for so long."""
        self._starved += seconds

    def consumed(self, size_bytes: float, waited_seconds: float) -> None:
        """The loop took a batch, for which it had waited."""
        now = self._clock()
        if self._last is not None:
            waited = min(self._starved, waited_seconds)
            self._seconds += max(now - self._last - waited, 0.0)
            self._bytes += size_bytes
        self._last, self._starved = now, 0.0
        if self._seconds >= WINDOW_SECONDS:
            rate = self._bytes / self._seconds
            self.rate = rate if not self.rate else self.rate + WEIGHT * (rate - self.rate)
            self._bytes = self._seconds = 0.0

    def paused(self) -> None:
        """The loop does something else: the time until its next batch says nothing."""
        self._last, self._starved = None, 0.0


class Idle:
    """Whether the loop has turned to something else: it has its batch, and does not come for the next for long."""

    def __init__(self) -> None:
        self.asking = False
        self._last = 0.0
        self._step = 0.0

    def began(self, now: float) -> None:
        self.asking, self._last, self._step = False, now, 0.0

    def consumed(self, now: float) -> None:
        self.asking, self._step, self._last = False, now - self._last, now

    def is_idle(self, now: float) -> bool:
        least, most = IDLE_SECONDS
        return not self.asking and now - self._last > min(max(IDLE_STEPS * self._step, least), most)

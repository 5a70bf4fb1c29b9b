"""How fast the training loop reads while it need not wait, and whether it is paused: both are reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from quiver.rate import Rate

WINDOW_SECONDS: Final = 0.5
WEIGHT: Final = 0.5  # of a new window against all before it
PAUSE_SECONDS: Final = (2.0, 30.0)  # bounds: how long without asking for a batch makes a pause
PAUSE_STEPS: Final = 5.0  # and between them, this many of the loop's own steps


class LoopRate:
    """Bytes per second of the loop. Time in which it waited because nothing was resident does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = Rate(WINDOW_SECONDS, WEIGHT)
        self._clock = clock
        self._last: float | None = None
        self._starved_seconds = 0.0

    @property
    def value(self) -> float:
        """Bytes per second, 0 until known."""
        return self._rate.value

    def starved(self, seconds: float) -> None:
        """Record that no batch could be drawn for so long."""
        self._starved_seconds += seconds

    def consumed(self, size_bytes: float, waited_seconds: float) -> None:
        """The loop received a batch, after waiting for it."""
        now = self._clock()
        if self._last is not None:
            waited = min(self._starved_seconds, waited_seconds)
            self._rate.add(size_bytes, max(now - self._last - waited, 0.0))
        self._last, self._starved_seconds = now, 0.0

    def pause(self) -> None:
        """The loop does something else: do not count the time until its next batch."""
        self._last, self._starved_seconds = None, 0.0


class LoopPauses:
    """Tells a loop that pauses, to validate for instance, from one that is training."""

    def __init__(self) -> None:
        self._is_asking = False
        self._last = 0.0
        self._step_seconds = 0.0

    def begin(self, now: float) -> None:
        """A pass begins."""
        self._is_asking, self._last, self._step_seconds = False, now, 0.0

    def asked(self) -> None:
        """The loop waits for a batch."""
        self._is_asking = True

    def consumed(self, now: float) -> None:
        """The loop received a batch."""
        self._is_asking, self._step_seconds, self._last = False, now - self._last, now

    def is_paused(self, now: float) -> bool:
        """Whether the loop has received a batch and, for longer than a few steps, has not asked for the next one."""
        least, most = PAUSE_SECONDS
        return not self._is_asking and now - self._last > min(max(PAUSE_STEPS * self._step_seconds, least), most)

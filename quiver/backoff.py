"""Exponential backoff: how long something that failed is left alone, twice as long after each failure in a row."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_chance = random.SystemRandom()  # the global generator is the training program's: it may count on its sequence
DOUBLINGS_MAX = 32  # of the first pause, before it is capped: no failure count makes a float overflow


class Backoff:
    """Whether to retry by now. Belongs to one thread at a time; ``clock`` is in seconds.

    ``jitter``: the share of each pause that is drawn at random, so that many clients do not retry in lockstep.
    """

    def __init__(
        self,
        first_seconds: float,
        most_seconds: float,
        *,
        jitter: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = 0  # in a row
        self._first_seconds, self._most_seconds = first_seconds, most_seconds
        self._jitter = jitter
        self._clock = clock
        self._until = 0.0

    def __repr__(self) -> str:
        return f"Backoff({self.failures} failures, {self.left_seconds:.3g} s left)"

    @property
    def left_seconds(self) -> float:
        """Seconds until the next attempt, 0 if it may be made now."""
        return max(self._until - self._clock(), 0.0)

    @property
    def is_waiting(self) -> bool:
        """Whether it is too early for the next attempt."""
        return self._clock() < self._until

    def fail(self) -> float:
        """Count a failure; return for how many seconds no attempt is to be made."""
        seconds = min(self._first_seconds * 2.0 ** min(self.failures, DOUBLINGS_MAX), self._most_seconds)
        seconds *= 1 - self._jitter * _chance.random()
        self.failures += 1
        self._until = self._clock() + seconds
        return seconds

    def pause(self, seconds: float) -> None:
        """Make no attempt for so long, without counting a failure."""
        self._until = self._clock() + seconds

    def succeed(self) -> None:
        """Forget the failures: the next attempt may be made at once, the next failure costs the first pause again."""
        self.failures, self._until = 0, 0.0

"""How long a draw waits for shards to arrive before it takes samples that are read past the cache. Pure: no clock.

A wait ends once nothing usable has arrived for ``PATIENCE_SECONDS``, and at the latest after ``WAIT_SECONDS_MAX``.
A wait in vain halves the next one; a successful one doubles it again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PATIENCE_SECONDS: Final = 5.0  # without anything usable arriving
PATIENCE_SECONDS_MIN: Final = 0.1
WAIT_SECONDS_MAX: Final = 20.0  # whatever arrives meanwhile


class _Wait(NamedTuple):
    began: float
    since: float  # the last time something usable arrived
    usable: int  # resident pending samples then


class DrawWait:
    """The wait for one batch after another, of one loader."""

    def __init__(self) -> None:
        self._patience_seconds = PATIENCE_SECONDS
        self._wait: _Wait | None = None

    @property
    def is_waiting(self) -> bool:
        return self._wait is not None

    def go_on(self, now: float, usable: int) -> bool:
        """Begin to wait, or check again; return whether to keep waiting. ``usable``: resident pending samples."""
        if self._wait is None:
            self._wait = _Wait(now, now, usable)
            return True
        if now - self._wait.began >= WAIT_SECONDS_MAX:
            return False
        if usable > self._wait.usable:
            self._wait = _Wait(self._wait.began, now, usable)
            return True
        return now - self._wait.since < self._patience_seconds

    def end(self, now: float) -> float:
        """End the wait, since a batch is drawn; return how many seconds it took, and adapt the patience."""
        if self._wait is None:
            return 0.0
        began, since, _ = self._wait
        was_in_vain = now - since >= self._patience_seconds
        patience = self._patience_seconds / 2 if was_in_vain else self._patience_seconds * 2
        self._patience_seconds = min(max(patience, PATIENCE_SECONDS_MIN), PATIENCE_SECONDS)
        self._wait = None
        return now - began

    def cancel(self) -> None:
        """Forget the wait."""
        self._wait = None

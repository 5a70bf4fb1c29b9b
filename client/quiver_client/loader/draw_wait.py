"""How long a draw waits for shards to arrive before it takes samples that are read past the cache. Pure: no clock.

A wait ends once nothing of use arrived for ``PATIENCE_SECONDS``, and in any case after ``WAIT_SECONDS_MAX``. After a
wait in vain the next one is half as long, and twice as long again after one that was worth it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PATIENCE_SECONDS: Final = 5.0  # without anything of use arriving
PATIENCE_SECONDS_MIN: Final = 0.1
WAIT_SECONDS_MAX: Final = 20.0  # whatever arrives meanwhile


class _Wait(NamedTuple):
    began: float
    since: float  # the last time something of use arrived
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
        """Begin to wait, or look again; return whether to go on waiting. ``usable``: resident pending samples."""
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
        """A batch is drawn: return for how many seconds it was waited for, and adapt the patience."""
        if self._wait is None:
            return 0.0
        began, since, _ = self._wait
        was_in_vain = now - since >= self._patience_seconds
        patience = self._patience_seconds / 2 if was_in_vain else self._patience_seconds * 2
        self._patience_seconds = min(max(patience, PATIENCE_SECONDS_MIN), PATIENCE_SECONDS)
        self._wait = None
        return now - began

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._wait = None

"""How fast shards come in, as seen here: what ``quiver.need`` wants to know of an origin. Its caller has the clock."""

from __future__ import annotations

from typing import Final

from quiver.need import Origin

SMOOTHING: Final = 0.3  # of a new value in the running mean: the last few count, and one odd one does not decide
WINDOW_SECONDS: Final = 0.5  # of fetching, over which bytes a second are taken
REPORT_SECONDS: Final = 0.5  # between two reports of a consumer, until it is known


class Pace:
    """Running means: what a fill takes, the origin's bandwidth while it is read, the pause between two reports."""

    def __init__(self) -> None:
        self._fill_seconds = 0.0
        self._rate = 0.0
        self._report_seconds = REPORT_SECONDS
        self._running = 0
        self._marked = 0.0  # up to when the busy time was counted
        self._busy_seconds = 0.0
        self._busy_bytes = 0

    @property
    def origin(self) -> Origin:
        return Origin(self._rate, self._fill_seconds, self._report_seconds)

    def began(self, now: float) -> None:
        """A fill began."""
        self._count(now)
        self._running += 1

    def ended(self, now: float, fill_seconds: float | None, origin_bytes: int) -> None:
        """A fill ended; ``fill_seconds``: it brought a shard, of which ``origin_bytes`` were read from the origin."""
        self._count(now)
        self._running -= 1
        if fill_seconds is not None:
            self._fill_seconds = _mean(self._fill_seconds, fill_seconds)
        self._busy_bytes += origin_bytes
        if not self._busy_bytes:  # neighbours had it all: that says nothing of the origin
            self._busy_seconds = 0.0
        elif self._busy_seconds >= WINDOW_SECONDS or not self._running:
            self._rate = _mean(self._rate, self._busy_bytes / max(self._busy_seconds, 1e-3))
            self._busy_seconds, self._busy_bytes = 0.0, 0

    def reported(self, pause_seconds: float) -> None:
        """A consumer reported again after so long."""
        self._report_seconds = _mean(self._report_seconds, pause_seconds)

    def _count(self, now: float) -> None:
        if self._running:
            self._busy_seconds += now - self._marked
        self._marked = now


def _mean(before: float, value: float) -> float:
    return before + SMOOTHING * (value - before) if before else value

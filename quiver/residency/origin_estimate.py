"""Estimates of how long a fill takes and how fast the origin is. The caller passes the time."""

from __future__ import annotations

from typing import Final, NamedTuple

from quiver.rate import Mean, Rate

WEIGHT: Final = 0.3  # of a new value in the running mean: the last few count, and no single one dominates
WINDOW_SECONDS: Final = 0.5  # of fetching, over which bytes per second are measured
MOMENT_SECONDS: Final = 1e-3  # fills that end within it ended together: too short a time to measure their rate
REPORT_SECONDS: Final = 0.5  # between two reports of a consumer, until it is known


class OriginEstimate(NamedTuple):
    """Bytes per second, seconds that a fill takes, and seconds between two reports of a consumer."""

    rate: float = 0.0  # 0: unknown
    fill_seconds: float = 0.0
    report_seconds: float = REPORT_SECONDS


class OriginEstimator:
    """Running means over fills and reports. Used by one thread at a time."""

    def __init__(self) -> None:
        self._fill_seconds = Mean(WEIGHT)
        self._report_seconds = Mean(WEIGHT, REPORT_SECONDS)
        self._rate = Rate(WINDOW_SECONDS, WEIGHT)
        self._running = 0
        self._counted_until = 0.0  # the time up to which busy time was counted

    @property
    def estimate(self) -> OriginEstimate:
        return OriginEstimate(self._rate.value, self._fill_seconds.value, self._report_seconds.value)

    def began(self, now: float) -> None:
        """Record that a fill began."""
        self._count(now, 0.0)
        self._running += 1

    def ended(self, now: float, fill_seconds: float | None, origin_bytes: float) -> None:
        """Record the end of a fill: successful after ``fill_seconds`` (else None), ``origin_bytes`` from the origin."""
        seconds = self._count(now, origin_bytes)
        self._running -= 1
        if fill_seconds is not None:
            self._fill_seconds.add(fill_seconds)
        if not self._running and seconds > MOMENT_SECONDS:  # else its bytes belong to the window of another fill
            self._rate.close_window()

    def reported(self, pause_seconds: float) -> None:
        """Record that a consumer reported again after so long."""
        self._report_seconds.add(pause_seconds)

    def _count(self, now: float, origin_bytes: float) -> float:
        """Count bytes, and the busy time since the last call; return the latter."""
        seconds = now - self._counted_until if self._running else 0.0
        self._rate.add(origin_bytes, seconds)
        self._counted_until = now
        return seconds

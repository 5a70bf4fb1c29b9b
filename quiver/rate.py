"""Running estimates: a smoothed mean, and a rate over the time in which something really ran. Pure."""

from __future__ import annotations


class Mean:
    """An exponentially weighted mean. ``value`` is 0 until something was added."""

    def __init__(self, weight: float, initial: float = 0.0) -> None:
        """``weight``: of a new value against all before it."""
        self.value = initial
        self._weight = weight
        self._known = False

    def add(self, value: float) -> None:
        self.value = self.value + self._weight * (value - self.value) if self._known else value
        self._known = True


class Rate:
    """Bytes per second, taken over windows of busy time and smoothed. ``value`` is 0 until it is known."""

    def __init__(self, window_seconds: float, weight: float) -> None:
        self._mean = Mean(weight)
        self._window_seconds = window_seconds
        self._seconds = 0.0
        self._bytes = 0.0

    @property
    def value(self) -> float:
        return self._mean.value

    def add(self, size_bytes: float, seconds: float) -> None:
        """Count bytes and the busy time in which they came: ``value`` changes once a window is full."""
        self._bytes += size_bytes
        self._seconds += seconds
        if self._seconds >= self._window_seconds:
            self.close_window()

    def close_window(self) -> None:
        """Learn from what was counted so far, although the window is not full: what ran has ended."""
        if self._bytes > 0:
            self._mean.add(self._bytes / max(self._seconds, 1e-6))
        self._bytes = self._seconds = 0.0

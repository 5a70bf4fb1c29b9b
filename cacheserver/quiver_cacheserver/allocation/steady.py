"""Estimates that move slowly: a value is held until what is measured has clearly left it. Pure.

An allocation is solved from speeds, and data moves when it changes. So each speed is smoothed over seconds, and the
smoothed value is used only once it is more than ``BAND`` away from the one in use.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

SMOOTH_SECONDS: Final = 4.0  # over which a measured speed is averaged
BAND: Final = 0.15  # of the value in use, within which a new one changes nothing

Key = TypeVar("Key", bound=Hashable)


class Steady:
    """One value. 0 is unknown: the first known value is taken at once."""

    def __init__(self) -> None:
        self.value = 0.0
        self._mean = 0.0
        self._at = 0.0

    def add(self, measured: float, now: float) -> float:
        """Take a measurement, and return the value to use."""
        if measured <= 0:
            return self.value
        if self._mean <= 0:
            self._mean, self._at = measured, now
        kept = math.exp(-max(now - self._at, 0.0) / SMOOTH_SECONDS)
        self._mean, self._at = measured + (self._mean - measured) * kept, now
        if abs(self._mean - self.value) > BAND * self.value:
            self.value = self._mean
        return self.value


class SteadyValues(Generic[Key]):
    """A steady value by key."""

    def __init__(self) -> None:
        self._values: dict[Key, Steady] = {}

    def add(self, key: Key, measured: float, now: float) -> float:
        return self._values.setdefault(key, Steady()).add(measured, now)

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget all others."""
        kept = set(keys)
        self._values = {key: it for key, it in self._values.items() if key in kept}

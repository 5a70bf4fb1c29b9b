"""Counters of what this process read, and warnings that do not flood a log."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from quiver import forks
from quiver.expiring import Expiring

log = logging.getLogger("quiver_client")

WARN_SECONDS: Final = 30.0  # between two warnings about one subject
NAMES: Final = (
    *("samples", "bytes_host", "bytes_rack", "bytes_origin", "samples_host", "samples_rack", "samples_origin"),
    *("misses_host", "misses_rack", "fills", "uploads", "substitutions", "fallbacks", "overloads", "corruptions"),
    *("hedges", "bytes_hedged", "skipped", "replaced"),
)


class Stats:
    """Counters of one process. Safe from threads."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"host": 0.0, "rack": 0.0, "origin": 0.0}
        self._warned: Expiring[str, None] = Expiring()  # subjects

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def spent(self, tier: str, seconds: float) -> None:
        """Count the time that a read took in a tier, in each thread that reads."""
        with self._lock:
            self._seconds[tier] += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds that reads took, by tier."""
        with self._lock:
            return dict(self._seconds)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return {name: self._counts[name] for name in NAMES}

    def warn(self, subject: str, message: str) -> None:
        """Log a warning, at most one per ``WARN_SECONDS`` and subject: a dead rack must not flood a log."""
        with self._lock:
            if subject in self._warned:
                return
            self._warned.set(subject, None, WARN_SECONDS)
        log.warning(message)

"""What this process's readers did, as plain numbers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

from quiver import forks

log = logging.getLogger("quiver_client")

WARN_SECONDS: Final = 30.0
NAMES: Final = (
    *("samples", "bytes_host", "bytes_rack", "bytes_origin", "samples_host", "samples_rack", "samples_origin"),
    *("misses_host", "misses_rack", "fills", "uploads", "substitutions", "fallbacks", "overloads", "corruptions"),
)


class Stats:
    """Counters of one process. Safe from threads."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._counts: Counter[str] = Counter()
        self._warned: dict[str, float] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return {name: self._counts[name] for name in NAMES}

    def warn(self, subject: str, message: str) -> None:
        """Log a warning, at most one in ``WARN_SECONDS`` about one subject: a dead rack must not flood a log."""
        now = time.monotonic()
        with self._lock:
            if now - self._warned.get(subject, -WARN_SECONDS) < WARN_SECONDS:
                return
            self._warned[subject] = now
        log.warning(message)

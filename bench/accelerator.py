"""An accelerator that is emulated: each batch keeps it busy for a given time, and meanwhile the CPU is free.

The measure is the share of the time that it is busy, as in MLPerf Storage (Balmau et al., "Characterizing I/O in
machine learning with MLPerf Storage"): what a reader is worth to the training, not how many bytes it can move.
"""

from __future__ import annotations

import time


class Accelerator:
    """Busy for ``step_seconds`` a batch; with 0 there is none."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self._busy = 0.0

    def step(self) -> None:
        """Work on one batch."""
        if self.step_seconds:
            begun = time.perf_counter()
            time.sleep(self.step_seconds)
            # Never more than a step: that the machine woke us up late is no work that was done.
            self._busy += min(time.perf_counter() - begun, self.step_seconds)

    def busy_seconds_and_reset(self) -> float:
        busy, self._busy = self._busy, 0.0
        return busy

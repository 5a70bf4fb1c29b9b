"""An emulated accelerator: each batch keeps it busy for a given time, in which the CPU is free.

The measure is the share of the time that it is busy, as in MLPerf Storage (Balmau et al., "Characterizing I/O in
machine learning with MLPerf Storage"): it says how much a reader helps the training, not how many bytes it can move.
"""

from __future__ import annotations

import time


class Accelerator:
    """Busy for ``step_seconds`` per batch; 0 means no accelerator."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self._busy = 0.0

    def step(self) -> None:
        """Work on one batch."""
        if self.step_seconds:
            begun = time.perf_counter()
            time.sleep(self.step_seconds)
            # At most one step: a late wake-up of this thread is not work of the accelerator.
            self._busy += min(time.perf_counter() - begun, self.step_seconds)

    def busy_seconds_and_reset(self) -> float:
        busy, self._busy = self._busy, 0.0
        return busy

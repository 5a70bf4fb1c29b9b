"""Probing: a few batches answered as misses, so that what hits are worth to a job is measured and not only estimated.

As in Quiver (Kumar & Sivathanu, FAST 2020, "benefit-aware"): the time of batches that come from the cache is compared
with the time of batches that come from the origin. Opt-in. A probed batch has the same samples as it would have had: it
is only read elsewhere, so what is drawn, substituted and consumed does not change. If it cannot be read there, it is
read as all others are.

Bounds: one probe at a time, ``BATCHES`` of them, and reading them takes at most ``SHARE`` of the time that the loop
ran: a slow origin is probed more slowly. One rank of a job probes; its ranks read alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from quiver import forks
from quiver_client.loader.making import Costs

BATCHES: Final = 20
SENT_MAX: Final = 3 * BATCHES  # the first of each worker does not count
SHARE: Final = 0.01  # of the loop's time
FIRST_SECONDS: Final = 2.0  # of the loop before the first one, whose cost nobody knows
FAILURES_MAX: Final = 3
LOST_SECONDS: Final = 120.0  # after which a probe is given up: the pass that it was of ended, or its worker died


@dataclass(frozen=True, slots=True)
class Probed:
    """What was measured by probing. Rates are bytes per second.

    ``hits``: the throughput of the job if all is in the cache, ``misses``: if nothing is. Both follow from the loop's
    step, from what making a batch takes, and from ``hit_seconds`` and ``miss_seconds``: what a thread or worker takes
    to read a batch, the fastest quarter of those that were not probed, and those ``batches`` that were.
    """

    batches: int = 0
    hits: float = 0.0
    misses: float = 0.0
    hit_seconds: float = 0.0
    miss_seconds: float = 0.0

    @classmethod
    def of(cls, costs: Costs, *, batch_bytes: float, step_seconds: float, makers: int) -> Probed | None:
        """Return what the costs of some batches say; ``None`` while too little is known. ``step_seconds``: of the loop
        or of its accelerator, whichever is slower."""
        if not (costs.probes and costs.batches and batch_bytes and costs.fast_seconds):
            return None
        miss, hit = costs.probe_seconds / costs.probes, costs.fast_seconds
        making = costs.making_seconds / costs.batches

        def rate(read_seconds: float) -> float:
            return batch_bytes / max(step_seconds, (making + read_seconds) / makers, 1e-6)

        return cls(int(costs.probes), rate(hit), rate(miss), hit, miss)

    def of_share(self, share: float) -> Probed:
        """Return what this says of a part whose bytes are this share of every batch."""
        return replace(self, hits=self.hits * share, misses=self.misses * share)


class Prober:
    """Decides which batches of a loader are probes. Safe from threads."""

    def __init__(
        self,
        costs: Callable[[], Costs],
        is_wanted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_wanted``: whether an operator asks for a series, as the cache says. It begins when that becomes true."""
        self._costs, self._is_wanted, self._clock = costs, is_wanted, clock
        self._was_wanted = False
        self._lock = forks.lock()
        self._is_on = False
        self._begun: float | None = None
        self._sent = self._lost = 0
        self._sent_at = 0.0
        self._base = Costs()  # at the beginning of this series
        self.series = 0  # that were completed

    @property
    def is_on(self) -> bool:
        """Whether a series of probes has begun and is not completed."""
        return self._is_on

    @property
    def has_failed(self) -> bool:
        """Whether the last series ended without a result: this process cannot read past the cache."""
        return not self._is_on and self.series > 0 and self._costs().probes == self._base.probes

    @property
    def costs(self) -> Costs:
        """The costs so far; of probes, those of the last series."""
        costs, base = self._costs(), self._base
        return costs._replace(probes=costs.probes - base.probes, probe_seconds=costs.probe_seconds - base.probe_seconds)

    def begin(self) -> None:
        """Begin a series of probes, unless one is going on."""
        with self._lock:
            if not self._is_on:
                self._is_on, self._begun, self._sent, self._lost = True, None, 0, 0
                self._base = self._costs()

    def take(self) -> bool:
        """Return whether the next batch is to be a probe; the caller makes it one."""
        is_wanted, was_wanted = self._is_wanted(), self._was_wanted
        self._was_wanted = is_wanted
        if is_wanted and not was_wanted:
            self.begin()
        if not self._is_on:
            return False
        with self._lock:
            now, costs = self._clock(), self._costs()
            if self._begun is None:
                self._begun = now
            ended = costs.probes_ended - self._base.probes_ended
            if ended + self._lost < self._sent:
                self._lost += now - self._sent_at > LOST_SECONDS
                return False
            if self._is_failing(costs) or self._sent >= SENT_MAX or costs.probes - self._base.probes >= BATCHES:
                self._is_on = False
                self.series += 1
                return False
            spent = costs.probes_spent - self._base.probes_spent
            expected = spent / ended if ended else 0.0
            elapsed = now - self._begun
            if elapsed < FIRST_SECONDS or spent + expected > SHARE * elapsed:
                return False
            self._sent, self._sent_at = self._sent + 1, now
            return True

    def _is_failing(self, costs: Costs) -> bool:
        failed = costs.probes_failed - self._base.probes_failed
        return failed >= FAILURES_MAX and failed > costs.probes - self._base.probes

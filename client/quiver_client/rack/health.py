"""The health of a rack's daemons as one process sees it: ``quiver.health`` behind a lock, and what they delivered.

Only reads of shards that a daemon delivered before are timed, and are expected to be fast: any other may wait for a
fill, which is no failure. What a daemon says of a shard later (absent, filling) replaces what was known of it.

Each process has its own: every one finds out about a grey daemon for itself, once.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from math import inf
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.health import PAUSE_SECONDS_MAX, Health, HedgeBudget
from quiver.plan import Ints

KNOWN_PEERS_MAX: Final = 64  # daemons whose delivered shards are remembered: a byte per shard of the dataset each
UNKNOWN_LATE_SECONDS: Final = 0.5  # a read that may wait for a fill is not late before,
DISPLACED_LATE_SECONDS: Final = 0.25  # but if it does so in place of a daemon that failed


class Deadlines(NamedTuple):
    """Of a read, in seconds: after ``late`` it is worth a hedge, after ``limit`` another daemon is asked instead."""

    late: float
    limit: float  # infinity if it may wait for a fill


class RackHealth:
    """Which daemons to avoid, and when a read is late. Safe from threads."""

    def __init__(self, shard_count: int, pause_seconds: float) -> None:
        self.budget = HedgeBudget()
        self._health = Health(pause_seconds, max(PAUSE_SECONDS_MAX, pause_seconds))
        self._shard_count = shard_count
        self._delivered: OrderedDict[str, npt.NDArray[np.bool_]] = OrderedDict()  # by URL: which shards
        self._lock = forks.lock()

    def __repr__(self) -> str:
        return repr(self._health)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def is_avoided(self, url: str) -> bool:
        return self._health.is_avoided(url)

    def is_silent(self, url: str) -> bool:
        return self._health.is_silent(url)

    def failures(self, url: str) -> int:
        return self._health.failures(url)

    def delivered_all(self, url: str, shards: Ints) -> bool:
        """Whether a daemon delivered something of each of these shards, and did not say since that it lacks one."""
        delivered = self._delivered.get(url)
        return delivered is not None and bool(delivered[shards].all())

    def delivered_shard(self, url: str) -> int | None:
        """Return a shard that a daemon delivered, ``None`` if it delivered none."""
        delivered = self._delivered.get(url)
        if delivered is None or not delivered.any():
            return None
        return int(delivered.argmax())

    def deadlines(self, url: str, shards: Ints, size_bytes: int, *, displaced: bool = False) -> Deadlines:
        """Return how long a read of these shards may take. ``displaced``: it replaces one from another daemon."""
        known = self.delivered_all(url, shards)
        with self._lock:
            late_seconds = self._health.late_after_seconds(size_bytes)
            if known:
                return Deadlines(late_seconds, self._health.give_up_after_seconds(size_bytes))
        return Deadlines(max(late_seconds, DISPLACED_LATE_SECONDS if displaced else UNKNOWN_LATE_SECONDS), inf)

    def is_slow(self, seconds: float, size_bytes: int) -> bool:
        with self._lock:
            return self._health.is_slow(seconds, size_bytes)

    # -- events -------------------------------------------------------------------------------------------------------

    def answered(self, url: str, shards: Ints, seconds: float, size_bytes: int) -> None:
        """A daemon delivered all that was asked of these shards, and took so long."""
        known = self.delivered_all(url, shards)
        with self._lock:
            self._health.recovered(url, time.monotonic())
            self.budget.earn(size_bytes)
            if known:
                self._health.answered(url, seconds, size_bytes, time.monotonic())
                return
            if url not in self._delivered:
                self._delivered[url] = np.zeros(self._shard_count, np.bool_)
                while len(self._delivered) > KNOWN_PEERS_MAX:
                    self._delivered.popitem(last=False)
            self._delivered[url][shards] = True

    def absent(self, url: str, shard: int) -> None:
        """A daemon said that it lacks a shard now."""
        delivered = self._delivered.get(url)
        if delivered is not None:
            delivered[shard] = False

    def overtaken(self, url: str) -> None:
        with self._lock:
            self._health.overtaken(url, time.monotonic())

    def failed(self, url: str) -> None:
        with self._lock:
            self._health.failed(url, time.monotonic())

    def recovered(self, url: str) -> None:
        if self._health.is_avoided(url):
            with self._lock:
                self._health.recovered(url, time.monotonic())

    def begin_probes(self) -> list[str]:
        with self._lock:
            return self._health.begin_probes(time.monotonic())

    def probed(self, url: str, *, good: bool) -> None:
        with self._lock:
            self._health.probed(url, good=good, now=time.monotonic())

    def retain(self, urls: Iterable[str]) -> None:
        with self._lock:
            self._health.retain(urls)

    def take(self, size_bytes: int) -> bool:
        """Take so many bytes of the budget for hedges; return whether there were so many."""
        with self._lock:
            return self.budget.take(size_bytes)

    def refund(self, size_bytes: int) -> None:
        with self._lock:
            self.budget.refund(size_bytes)

"""One warning per loader, if the training loop waits for data more than a tenth of its time, with the reason.

``finding`` decides, a pure function of what was measured in one window of the loop's time; ``LoopWatch`` measures. A
wait is the time in which the loop has asked for a batch and has none. Threads fetch and transform several batches at
once, so their seconds are compared with one another, and not with the loop's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from quiver import forks

log = logging.getLogger("quiver_client")

SHARE_MAX: Final = 0.1  # of the loop's time
WINDOW_SECONDS: Final = 20.0  # shorter ones see the start of an epoch, when nothing has been prefetched yet
BATCHES_MIN: Final = 16
FROM_ORIGIN_MIN: Final = 0.1  # of the bytes read: then a tier below the origin waited for it

HELP: Final = {
    "origin": "the origin delivers more slowly than the loop reads. `quiver warm` fills the cache beforehand; a larger"
    " cache keeps more for the next epoch",
    "daemon": "the cache daemons deliver more slowly than the loop reads. `quiver status` shows them; more daemons, one"
    " on this machine with --socket, or fields= with fewer fields help",
    "folder": "the cache folder of this machine delivers more slowly than the loop reads. A faster disk, more memory"
    " for its page cache, or fields= with fewer fields help",
    "transform": "transform and collate_fn take the time. num_workers= runs them in processes; decoding less, or at a"
    " lower resolution, helps",
    "workers": "the worker processes do not keep up: in them transform, collate_fn or reading takes the time. A larger"
    " num_workers= or prefetch_factor= helps; dataset.stats() in a worker shows where it reads",
}

SUBSTITUTE: Final = "; substitute=True reads what is resident meanwhile"  # where a loader's order is fixed


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """What was measured in a window of a loop: seconds, unless said otherwise."""

    loop: float  # of the window
    waited: float  # of these, for a batch
    batches: int
    starved: float = 0.0  # no batch could be drawn, since the cache had none of the samples that are left
    reads: Mapping[str, float] | None = None  # by tier: host, rack, origin; ``None`` where worker processes read
    made: float = 0.0  # all in all, to make batches of what is read: transform, collation
    bytes_origin: int = 0  # bytes read from the origin by this process
    bytes_read: int = 0  # bytes read in all


@dataclass(frozen=True, slots=True)
class Finding:
    reason: str  # a key of ``HELP``
    share: float  # of the loop's time, waited

    @property
    def message(self) -> str:
        return f"the training loop waited for data {self.share:.0%} of its time: {HELP[self.reason]}"


def finding(times: LoopTimes) -> Finding | None:
    """Return why a loop waits too long, ``None`` if it does not, or if too little was measured."""
    if times.loop < WINDOW_SECONDS or times.batches < BATCHES_MIN or times.waited <= SHARE_MAX * times.loop:
        return None
    return Finding(_reason(times), times.waited / times.loop)


def _reason(times: LoopTimes) -> str:
    if times.starved >= times.waited / 2:
        return "origin"
    if times.reads is None:
        return "workers"
    read = sum(times.reads.values())
    if times.made >= read:
        return "transform"
    if times.bytes_origin >= FROM_ORIGIN_MIN * times.bytes_read > 0:
        return "origin"
    slowest = max(times.reads, key=lambda tier: times.reads[tier] if times.reads else 0.0)
    return {"host": "folder", "rack": "daemon"}.get(slowest, "origin")


class LoopWatch:
    """Measures the loop of one loader. Safe from threads."""

    def __init__(self, order: Any, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._order, self._workers, self._clock = order, workers, clock
        self._lock = forks.lock()
        self._last: float | None = None  # when the loop received its last batch
        self._loop = self._waited = self._fetched = 0.0
        self._batches = 0
        self._before: dict[str, float] = {}  # the counters at the window's beginning
        self._ended = False

    def begin(self) -> None:
        """A pass begins: the time until its first batch is no step."""
        self._last = None

    def fetched(self, seconds: float) -> None:
        """A thread has read and made a batch."""
        with self._lock:
            self._fetched += seconds

    def waited(self, seconds: float) -> None:
        """The loop received a batch, after waiting for it."""
        if self._ended:
            return
        now = self._clock()
        if self._last is None:
            self._last = now
            if not self._before:
                self._reset()
            return
        self._loop, self._last = self._loop + now - self._last, now
        self._waited += seconds
        self._batches += 1
        if self._loop >= WINDOW_SECONDS and self._batches >= BATCHES_MIN:
            found = finding(self._times())
            self._reset()
            if found is not None:
                self._ended = True
                is_fixed = found.reason == "origin" and not getattr(self._order, "substitute", False)
                log.warning("%s%s", found.message, SUBSTITUTE if is_fixed else "")

    def _times(self) -> LoopTimes:
        spent = {name: value - self._before.get(name, 0) for name, value in self._counters().items()}
        reads = {tier: spent.get(f"seconds_{tier}", 0.0) for tier in ("host", "rack", "origin")}
        sizes = [int(spent.get(f"bytes_{tier}", 0)) for tier in ("host", "rack", "origin")]
        return LoopTimes(
            loop=self._loop,
            waited=self._waited,
            batches=self._batches,
            starved=spent.get("starved", 0.0),
            reads=None if self._workers else reads,
            made=max(self._fetched - sum(reads.values()), 0.0),
            bytes_origin=sizes[2],
            bytes_read=sum(sizes),
        )

    def _reset(self) -> None:
        with self._lock:
            self._loop = self._waited = self._fetched = 0.0
        self._batches = 0
        self._before = self._counters()

    def _counters(self) -> dict[str, float]:
        counters: Counter[Any] = Counter()
        for leaf in self._order.leaves:
            counters.update(leaf.stats())
            counters.update({f"seconds_{tier}": value for tier, value in leaf.read_seconds().items()})
        return {**counters, "starved": self._order.starved_seconds}

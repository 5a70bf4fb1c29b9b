"""How long the calling thread has read, so far: what a batch costs is told apart from what making its samples costs.

A user's own ``__getitem__`` may read in the middle of making a sample, and a batch may be read from several datasets.
So each read adds to a clock of its thread, and whoever makes a batch reads that clock before and after. While
``past_the_cache`` holds, the thread's reads are answered as misses: from the origin, by the same path.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

TIERS: Final = ("host", "rack", "origin", "embedded")
EMBEDDED: Final = TIERS.index("embedded")


class BatchCost(NamedTuple):
    """What one batch cost the thread that read and made it, in seconds.

    ``cpu_seconds``: of the processor, for both; they remain where no read has to wait. ``tier_seconds`` and
    ``tier_bytes``: by tier, as in ``TIERS``. Threads that a tier reads by are not included: the caller waits for them.
    """

    read_seconds: float
    making_seconds: float
    cpu_seconds: float
    tier_seconds: tuple[float, ...]
    tier_bytes: tuple[float, ...]
    is_probe: bool = False  # it was to be read past the cache,
    is_answered: bool = False  # and was

    @property
    def read_bytes(self) -> float:
        return sum(self.tier_bytes)


class _Clock(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.seconds = 0.0
        self.tier_seconds = [0.0] * len(TIERS)
        self.tier_bytes = [0.0] * len(TIERS)
        self.is_past_the_cache = False
        self.answered = self.failed = 0  # reads that were to be answered as misses


_clock: Final = _Clock()


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Count the time within as reading. A read within another one counts once."""
    clock = _clock
    clock.depth += 1
    if clock.depth > 1:
        try:
            yield
        finally:
            clock.depth -= 1
        return
    begun = time.perf_counter()
    try:
        yield
    finally:
        clock.depth = 0
        clock.seconds += time.perf_counter() - begun


def count(tier: int, seconds: float, size_bytes: float) -> None:
    """Count what a tier, a position in ``TIERS``, delivered to this thread."""
    _clock.tier_seconds[tier] += seconds
    _clock.tier_bytes[tier] += size_bytes


def seconds() -> float:
    """Return how long this thread has read so far."""
    return _clock.seconds


def is_past_the_cache() -> bool:
    """Whether this thread's reads are to be answered as misses."""
    return _clock.is_past_the_cache


def count_probe(*, answered: bool) -> None:
    """A read was to be answered as a miss, and was or could not be."""
    _clock.answered += answered
    _clock.failed += not answered


@contextlib.contextmanager
def past_the_cache(is_wanted: bool) -> Iterator[None]:
    """Have this thread's reads answered as misses meanwhile, if that is wanted."""
    _clock.is_past_the_cache = is_wanted
    try:
        yield
    finally:
        _clock.is_past_the_cache = False


class Stopwatch:
    """Measures one batch, from its construction on, in the thread that reads and makes the batch."""

    def __init__(self, *, is_probe: bool = False) -> None:
        clock = _clock
        self._is_probe, self._answered, self._failed = is_probe, clock.answered, clock.failed
        self._read = clock.seconds
        self._tier_seconds, self._tier_bytes = list(clock.tier_seconds), list(clock.tier_bytes)
        self._cpu, self._begun = time.thread_time(), time.perf_counter()

    def stop(self) -> BatchCost:
        """Return what was read and made since this began."""
        clock, now, cpu = _clock, time.perf_counter(), time.thread_time()
        read = clock.seconds - self._read
        return BatchCost(
            read,
            max(now - self._begun - read, 0.0),
            cpu - self._cpu,
            tuple(a - b for a, b in zip(clock.tier_seconds, self._tier_seconds, strict=True)),
            tuple(a - b for a, b in zip(clock.tier_bytes, self._tier_bytes, strict=True)),
            self._is_probe,
            clock.answered > self._answered and clock.failed == self._failed,
        )

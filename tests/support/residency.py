"""Caches whose content the test decides: by a fixed list, by a script, or by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pytest

from quiver.residency import ConsumerReport
from quiver.substitution import View
from quiver_client import Dataset
from quiver_client import needs_reporter as watch_module
from quiver_client.loader import consumer as consumer_module
from quiver_client.loader import draw_wait
from quiver_client.loader import sampler as sampler_module

Mask = npt.NDArray[np.bool_]
HOUR: Final = 3600.0


class Clock:
    """A clock that advances only when a test sets it. It replaces the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Rack:
    """A ``NeedsChannel`` to a cache that holds the shards last passed to ``holds``."""

    probe_wanted = False
    orphaned: Mask | None = None

    def __init__(self, shard_count: int, resident: bool = True) -> None:
        self.seen = np.full(shard_count, int(resident), np.uint8)
        self.reports: list[ConsumerReport] = []
        self.left = False
        self.closed = False
        self.orphaned: Mask | None = None

    def holds(self, shards: list[int], others: int = 0) -> None:
        seen = np.zeros_like(self.seen)
        seen[shards] = 1 + others
        self.seen = seen

    def report(self, report: ConsumerReport, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        assert not self.left, "a report after the last one"
        self.reports.append(report)
        self.left = leaving
        return self.seen

    def close(self) -> None:
        self.closed = True


class Script:
    """Seeded residency that differs at every view, from nothing to everything."""

    def __init__(self, shard_count: int, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._shards = np.arange(shard_count)

    def view(self) -> View:
        count = len(self._shards)
        share = self._chance.choice([0.0, 0.05, 0.3, 0.7, 1.0])
        resident = self._chance.random(count) < share
        return View(resident, self._chance.integers(0, 3, count).astype(np.uint8), self._chance.permutation(count))


class ScriptedWatch:
    """``NeedsReporter`` without its thread: residency comes from a ``Script`` and differs at every view."""

    is_probe_wanted = False

    def __init__(self, shard_count: int, exchange: Any, report: Callable[[], Any]) -> None:
        self._script = cast(Script, exchange)
        self.arrivals = 0
        self.closed = False

    @property
    def view(self) -> View:
        return self._script.view()

    def first_answer(self, timeout_seconds: float) -> None: ...

    def wait(self, timeout_seconds: float) -> None: ...

    def nudge(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class StillWatch(ScriptedWatch):
    """``NeedsReporter`` of a cache that only the test changes. Waiting runs ``when_waiting``."""

    made: list[StillWatch]

    def __init__(self, shard_count: int, exchange: Any, report: Callable[[], Any]) -> None:
        super().__init__(shard_count, exchange, report)
        self.report = report
        self.waits = 0
        self.when_waiting: Callable[[StillWatch], None] = lambda watch: None
        self.now = View(np.zeros(shard_count, bool), np.zeros(shard_count, np.uint8), np.zeros(shard_count, np.int64))
        self.made.append(self)

    @property
    def view(self) -> View:
        return self.now

    def holds(self, shards: Any) -> None:
        resident = np.zeros(len(self.now.resident), bool)
        resident[shards] = True
        if (resident & ~self.now.resident).any():
            self.arrivals += 1
        self.now = self.now._replace(resident=resident)

    def wait(self, timeout_seconds: float) -> None:
        self.waits += 1
        assert self.waits < 10_000, "the draw waits without end"
        self.when_waiting(self)


def scripted(monkeypatch: pytest.MonkeyPatch, seed: int, patience_seconds: float = 0.0) -> None:
    """Give every loader a residency that changes adversarially; with patience 0 it draws non-resident samples too."""
    monkeypatch.setattr(Dataset, "needs", lambda self: Script(self.manifest.shard_count, seed))
    monkeypatch.setattr(consumer_module, "NeedsReporter", ScriptedWatch)
    monkeypatch.setattr(draw_wait, "PATIENCE_SECONDS", patience_seconds)
    monkeypatch.setattr(draw_wait, "PATIENCE_SECONDS_MIN", patience_seconds / 2)


def still(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, list[StillWatch]]:
    """Give every loader a residency and a clock that only the test changes."""
    clock, made = Clock(), list[StillWatch]()
    kind = type("MadeWatch", (StillWatch,), {"made": made})
    monkeypatch.setattr(Dataset, "needs", lambda self: object())
    monkeypatch.setattr(consumer_module, "NeedsReporter", kind)
    for module in (sampler_module, consumer_module):
        monkeypatch.setattr(module, "time", clock)
    return clock, made


def told(monkeypatch: pytest.MonkeyPatch, rack: Rack) -> None:
    """Give every loader the real ``NeedsReporter``, connected to this rack."""
    monkeypatch.setattr(Dataset, "needs", lambda self: rack)
    monkeypatch.setattr(watch_module, "SPACING_SECONDS", 0.001)
    monkeypatch.setattr(consumer_module, "REPORT_SECONDS", (0.001, 0.01))

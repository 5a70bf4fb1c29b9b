"""Caches of which the test decides what they hold: said in turns, by a script, or by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pytest

from quiver.residency import Report
from quiver.substitution import View
from quiver_client import Dataset
from quiver_client import needs_reporter as watch_module
from quiver_client.loader import sampler as sampler_module

Mask = npt.NDArray[np.bool_]
HOUR: Final = 3600.0


class Clock:
    """Stands still until it is told to go on. In place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Rack:
    """``NeedsChannel`` with a cache that holds what ``holds`` was last told."""

    orphaned: Mask | None = None

    def __init__(self, shard_count: int, resident: bool = True) -> None:
        self.seen = np.full(shard_count, int(resident), np.uint8)
        self.reports: list[Report] = []
        self.left = False
        self.closed = False
        self.orphaned: Mask | None = None

    def holds(self, shards: list[int], others: int = 0) -> None:
        seen = np.zeros_like(self.seen)
        seen[shards] = 1 + others
        self.seen = seen

    def report(self, report: Report, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        assert not self.left, "a report after the last one"
        self.reports.append(report)
        self.left = leaving
        return self.seen

    def close(self) -> None:
        self.closed = True


class Script:
    """Residency that is another one whenever it is looked at: by seed, from nothing to everything."""

    def __init__(self, shard_count: int, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._shards = np.arange(shard_count)

    def view(self) -> View:
        count = len(self._shards)
        share = self._chance.choice([0.0, 0.05, 0.3, 0.7, 1.0])
        resident = self._chance.random(count) < share
        return View(resident, self._chance.integers(0, 3, count).astype(np.uint8), self._chance.permutation(count))


class ScriptedWatch:
    """``NeedsReporter`` without its thread: what is resident comes from a ``Script``, and changes from look to look."""

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
    """``NeedsReporter`` of a cache that changes when the test says so. Waiting runs ``when_waiting``."""

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
        assert self.waits < 10_000, "nothing comes of this waiting"
        self.when_waiting(self)


def scripted(monkeypatch: pytest.MonkeyPatch, seed: int, patience_seconds: float = 0.0) -> None:
    """Every loader hears of a residency that changes adversarially; with patience 0 it reads what is not there."""
    monkeypatch.setattr(Dataset, "needs", lambda self: Script(self.manifest.shard_count, seed))
    monkeypatch.setattr(sampler_module, "NeedsReporter", ScriptedWatch)
    monkeypatch.setattr(sampler_module, "PATIENCE_SECONDS", patience_seconds)
    monkeypatch.setattr(sampler_module, "PATIENCE_SECONDS_MIN", patience_seconds / 2)


def still(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, list[StillWatch]]:
    """Every loader hears of a residency that the test sets, and time passes when the test says so."""
    clock, made = Clock(), list[StillWatch]()
    kind = type("MadeWatch", (StillWatch,), {"made": made})
    monkeypatch.setattr(Dataset, "needs", lambda self: object())
    monkeypatch.setattr(sampler_module, "NeedsReporter", kind)
    monkeypatch.setattr(sampler_module, "time", clock)
    return clock, made


def told(monkeypatch: pytest.MonkeyPatch, rack: Rack) -> None:
    """Every loader has the real ``NeedsReporter``, and this rack."""
    monkeypatch.setattr(Dataset, "needs", lambda self: rack)
    monkeypatch.setattr(watch_module, "SPACING_SECONDS", 0.001)
    monkeypatch.setattr(sampler_module, "REPORT_SECONDS", (0.001, 0.01))


def alive(prefix: str = "quiver-") -> list[str]:
    """Return the names of Quiver's threads that run."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(prefix))

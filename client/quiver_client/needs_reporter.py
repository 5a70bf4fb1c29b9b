"""What this consumer needs, said in the background; what is resident, as far as it was told.

One thread a consumer, none on the way of a batch: who draws a batch looks at the last answer.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.residency import Report
from quiver.substitution import View
from quiver_client import process_exit

log = logging.getLogger("quiver_client")

SPACING_SECONDS: Final = 0.05  # between two reports, however urgent
RETRY_SECONDS: Final = 1.0  # after a report that failed
STALE_SECONDS: Final = 5.0  # how long the last answer counts while none comes
WARN_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 1.5  # an exchange that must never take long may do so, and closing is in the way of an exit


class NeedsChannel(Protocol):
    """Where needs are told. Used by one thread, up to twenty times a second; must never take long."""

    orphaned: npt.NDArray[np.bool_] | None
    """By shard, whether nobody will bring it in, since whoever should does not answer; ``None``: no shard is."""

    def report(self, report: Report, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        """Say what this consumer needs; return by shard 0 for what is not resident, else 1 + how many others need it.

        ``leaving``: the consumer is done and needs nothing any more.
        """
        ...

    def close(self) -> None: ...


class NeedsReporter:
    """Reports in turns through a ``NeedsChannel``, and keeps the last answer as a ``View``. Safe from threads."""

    def __init__(self, shard_count: int, exchange: NeedsChannel, report: Callable[[], tuple[Report, float]]) -> None:
        """``report`` is a method that returns what to say now, and the seconds until the next time.

        Its object is not kept alive: without it the reporting ends, as by ``close``.
        """
        self._exchange = exchange
        self._report = weakref.WeakMethod(report)
        self._changed = forks.condition()
        self._wake = forks.event()
        self._closing = forks.event()
        self._arrivals = 0
        self._view = View(np.zeros(shard_count, bool), np.zeros(shard_count, np.uint8), np.zeros(shard_count, np.int64))
        self._turns = 0
        self._said: Report | None = None  # last
        self._warned = -WARN_SECONDS
        process_exit.call_at_exit(self.stop, process_exit.Phase.LOOPS)
        self._thread = process_exit.start(self._run, "quiver-needs", leaves=True)

    @property
    def view(self) -> View:
        """The last answer. Its arrays are replaced and never written to."""
        return self._view

    @property
    def arrivals(self) -> int:
        """How many times shards were seen to arrive."""
        return self._arrivals

    def first_answer(self, timeout_seconds: float) -> None:
        """Wait until something is known at all."""
        with self._changed:
            self._changed.wait_for(lambda: self._turns > 0 or self._closing.is_set(), timeout_seconds)

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the next answer, and ask for it to come soon."""
        with self._changed:
            turns = self._turns
            self._wake.set()
            self._changed.wait_for(lambda: self._turns != turns or self._closing.is_set(), timeout_seconds)

    def nudge(self) -> None:
        """Report soon: something changed that others should know, or somebody waits."""
        self._wake.set()

    def stop(self) -> None:
        """Have the reporting end, which takes one's needs back."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._wake.set()

    def close(self) -> None:
        """Stop reporting, and take one's needs back, unless that takes long: then it goes on in the background."""
        self.stop()
        process_exit.join([self._thread], CLOSE_SECONDS)

    def _run(self) -> None:
        pause, answered = 0.0, time.monotonic()
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            if self._closing.is_set():
                break
            begun = time.monotonic()
            try:
                said = self._say()
            except Exception as error:  # noqa: BLE001 - the supervisor of reporting: without it the view stands still
                self._failed(error)
                if time.monotonic() - answered >= STALE_SECONDS:
                    self._learn(np.zeros(len(self._view.resident), np.uint8))
                pause = 0.0
                self._closing.wait(RETRY_SECONDS)
                continue
            if said is None:
                break
            pause, answered = said, time.monotonic()
            self._closing.wait(begun + SPACING_SECONDS - time.monotonic())
        try:
            if self._said is not None:
                self._exchange.report(self._said, leaving=True)
            self._exchange.close()
        except Exception as error:  # noqa: BLE001 - what was told is forgotten when its lease ends
            self._failed(error)

    def _say(self) -> float | None:
        """Report once; return the seconds until the next time, ``None`` if there is nobody any more to report for."""
        report = self._report()
        if report is None:
            return None
        self._said, pause = report()
        del report
        self._learn(self._exchange.report(self._said))
        return pause

    def _failed(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            log.warning("needs: the cache was not told what this job needs: %s: %s", type(error).__name__, error)

    def _learn(self, seen: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        resident = seen > 0
        new = resident & ~self._view.resident
        arrived = self._view.arrived
        if new.any():
            self._arrivals += 1
            arrived = np.where(new, self._arrivals, arrived)
        with self._changed:
            others = np.where(resident, seen - 1, 0).astype(np.uint8)
            self._view = View(resident, others, arrived, self._exchange.orphaned)
            self._turns += 1
            self._changed.notify_all()

"""Reports what a consumer needs to its cache in the background, and keeps the answer: what is resident.

One thread per consumer, off the batch path: drawing a batch reads the last answer and never waits for a report.
``NeedsChannel`` is what carries the reports, to a rack or to a folder.
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
from quiver.backoff import Backoff
from quiver.residency import ConsumerReport
from quiver.substitution import View
from quiver_client import process_exit

log = logging.getLogger("quiver_client")

SPACING_SECONDS: Final = 0.05  # between two reports, however urgent
RETRY_SECONDS: Final = 1.0  # after a report that failed
STALE_SECONDS: Final = 5.0  # how long the last answer counts if no new one arrives
WARN_SECONDS: Final = 30.0  # between two warnings
CLOSE_SECONDS: Final = 1.5  # that ``close`` waits for the last report, which may hang and would delay the exit


class NeedsChannel(Protocol):
    """Carries reports of needs. Used by one thread, up to twenty times per second; must never block for long."""

    orphaned: npt.NDArray[np.bool_] | None
    """By shard, whether no daemon will fetch it, since its owner does not respond; ``None``: no shard is orphaned."""

    @property
    def probe_wanted(self) -> bool:
        """Whether an operator asks this consumer's job for a series of probes, by the last answers."""
        ...

    def report(self, report: ConsumerReport, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        """Report what this consumer needs; return by shard 0 if it is not resident, else 1 + how many others need it.

        ``leaving``: the consumer is done, and needs nothing from now on.
        """
        ...

    def close(self) -> None: ...


class NeedsReporter:
    """Reports repeatedly on a ``NeedsChannel``, and keeps the last answer as a ``View``. Safe from threads."""

    def __init__(
        self, shard_count: int, channel: NeedsChannel, report: Callable[[], tuple[ConsumerReport, float]]
    ) -> None:
        """``report`` is a method that returns what to report now, and the seconds until the next report.

        Its object is not kept alive: once it is garbage, reporting ends as by ``close``.
        """
        self._channel = channel
        self._report = weakref.WeakMethod(report)
        self._changed = forks.condition()
        self._wake = forks.event()
        self._closing = forks.event()
        self._arrivals = 0
        self._view = View(np.zeros(shard_count, bool), np.zeros(shard_count, np.uint8), np.zeros(shard_count, np.int64))
        self._turns = 0
        self._reported: ConsumerReport | None = None  # the last report
        self._warnings = Backoff(WARN_SECONDS, WARN_SECONDS)
        process_exit.call_at_exit(self.stop, process_exit.Phase.LOOPS)
        self._thread = process_exit.start(self._run, "quiver-needs", leaves=True)

    @property
    def view(self) -> View:
        """The last answer. Its arrays are replaced, and never written to."""
        return self._view

    @property
    def is_probe_wanted(self) -> bool:
        """Whether the cache asks for probes, in its last answer."""
        return self._channel.probe_wanted

    @property
    def is_answered(self) -> bool:
        """Whether ``view`` is an answer."""
        return self._turns > 0

    @property
    def arrivals(self) -> int:
        """The number of answers in which shards were newly resident."""
        return self._arrivals

    def first_answer(self, timeout_seconds: float) -> None:
        """Wait for the first answer."""
        with self._changed:
            self._changed.wait_for(lambda: self._turns > 0 or self._closing.is_set(), timeout_seconds)

    def wait(self, timeout_seconds: float) -> None:
        """Report now, and wait for the answer."""
        with self._changed:
            turns = self._turns
            self._wake.set()
            self._changed.wait_for(lambda: self._turns != turns or self._closing.is_set(), timeout_seconds)

    def nudge(self) -> None:
        """Report soon: something changed that others should know, or a caller waits."""
        self._wake.set()

    def stop(self) -> None:
        """Ask the thread to withdraw the needs and end."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._wake.set()

    def close(self) -> None:
        """Withdraw the needs and end. If that takes longer than ``CLOSE_SECONDS``, it continues in the background."""
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
                next_seconds = self._report_once()
            except Exception as error:  # noqa: BLE001 - the supervisor of reporting: without it the view goes stale
                self._failed(error)
                if time.monotonic() - answered >= STALE_SECONDS:
                    self._learn(np.zeros(len(self._view.resident), np.uint8))
                pause = 0.0
                self._closing.wait(RETRY_SECONDS)
                continue
            if next_seconds is None:
                break
            pause, answered = next_seconds, time.monotonic()
            self._closing.wait(begun + SPACING_SECONDS - time.monotonic())
        try:
            if self._reported is not None:
                self._channel.report(self._reported, leaving=True)
            self._channel.close()
        except Exception as error:  # noqa: BLE001 - the last report's lease expires by itself
            self._failed(error)

    def _report_once(self) -> float | None:
        """Report once; return the seconds until the next report, ``None`` if the consumer is garbage."""
        report = self._report()
        if report is None:
            return None
        self._reported, pause = report()
        del report
        self._learn(self._channel.report(self._reported))
        return pause

    def _failed(self, error: Exception) -> None:
        if not self._warnings.is_waiting:
            self._warnings.fail()
            log.warning("needs: could not report to the cache what this job needs: %s: %s", type(error).__name__, error)

    def _learn(self, seen: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        resident = seen > 0
        new = resident & ~self._view.resident
        arrived = self._view.arrived
        if new.any():
            self._arrivals += 1
            arrived = np.where(new, self._arrivals, arrived)
        with self._changed:
            others = np.where(resident, seen - 1, 0).astype(np.uint8)
            self._view = View(resident, others, arrived, self._channel.orphaned)
            self._turns += 1
            self._changed.notify_all()

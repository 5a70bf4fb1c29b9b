"""This rank as a consumer of the cache: it reports what its pass still needs, and learns which shards are resident.

No other module of the loader knows how reports travel. The reporting thread takes the sampler's lock to look at the
pass; methods marked "locked" are called with it held.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from threading import RLock
from typing import Any, Final, Protocol

import numpy as np

from quiver.identity import NOBODY, Identity
from quiver.residency import ConsumerReport, Measured, rounded_up
from quiver.substitution import Ints, Mask, View
from quiver_client.loader.draw_wait import DrawWait
from quiver_client.loader.epoch import Epoch, ShardLayout
from quiver_client.loader.known_order import KnownOrder, KnownUses
from quiver_client.loader.loop_rate import LoopPauses, LoopRate, LoopSpeed, LoopTurn
from quiver_client.loader.probing import Probed
from quiver_client.loader.several_needs import needs_of
from quiver_client.needs_reporter import NeedsReporter
from quiver_client.placement import Leaf

FIRST_ANSWER_SECONDS: Final = 2.0
LEASE_SECONDS: Final = 5.0  # several reports; the cache keeps what a suspended job needs for this long
REPORT_SECONDS: Final = (0.1, 1.0)  # bounds of the time between two reports
SOON_SHARDS_MAX: Final = 1024


class Read(Protocol):
    """What of a pass, or of several open ones, has yet to be read."""

    @property
    def left(self) -> Ints:
        """Entries by shard whose bytes have yet to be read ``(shards,)``."""
        ...

    def soon(self, samples: int) -> list[int]:
        """Return the shards of the next ``samples`` entries, in the order of their first use."""
        ...


class Pending(Protocol):
    """The passes of a consumer, as far as reports of needs depend on them."""

    @property
    def layout(self) -> ShardLayout: ...

    @property
    def reading(self) -> Any:
        """What is read, a ``Read``; ``None`` while no loop reads."""
        ...


class CacheConsumer:
    """Reports from the first pass until ``close``. Where there is no cache, ``view`` stays ``None``."""

    def __init__(
        self,
        leaves: tuple[Leaf, ...],
        passes: Pending,
        wait: DrawWait,
        lock: RLock,
        *,
        soon_samples: int | None,
        known: KnownOrder | None = None,
    ) -> None:
        """``soon_samples``: how many samples ahead to request shards in order; ``None``: in any order.

        ``known``: the uses to come of an order that nothing changes, to report them all.
        """
        self._leaves, self._passes, self._wait, self._lock = leaves, passes, wait, lock
        self._layout = passes.layout
        self._soon_samples = soon_samples
        self._known = known
        self._rate = LoopRate()
        self._pauses = LoopPauses()
        self._series, self._probed = 0, Probed()
        self._name = b""
        self._identity = NOBODY
        self.on_view: Callable[[Read, Mask], None] | None = None  # told of what is resident, before each report
        self._reporter: NeedsReporter | None = None

    @property
    def view(self) -> View | None:
        """What is resident, by the last answer."""
        return self._reporter.view if self._reporter is not None else None

    def begin(self, name: bytes, identity: Identity = NOBODY) -> None:
        """A pass begins; ``name`` tells this consumer from all others, ``identity`` says whose it is. Locked."""
        self._name, self._identity = name, identity
        self._rate.pause()
        self._pauses.begin(time.monotonic())

    def report_now(self) -> None:
        """Report changes without delay, if this consumer reports at all."""
        if self._reporter is not None:
            self._reporter.nudge()

    def start(self, *, wait_for_answer: bool) -> None:
        """Start to report, unless that has begun or the process has no cache for this dataset."""
        if self._reporter is not None:
            self._reporter.nudge()
            return
        channel = needs_of(self._leaves)
        if channel is None:
            return
        self._reporter = NeedsReporter(len(self._layout.counts), channel, self._report)
        self._finalizer = weakref.finalize(self, self._reporter.close)
        self._finalizer.atexit = False  # the reporter withdraws the needs at exit
        if wait_for_answer:
            self._reporter.first_answer(FIRST_ANSWER_SECONDS)

    def wait_for_report(self, timeout_seconds: float) -> None:
        """Wait for the next answer of the cache."""
        if self._reporter is not None:
            self._reporter.wait(timeout_seconds)

    def asked(self) -> None:
        """The training loop waits for a batch. Locked."""
        now = time.monotonic()
        was_paused = self._pauses.is_paused(now)
        self._pauses.asked(now)
        if was_paused:
            self._rate.pause()
            self.report_now()

    def starved(self, seconds: float) -> None:
        """The loop had to wait for a batch. Locked."""
        self._rate.starved(seconds)

    @property
    def speed(self) -> LoopSpeed:
        """How fast the loop reads this, and could. Locked."""
        return self._rate.speed

    def resume(self, samples: int) -> None:
        """The job had read about so many samples before this process resumed it. Counts once. Locked."""
        if not self._rate.speed.attained_bytes:
            counts = self._layout.counts
            mean_bytes = float(self._layout.sample_bytes @ counts) / max(int(counts.sum()), 1)
            self._rate.attained(samples * mean_bytes)

    def consumed(self, rows: Ints, turn: LoopTurn) -> None:
        """The training loop received these samples. Locked."""
        self._pauses.consumed(time.monotonic())
        self._rate.consumed(self._layout.bytes(rows), turn, len(rows))

    @property
    def is_probe_wanted(self) -> bool:
        """Whether the cache asks this rank for a series of probes."""
        return self._reporter is not None and self._reporter.is_probe_wanted

    def tell_probed(self, probed: Probed | None) -> None:
        """A series of probes has ended; ``None``: without a result. Locked."""
        self._series += 1
        self._probed = probed or Probed()

    def passed_over(self, turn: LoopTurn) -> None:
        """The training loop received a batch without any of these samples. Locked."""
        self._pauses.passed_over()
        self._rate.consumed(0.0, turn)

    def close(self) -> None:
        """Withdraw what this consumer needs. ``start`` may follow. Not locked: it waits for the reporting thread."""
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            self._finalizer.detach()
            reporter.close()

    def _report(self) -> tuple[ConsumerReport, float]:
        """Return what to report now, and the seconds until the next report."""
        with self._lock:
            # A loop that pauses, to validate for instance, holds no claim on the cache meanwhile.
            epoch = None if self._pauses.is_paused(time.monotonic()) else self._passes.reading
            view = self.view
            left = epoch.left if epoch is not None else np.zeros(len(self._layout.counts), np.int64)
            soon = self._soon(epoch, view) if epoch is not None else ()
            rate, speed, is_starving = self._rate.value, self._rate.speed, self._wait.is_waiting
            waiting_seconds = self._pauses.waiting_seconds(time.monotonic()) if left.any() else 0.0
            waited = self._rate.waited(waiting_seconds)
            fixed = epoch if isinstance(epoch, Epoch) and epoch.is_known else None
            read = fixed.read if fixed is not None and self._known is not None else 0
        known = self._known.uses(fixed, read) if fixed is not None and self._known is not None else KnownUses()
        ahead = 0.0
        on_view, reporter = self.on_view, self._reporter
        if on_view is not None and epoch is not None and view is not None and reporter and reporter.is_answered:
            on_view(epoch, view.resident)
        # While a draw waits, what is resident makes no batch: nothing is ahead, however much that is. Else a cache with
        # several consumers would fetch nothing for one whose batch is larger than the runway that it keeps for each.
        if view is not None and not is_starving:
            ahead = float((left * self._layout.sample_bytes)[view.resident].sum())
        report = ConsumerReport(
            consumer=self._name,
            left=rounded_up(left, self._layout.counts),
            rate=rate,
            ahead_bytes=ahead,
            lease_seconds=LEASE_SECONDS,
            soon=soon,
            ordered=self._soon_samples is not None,
            order=known.identifier,
            order_at=known.at,
            uses=known.shards,
            identity=self._identity,
            measured=Measured(
                speed.throughput,
                waited,
                speed.attained_bytes,
                self._series,
                self._probed.hits,
                self._probed.misses,
            ),
        )
        # A loop that is held back needs a report no more often than it reads a shard.
        pace = speed.throughput or rate
        shard_seconds = self._layout.shard_bytes / pace if pace > 0 else 0.0
        least, most = REPORT_SECONDS
        return report, least / 2 if is_starving else min(max(shard_seconds / 2, least), most)

    def _soon(self, epoch: Read, view: View | None) -> tuple[int, ...]:
        if self._soon_samples is None:
            return ()
        shards = epoch.soon(self._soon_samples)
        if view is not None:
            shards = [shard for shard in shards if not view.resident[shard]]
        return tuple(shards[:SOON_SHARDS_MAX])

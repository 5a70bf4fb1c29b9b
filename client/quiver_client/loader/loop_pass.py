"""``LoopPass``: the iterator of a training loop, which counts a batch as consumed when it hands it out.

The threads and workers that make its batches refer to the loader and never to the pass, so that a pass that a loop
dropped midway is collected, and ends them.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from quiver_client.loader.bad_samples import CompleteBatches
from quiver_client.loader.epoch import Epoch
from quiver_client.loader.loop_rate import LoopTurn
from quiver_client.loader.progress import ProgressLine
from quiver_client.loader.sampler import DISPLACED, BatchSampler
from quiver_client.loader.threads import ThreadedBatches
from quiver_client.loader.trainers.injected import SeenBatches
from quiver_client.loader.trainers.wrappers import GradientSync
from quiver_client.loader.turns import Turns
from quiver_client.loader.wait_warning import LoopWatch
from quiver_client.loader.workers import NumberedBatches

Batches = ThreadedBatches | NumberedBatches | CompleteBatches


class LoopPass:
    """One pass of one loop over a loader."""

    def __init__(
        self, order: BatchSampler, epoch: Epoch, batches: Batches, sync: GradientSync, *, reads_ahead: bool
    ) -> None:
        """``reads_ahead``: a wrapper asks for a batch as it hands out the one before, which is consumed only then."""
        self._order, self._epoch, self._sync = order, epoch, sync
        self._reads_ahead = reads_ahead
        self._kept: tuple[int, LoopTurn] | None = None  # the batch that the wrapper has, and what its turn took
        self._batches: Batches | None = batches
        self._dropped = weakref.finalize(self, _drop, order, epoch, batches, sync)
        self._dropped.atexit = False
        self._watch: LoopWatch | None = None
        self._seen: SeenBatches | None = None
        self._line: ProgressLine | None = None
        self._turns: Turns | None = None
        sync.begin()

    def tell(self, watch: LoopWatch, seen: SeenBatches, line: ProgressLine | None, turns: Turns) -> None:
        """Tell others of the loop's waits, its turns, what it was handed, and its end."""
        self._watch, self._seen, self._line, self._turns = watch, seen, line, turns
        watch.begin()
        seen.begin()

    def __iter__(self) -> LoopPass:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        begun = time.monotonic()
        if self._turns is not None:
            self._turns.ask()
        self._order.asked(self._epoch)
        if not self._order.is_current(self._epoch):
            raise RuntimeError(DISPLACED)
        self._consumed()
        try:
            number, batch = next(self._batches)
        except StopIteration:
            self._batches = None
            self._end()
            self._order.end(self._epoch)
            raise
        waited = time.monotonic() - begun
        if self._seen is not None:
            self._seen.handed_out(self._epoch, number)
        self._kept = number, self._turns.receive() if self._turns is not None else LoopTurn(waited)
        if not self._reads_ahead:
            self._consumed()
        self._sync.handed_out(is_last=self._epoch.finished)
        if self._watch is not None:
            self._watch.waited(waited)
        return self._sync.placed(batch)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def reading(self) -> bool:
        """Whether the pass has not reached its end."""
        return self._batches is not None

    def close(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            self._end()
            self._order.abandon(self._epoch)
            batches.close()

    def _end(self) -> None:
        self._sync.end()
        self._dropped.detach()
        if self._line is not None:
            self._line.end()

    def _consumed(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            self._order.consumed(self._epoch, *kept)


def _drop(order: BatchSampler, epoch: Epoch, batches: Batches, sync: GradientSync) -> None:
    """End a pass that was garbage-collected, in any thread, so without waiting: ``close`` could wait for itself."""
    sync.end()
    order.abandon(epoch)
    batches.close(wait=False)

"""A pass over a sampler that is read while it is trained on: a batch's samples are drawn when the batch is.

So a sampler may be infinite, may have no length, and may decide by what happened between two batches, a loss for
instance. It is never read further than the batches that are fetched ahead, and without any lock that the training loop
takes: it may wait for the loop. Only to replace a bad sample does the loop itself read it (``add_pending``): a sampler
that waits for the loop would then wait for itself, and needs ``on_error="raise"``. What such a pass needs of the cache
is what was drawn and not read yet.
"""

from __future__ import annotations

import copy
import logging
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final

import blake3
import numpy as np

from quiver import forks
from quiver.substitution import Ints, Mask, View
from quiver_client.loader.epoch import RECENT_BATCHES, Drawn, Epoch, ShardLayout

log = logging.getLogger("quiver_client")

READ_OUT_MAX: Final = 1 << 20  # a longer sampler is not read to its end for a state
READ_OUT_SECONDS: Final = 5.0  # how long a state waits for a sampler that is being read


class SamplerReader:
    """One iteration over a sampler: indices that are checked, without those that a resumed run had consumed."""

    def __init__(self, sampler: Iterable[int], samples: int, done: Mask, on_end: Callable[[], None]) -> None:
        """``done`` ``(samples,)``: samples to leave out. ``on_end`` is called when the sampler ends."""
        self._sampler, self._samples, self._done, self._on_end = sampler, samples, done, on_end
        self._omits = bool(done.any())
        self.given = 0
        self.is_exhausted = False
        try:
            self._iterator: Iterator[Any] = iter(sampler)
        except StopIteration as error:  # it would end an enclosing loop
            raise RuntimeError("sampler: it raised StopIteration where an iterator was expected") from error

    def read(self, count: int | None) -> list[int]:
        """Return the next ``count`` indices, all for ``None``; fewer at the end."""
        rows: list[int] = []
        while not self.is_exhausted and (count is None or len(rows) < count):
            try:
                row = operator.index(next(self._iterator))
            except StopIteration:
                self._end()
                break
            except TypeError as error:
                raise ValueError(f"sampler: it must give integers, the indices of samples: {error}") from error
            if not 0 <= row < self._samples:
                raise ValueError(f"sampler: it gives indices outside the dataset's {self._samples} samples")
            self.given += 1
            if not (self._omits and self._done[row]):
                rows.append(row)
        return rows

    @property
    def is_at_its_length(self) -> bool:
        """Whether it gave as many as its length says."""
        return isinstance(self._sampler, Sized) and self.given == len(self._sampler)

    @property
    def is_short(self) -> bool:
        """Whether its length says that it ends soon enough to be read to its end."""
        length = len(self._sampler) if isinstance(self._sampler, Sized) else None
        return length is not None and length - self.given <= max(self._samples, READ_OUT_MAX)

    @property
    def stateful(self) -> Any | None:
        """What has a state of its own, as torchdata's samplers have: the iterator, else the sampler."""
        for each in (self._iterator, self._sampler):
            if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
                return each
        return None

    def _end(self) -> None:
        self.is_exhausted = True
        if isinstance(self._sampler, Sized) and self.given < len(self._sampler):
            log.warning(
                "sampler: it gave %d samples where its len() says %d; the epoch ends there",
                self.given,
                len(self._sampler),
            )
        self._on_end()


class LazyEpoch(Epoch):
    """A pass whose samples a reader gives. Its methods but ``prepare`` are called with the sampler's lock held."""

    is_known = False

    def __init__(self, number: int, reader: SamplerReader, layout: ShardLayout, *, drop_last: bool) -> None:
        super().__init__(number, np.zeros(0, np.int64), layout)
        self._layout = layout
        self._reader = reader
        self._drop_last = drop_last
        self._reading: threading.Lock = forks.lock()
        self._buffer: list[int] = []
        self._flying: dict[int, Ints] = {}
        self._snapshots: dict[int, Any] = {}
        self._snapshot = self._snapped()
        self._before: deque[Any] = deque(maxlen=RECENT_BATCHES)  # snapshots before each of the ``_recent``
        self.samples_given_out = 0  # samples

    @property
    def pending(self) -> int:
        """Samples that were read and not drawn, and one if there may be more."""
        return len(self._buffer) + (not self._reader.is_exhausted)

    @property
    def finished(self) -> bool:
        return not self.pending and not self._flying

    @property
    def left(self) -> Ints:
        return self._unread + self._shards_of(np.array(self._buffer, np.int64))

    def prepare(self, count: int) -> None:
        """Read the next batch from the sampler."""
        with self._reading:
            self._fill(count)
            if self._reader.is_exhausted and self._drop_last and len(self._buffer) < count:
                self._buffer = []

    @property
    def identity(self) -> str:
        """A digest of the next samples that were read from the sampler."""
        return blake3.blake3(np.array(self._buffer, np.int64).tobytes()).hexdigest(16)

    def soon(self, samples: int) -> list[int]:
        return list(dict.fromkeys(self._layout.shard_of[np.array(self._buffer[:samples], np.int64)].tolist()))

    def choose(self, count: int, view: View | None, lookahead: int | None) -> Ints | None:
        if len(self._buffer) < count and not self._reader.is_exhausted:
            return None  # another batch took some in place of bad ones: it is to be prepared again
        return np.arange(min(count, len(self._buffer)))

    def draw(self, entries: Ints) -> Drawn:
        rows = np.array(self._buffer[: len(entries)], np.int64)
        del self._buffer[: len(entries)]
        number, self.drawn = self.drawn, self.drawn + 1
        self._flying[number] = self._fetching[number] = rows
        self._unread += self._shards_of(rows)
        self._snapshots[number] = self._snapped()
        return Drawn(number, rows, 0)

    def rows(self, number: int) -> Ints:
        return self._flying[number]

    def fetched(self, number: int) -> None:
        rows = self._fetching.pop(number, None)
        if rows is not None:
            self._unread -= self._shards_of(rows)

    def consume(self, number: int) -> Ints:
        self.fetched(number)
        self.has_skipped |= any(earlier < number for earlier in self._flying)
        rows = self._flying.pop(number)
        self._before.append(self._snapshot)
        self._snapshot = self._snapshots.pop(number)
        self.batches += 1
        self._recent.append((number, rows))
        self.handed_out += 1
        self.samples_given_out += len(rows)
        return rows

    def add_pending(self, number: int, count: int) -> tuple[Ints, list[int]]:
        if self._reading.acquire(timeout=READ_OUT_SECONDS):  # else the sampler waits for the loop, which waits here
            try:
                self._fill(count)
            finally:
                self._reading.release()
        rows = np.array(self._buffer[:count], np.int64)
        del self._buffer[:count]
        self._flying[number] = np.concatenate([self._flying[number], rows])
        return rows, [0] * len(rows)

    def is_held(self, batch_size: int) -> bool:
        return False

    def _fill(self, count: int) -> None:
        """Read until so many samples can be drawn. Called with ``_reading``."""
        if len(self._buffer) < count:
            self._buffer += self._reader.read(count - len(self._buffer))
            if self._reader.is_at_its_length:
                self._buffer += self._reader.read(1)  # there is none: now it is known to have ended

    # -- the state ----------------------------------------------------------------------------------------------------

    @property
    def sampler_state(self) -> Any | None:
        """The sampler's own state as it was when the last batch that was consumed had been drawn."""
        return self._snapshot

    def read_out(self) -> Ints | None:
        """Return all that is left, in order, and keep it for this pass; ``None`` if the sampler may be endless."""
        if not self._reader.is_short and not self._reader.is_exhausted:
            return None
        if not self._reading.acquire(timeout=READ_OUT_SECONDS):
            return None  # the sampler waits for the loop
        try:
            self._buffer += self._reader.read(None)
        finally:
            self._reading.release()
        flying = [self._flying[number] for number in sorted(self._flying)]
        return np.concatenate([*flying, np.array(self._buffer, np.int64)])

    def as_of(self, batches: int) -> LazyEpoch:
        undone = self._since(batches)
        earlier = copy.copy(self)
        earlier.batches = batches
        earlier._flying = dict(undone) | self._flying
        earlier.samples_given_out -= sum(len(rows) for _, rows in undone)
        if undone:
            earlier._snapshot = self._before[-len(undone)]
        return earlier

    def rows_since(self, batches: int) -> Ints:
        return np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in self._since(batches))])

    def _snapped(self) -> Any | None:
        stateful = self._reader.stateful
        return copy.deepcopy(stateful.state_dict()) if stateful is not None else None

    def _shards_of(self, rows: Ints) -> Ints:
        counts: Ints = np.bincount(self._layout.shard_of[rows], minlength=len(self._unread))
        return counts

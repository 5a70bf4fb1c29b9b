"""The order of a run: which samples make the next batch, decided in the main process when the batch is drawn.

    drawn → fetched (its bytes are in memory) → consumed (the training loop has it)

What is drawn depends on what is resident; what is saved depends on what was consumed.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Final, NamedTuple

import blake3
import numpy as np
from torch.utils.data import Sampler

from quiver.digest import Digest
from quiver.need import CONSUMER_BYTES, Report, rounded_up
from quiver.substitution import Ints, Mask, View
from quiver_client.dataset import Dataset
from quiver_client.loader.arguments import job_of, lookahead_of, place_of, whole
from quiver_client.loader.epoch import Deal, Drawn, Epoch, Layout
from quiver_client.loader.history import History
from quiver_client.loader.labels import LabelWatch
from quiver_client.loader.pace import Idle, Pace
from quiver_client.loader.state import State, fitted, make_state, unpack
from quiver_client.needs.watch import Watch

log = logging.getLogger("quiver_client")

PATIENCE_SECONDS: Final = 5.0  # without anything arriving; then a batch is read from wherever it is
PATIENCE_SECONDS_MIN: Final = 0.1
PATIENCE_SECONDS_MAX: Final = 20.0  # whatever arrives meanwhile
FIRST_ANSWER_SECONDS: Final = 2.0
LEASE_SECONDS: Final = 5.0  # several reports; so long a job that was suspended keeps what it needed
REPORT_SECONDS: Final = (0.1, 1.0)
SOON_BATCHES: Final = 64  # how far ahead residency is asked for where the order is fixed
SOON_SHARDS: Final = 1024


class Waiting(NamedTuple):
    """A batch that could not be had: since when, since when nothing of use arrived, and what was there of use."""

    began: float
    since: float
    usable: int


class BatchSampler(Sampler[list[int]]):
    """Batches of sample numbers, those first whose shards are resident, each sample exactly once an epoch.

    ``quiver_client.DataLoader`` has one; a stock ``DataLoader(dataset, batch_sampler=BatchSampler(dataset, 256))``
    takes one as well, and so does torchdata's ``StatefulDataLoader``. There a batch counts as consumed when it is
    drawn; see ``DataLoader`` for the arguments. Each iteration is one epoch, and the next one the next epoch.
    """

    def __init__(  # noqa: PLR0913 - each is one of the loader's
        self,
        dataset: Dataset,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        substitute: bool = True,
        lookahead: int | str = "auto",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        job: str | None = None,
        ledger: str | None = None,
        replay: str | None = None,
        sampler: Iterable[int] | None = None,
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise ValueError(f"dataset: a quiver_client.Dataset is wanted, not {type(dataset).__name__}")
        rank, world_size = place_of(rank, world_size)
        self._consumer = _consumer(job_of(job), rank, dataset.manifest.digest)
        if sampler is not None:  # its order is its own, and it has dealt the ranks' shares already
            rank, world_size = 0, 1
        for name, file in (("ledger", ledger), ("replay", replay)):
            if file is not None and sampler is not None:
                raise ValueError(f"{name}: it is about orders that a seed gives, and a sampler's is its own")
        self.dataset = dataset
        self.deal = Deal(
            samples=len(dataset),
            seed=whole("seed", seed, 0),
            shuffle=bool(shuffle),
            rank=rank,
            world_size=world_size,
            batch_size=whole("batch_size", batch_size, 1),
            drop_last=bool(drop_last),
        )
        self._sampler = sampler
        self.substitute = bool(substitute) and self.deal.shuffle and sampler is None and replay is None
        self._lookahead = lookahead_of(lookahead)
        self._history = History(dataset.manifest.digest, self.deal, ledger, replay)
        self._labels = LabelWatch(dataset) if self.deal.shuffle else None
        self._lock = threading.RLock()
        self._next_epoch = 0
        self._resume: State | None = None
        self._resumed = False  # this run goes on with another, and with its ledger
        self._named = False  # the next epoch's number was given by the user
        self._epoch: Epoch | None = None
        self._done: Mask = np.zeros(0, bool)
        self._behind: Mask = self._done  # and what was consumed since
        self._left_out: Ints = np.zeros(0, np.int64)  # by drop_last
        self._watch: Watch | None = None
        self._pace = Pace()
        self._patience = PATIENCE_SECONDS
        self._idle = Idle()
        self._waiting: Waiting | None = None
        self._read: Epoch | None = None  # the pass that somebody reads: its needs are reported
        self._repeats = False
        self._layout = Layout.of(dataset.manifest)

    # -- as a sampler -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self._sampler is not None and isinstance(self._sampler, Sized):
            count, size = len(self._sampler), self.deal.batch_size
            return count // size if self.deal.drop_last else -(-count // size)
        return self.deal.batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.begin()
        try:
            while True:
                self.asked()
                drawn = self.draw(epoch)
                if drawn is None:
                    break
                self.consumed(epoch, drawn.number)
                yield drawn.rows.tolist()
            self.end(epoch)
        finally:
            self.abandon(epoch)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a BatchSampler stays in the process that made it: it decides by what that process knows")

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch's: all of it, or what a loaded state of it left."""
        with self._lock:
            self._next_epoch, self._named = whole("epoch", epoch, 0), True
            if self._epoch is not None and self._read is None:
                self._drop()  # a pass that was broken off: it is not gone on with
            if self._resume is not None and self._resume["epoch"] != epoch:
                self._resume = None

    def state_dict(self) -> State:
        """Return what is consumed so far. What was prefetched and not handed out is not."""
        with self._lock:
            if self._epoch is None:
                return self._resume or self._state(self._next_epoch, 0, self._done[:0], self._done[:0])
            epoch = self._epoch
            self._history.flush()
            if self._repeats:
                raise ValueError("sampler: it gives a sample more than once, so what is left of it cannot be saved")
            # A sampler's next order may be another, so entries of this one mean nothing. And one rank alone can do
            # with less: it is ``merge_states`` of its own state, kept up to date.
            anew = self._done.any() or (epoch.skipped and self._history.writing)
            if self._sampler is not None or (self.deal.world_size == 1 and anew):
                return self._state(epoch.number, 0, self._behind, self._done[:0])
            return self._state(epoch.number, epoch.batches, self._done, epoch.consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. Raises ``ValueError`` with the reason if it is of something else."""
        fitting = fitted(state, str(self.dataset.manifest.digest), self.deal)
        with self._lock:
            self._drop()
            self._resume, self._resumed = fitting, True
            self._next_epoch, self._named = state["epoch"], False

    def close(self) -> None:
        """Stop reporting needs, and close the ledger. The next iteration opens them again; the state is as it was."""
        with self._lock:
            if self._epoch is not None:
                self.abandon(self._epoch)
            watch, self._watch = self._watch, None
            self._history.close()
        if watch is not None:
            self._leaving.detach()
            watch.close()

    # -- as a loader uses it ------------------------------------------------------------------------------------------

    def begin(self) -> Epoch:
        """Begin the next epoch, or what was left of a resumed one."""
        with self._lock:
            self._drop()
            resume, named = self._resume, self._named
            epoch = self._dealt(self._next_epoch, resume)
            if resume is not None and not named and epoch.finished:
                epoch = self._dealt(self._next_epoch + 1, None)  # the state was taken at an epoch's very end
            self._resume, self._named = None, False
            self._epoch = self._read = epoch
            self._next_epoch = epoch.number + 1
            self._waiting = None
            self._pace.paused()
            self._idle.began(time.monotonic())
            self._history.begin(epoch, self._done, resumed=self._resumed)
        if self._watch is None and not self._history.replaying:
            self._start_watch()
        elif self._watch is not None:
            self._watch.nudge()
        return epoch

    def ready(self, epoch: Epoch) -> bool:
        """Whether ``draw`` would return at once."""
        with self._lock:
            return epoch is not self._read or not epoch.pending or self._chosen(epoch) is not None

    def draw(self, epoch: Epoch) -> Drawn | None:
        """Return the next batch, ``None`` at the end of the pass or once it was abandoned. May wait."""
        while True:
            with self._lock:
                if epoch is not self._read or not epoch.pending:
                    return None
                entries = self._chosen(epoch)
                if entries is not None:
                    return self._take(epoch, entries)
                watch = self._watch
            assert watch is not None
            watch.wait(PATIENCE_SECONDS_MIN)

    def asked(self) -> None:
        """The training loop waits for a batch."""
        with self._lock:
            was_idle = self._idle.is_idle(time.monotonic())
            self._idle.asking = True
        if was_idle and self._watch is not None:
            self._watch.nudge()

    def fetched(self, epoch: Epoch, number: int) -> None:
        with self._lock:
            epoch.fetched(number)

    def consumed(self, epoch: Epoch, number: int, waited_seconds: float = 0.0) -> None:
        """The training loop has the batch, after it waited for it."""
        with self._lock:
            self._history.consumed(number)
            rows = epoch.consume(number)
            self._idle.consumed(time.monotonic())
            self._pace.consumed(self._layout.bytes(rows), waited_seconds)
            if epoch is self._epoch:
                self._behind[rows] = True
                self._behind[self._left_out] = True
        if self._labels is not None:
            self._labels.seen(rows)

    def end(self, epoch: Epoch) -> None:
        """The pass is over: what is saved from here on is the next epoch, untouched."""
        with self._lock:
            if epoch is self._epoch:
                self._drop()

    def abandon(self, epoch: Epoch) -> None:
        """The pass is not gone on with. What it had drawn ahead was not consumed; a state says so until the next."""
        with self._lock:
            if epoch is self._epoch:
                self._read, self._waiting = None, None
                if epoch.finished:
                    self._drop()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._epoch = self._read = None
        self._done = np.zeros(0, bool)
        self._history.flush()

    def _dealt(self, number: int, resume: State | None) -> Epoch:
        samples = self.deal.samples
        done = unpack(resume["done"], samples) if resume is not None else np.zeros(samples, bool)
        share, left_out = self.deal.share(self._order(number, done))
        own = unpack(resume["own"], len(share)) if resume is not None else None
        self._done, self._behind = done, done.copy()
        self._left_out = left_out if self._sampler is None else left_out[:0]
        if own is not None and own.any():
            self._behind[share[own]] = True
            self._behind[self._left_out] = True
        batches = resume["batches"] if resume is not None else 0
        replayed = self._history.order(number, self._layout) if self._history.replaying else None
        if replayed is not None and len(replayed) < len(share):
            log.warning("replay: of epoch %d the ledger has %d of %d samples", number, len(replayed), len(share))
        return Epoch(number, share, self._layout, own=own, batches=batches, replayed=replayed)

    def _order(self, number: int, done: Mask) -> Ints:
        if self._sampler is None:
            return self.deal.order(number, done)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(number)
        rows = np.fromiter(self._sampler, np.int64)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.deal.samples:
            raise ValueError(f"sampler: it gives indices that the dataset's {self.deal.samples} samples do not have")
        given = np.zeros(self.deal.samples, bool)
        given[rows] = True
        self._repeats = int(np.count_nonzero(given)) < len(rows)
        return rows[~done[rows]]

    def _state(self, epoch: int, batches: int, done: Mask, own: Mask) -> State:
        return make_state(str(self.dataset.manifest.digest), self.deal, epoch, batches, done, own)

    def _view(self) -> View | None:
        return self._watch.view if self.substitute and self._watch is not None else None

    def _chosen(self, epoch: Epoch) -> Ints | None:
        """Return the entries of the next batch, or ``None`` while it is worth waiting for."""
        view = self._view()
        entries = epoch.choose(self.deal.batch_size, view, self._lookahead)
        if entries is not None:
            return entries
        assert view is not None
        assert self._watch is not None
        # With a lookahead what is missing was asked for in time, or there is no room for it: no wait brings it.
        if self._lookahead is not None or epoch.order.is_hopeless(view):
            return epoch.completed(self.deal.batch_size, view, self._lookahead)
        now, usable = time.monotonic(), int(epoch.order.left[view.resident].sum())
        if self._waiting is None:
            self._waiting = Waiting(now, now, usable)
            self._watch.nudge()
        elif now - self._waiting.began >= PATIENCE_SECONDS_MAX:
            return epoch.completed(self.deal.batch_size, view, self._lookahead)
        elif usable > self._waiting.usable:
            self._waiting = Waiting(self._waiting.began, now, usable)
        elif now - self._waiting.since >= self._patience:
            return epoch.completed(self.deal.batch_size, view, self._lookahead)
        return None

    def _take(self, epoch: Epoch, entries: Ints) -> Drawn:
        if self._waiting is not None:
            now = time.monotonic()
            self._pace.starved(now - self._waiting.began)
            # If it was not worth waiting, wait less the next time, and more again when it was.
            vain = now - self._waiting.since >= self._patience
            patience = self._patience / 2 if vain else self._patience * 2
            self._patience = min(max(patience, PATIENCE_SECONDS_MIN), PATIENCE_SECONDS)
            self._waiting = None
        self._history.drawn(epoch, epoch.drawn, entries)
        drawn = epoch.draw(entries)
        self.dataset.count("substitutions", drawn.substituted)
        return drawn

    def _start_watch(self) -> None:
        exchange = self.dataset.needs()
        if exchange is None:
            return
        self._watch = Watch(len(self._layout.counts), exchange, self._report)
        self._leaving = weakref.finalize(self, self._watch.close)
        self._leaving.atexit = False  # the watch sees to that
        if self.substitute:
            self._watch.first_answer(FIRST_ANSWER_SECONDS)

    def _report(self) -> tuple[Report, float]:
        """Return what to report now, and when to report again."""
        with self._lock:
            # A loop that does something else for long, validates perhaps, needs nothing meanwhile: others go on.
            epoch = None if self._idle.is_idle(time.monotonic()) else self._read
            view = self._watch.view if self._watch is not None else None
            in_order = not self.substitute or self._lookahead is not None
            left = epoch.left if epoch is not None else np.zeros(len(self._layout.counts), np.int64)
            soon = self._soon(epoch, view) if epoch is not None and in_order else ()
            rate, starving = self._pace.rate, self._waiting is not None
        ahead = 0.0
        if view is not None:
            ahead = float((left * self._layout.sample_bytes)[view.resident].sum())
        report = Report(
            consumer=self._consumer,
            left=rounded_up(left, self._layout.counts),
            rate=rate,
            ahead_bytes=ahead,
            lease_seconds=LEASE_SECONDS,
            soon=soon,
            ordered=in_order,
        )
        shard_seconds = self._layout.shard_bytes / rate if rate > 0 else 0.0
        least, most = REPORT_SECONDS
        return report, least / 2 if starving else min(max(shard_seconds / 2, least), most)

    def _soon(self, epoch: Epoch, view: View | None) -> tuple[int, ...]:
        shards = epoch.soon(self._lookahead or SOON_BATCHES * self.deal.batch_size)
        if view is not None:
            shards = [shard for shard in shards if not view.resident[shard]]
        return tuple(shards[:SOON_SHARDS])


_made: Counter[str] = Counter()  # loaders of this process by what they read


def _consumer(job: str, rank: int, dataset: Digest) -> bytes:
    """Return the name under which a rank reports: a job that starts again takes the place of what it was.

    A job may read several datasets, and one of them by several loaders: which is which, their order says.
    """
    name = f"{job}\0{rank}\0{dataset}"
    _made[name] += 1
    return blake3.blake3(f"{name}\0{_made[name]}".encode()).digest(CONSUMER_BYTES)

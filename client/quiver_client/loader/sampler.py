"""The order of a run: which samples make the next batch, decided in the main process when the batch is drawn.

    drawn → fetched (its bytes are in memory) → consumed (the training loop has it)

What is drawn depends on what is resident; what is saved depends on what was consumed.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any, Final, NamedTuple

import blake3
import numpy as np
from torch.utils.data import Sampler

from quiver import forks
from quiver.digest import Digest
from quiver.residency import CONSUMER_BYTES, Report, rounded_up
from quiver.substitution import Ints, Mask, View
from quiver_client.dataset import Dataset
from quiver_client.failure import failure
from quiver_client.loader.agreement import Agreement
from quiver_client.loader.arguments import job_of, lookahead_of, whole
from quiver_client.loader.epoch import Deal, Drawn, Epoch, Layout
from quiver_client.loader.given import GivenOrder, place_given
from quiver_client.loader.history import History
from quiver_client.loader.labels import LabelWatch
from quiver_client.loader.pace import Idle, Pace
from quiver_client.loader.place import Place
from quiver_client.loader.state import State, belonging, counted, counting, fitted, make_state, rest_of, unpack
from quiver_client.loader.trainers import Share, refuse_wrapper
from quiver_client.needs_reporter import NeedsReporter

log = logging.getLogger("quiver_client")

PATIENCE_SECONDS: Final = 5.0  # without anything arriving; then a batch is read from wherever it is
PATIENCE_SECONDS_MIN: Final = 0.1
PATIENCE_SECONDS_MAX: Final = 20.0  # whatever arrives meanwhile
FIRST_ANSWER_SECONDS: Final = 2.0
LEASE_SECONDS: Final = 5.0  # several reports; so long a job that was suspended keeps what it needed
REPORT_SECONDS: Final = (0.1, 1.0)
SOON_BATCHES: Final = 64  # how far ahead residency is asked for where the order is fixed
SOON_SHARDS: Final = 1024
DISPLACED: Final = (
    "this pass was ended by another one, or by a state that was loaded: a loader is iterated by one loop at a time"
)


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
        self._place = Place(*place_given(sampler, rank, world_size))
        self._name = _name(job_of(job), dataset.manifest.digest)
        for name, file in (("ledger", ledger), ("replay", replay)):
            if file is not None and sampler is not None:
                raise ValueError(f"{name}: it is about orders that a seed gives, and a sampler's is its own")
        self.dataset = dataset
        self._given = GivenOrder(sampler, len(dataset)) if sampler is not None else None
        self._deal = Deal(
            samples=len(dataset),
            seed=whole("seed", seed, 0),
            shuffle=bool(shuffle),
            rank=0,
            world_size=1,
            batch_size=whole("batch_size", batch_size, 1),
            drop_last=bool(drop_last),
        )
        self.substitute = bool(substitute) and self._deal.shuffle and sampler is None and replay is None
        self._lookahead = lookahead_of(lookahead)
        self._deal = self.deal
        if self._place.is_whole:  # read by one rank alone, perhaps: it counts as none of what all ranks make
            self._agreement = None
        else:
            self._agreement = Agreement(dataset.manifest, self._deal, sampler)
        self._read_through = False  # the pass came to its end, and was not compared with other ranks'
        self._files = ledger, replay
        self._history = History(dataset.manifest.digest, self._deal, ledger, replay)
        self._labels = LabelWatch(dataset) if self._deal.shuffle else None
        self._lock = forks.rlock()
        self._next_epoch = 0
        self._resume: State | None = None
        self._resumed = False  # this run goes on with another, and with its ledger
        self._named = False  # the next epoch's number was given by the user
        self._epoch: Epoch | None = None
        self._begun_from: State | None = None  # the state that this pass went on from
        self._before = 0  # batches of its epoch that were handed out before the shares were dealt
        self._length: int | None = None  # batches of its epoch, where that is not as long as another
        self._touched = False  # something of this pass was handed out
        self._done: Mask = np.zeros(0, bool)
        self._behind: Mask = self._done  # and what was consumed since
        self._left_out: Ints = np.zeros(0, np.int64)  # by drop_last
        self._watch: NeedsReporter | None = None
        self._pace = Pace()
        self._patience = PATIENCE_SECONDS
        self._idle = Idle()
        self._waiting: Waiting | None = None
        self._read: Epoch | None = None  # the pass that somebody reads: its needs are reported
        self._layout = Layout.of(dataset.manifest)

    # -- as a sampler -------------------------------------------------------------------------------------------------

    @property
    def deal(self) -> Deal:
        """What the shares follow from; before the first pass, as they would be if it began now."""
        if self._given is not None:  # it has dealt them already, and its order is its own
            return self._deal
        rank, world_size = self._place.current
        if (rank, world_size) == (self._deal.rank, self._deal.world_size):
            return self._deal
        return replace(self._deal, rank=rank, world_size=world_size)

    @property
    def sampler(self) -> Iterable[int]:
        """The sampler that was given, or the rank's share as one.

        There is no ``batch_size`` and no ``drop_last`` beside it: Lightning would make another order of them.
        """
        return Share(self) if self._given is None else self._given.sampler

    @property
    def epoch(self) -> int:
        """The number of the epoch that is read, or else of the next one."""
        return self._epoch.number if self._epoch is not None else self._next_epoch

    def __len__(self) -> int:
        """Batches of a whole epoch; while a state is gone on with, no fewer than it counts and has left.

        No fewer than a whole epoch either: a trainer that asks once, as Lightning does, reads the next by it as well.
        """
        with self._lock:
            return max(self._whole_batches, self._resumed_batches or 0)

    @property
    def _whole_batches(self) -> int:
        batches = self._given.batches(self._deal) if self._given is not None else None
        return self.deal.batches if batches is None else batches

    @property
    def _resumed_batches(self) -> int | None:
        """The batches of an epoch that is gone on with, or will be with the next pass."""
        if self._epoch is not None and (self._read is not None or not self._touched):
            return self._length
        if self._resume is None:
            return None
        try:
            resume = self._fitted(self._resume)
        except ValueError:
            return None  # as the next pass says
        left = self._left_of(resume)
        return counted(resume) + left if left or self._named else None

    def _left_of(self, resume: State) -> int:
        """Return how many batches a state has left for this rank."""
        samples, rest = self._deal.samples, rest_of(resume)
        deal = self.deal
        left = len(rest) if rest is not None else samples - int(unpack(resume["done"], samples).sum())
        share = replace(deal, samples=left).share_samples
        own = int(unpack(resume["own"], share).sum()) if resume["own"] else 0
        return ceil((share - own) / deal.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # Now, and not with the first batch: a dispatcher asks for that in one rank, and the others wait for it.
        refuse_wrapper(sys._getframe(1), self.deal, fixed=not self.substitute, known=self._is_known)
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
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
                if not self._touched and self._epoch.number == epoch:
                    self._resume = self._begun_from
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
            if self._given is not None:
                return self._given_state(self._given, epoch)
            # One rank alone can do with less: it is ``merge_states`` of its own state, kept up to date.
            anew = self._done.any() or (epoch.skipped and self._history.writing)
            if self._deal.world_size == 1 and anew:
                state = self._state(epoch.number, 0, self._behind, self._done[:0])
                return counting(state, self._before + epoch.batches)
            return counting(self._state(epoch.number, epoch.batches, self._done, epoch.consumed), self._before)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. Raises ``ValueError`` with the reason if it is of something else."""
        with self._lock:
            # What rank this is may not be said yet: then the first pass says whether the state is its own.
            belongs = belonging(state, str(self.dataset.manifest.digest), self._deal)
            foreign = belongs.get("sampler") and self._given is None
            fitting = self._fitted(belongs) if self._place.is_known or foreign else belongs
            self._drop()
            self._resume, self._resumed = fitting, True
            self._next_epoch, self._named = state["epoch"], False
            if self._given is not None:
                self._given.leave_at(self._next_epoch)

    def check_shares(self) -> None:
        """Raise ``ValueError`` if a trainer takes this order for a rank's share, and each rank reads all of it."""
        if self._given is not None and not self._given.is_share:
            self._place.refuse_whole()

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
        self._agree_on_end()
        with self._lock:
            self._settle()
            self._take_over()
            untouched = self._epoch if not self._touched else None
            if untouched is not None and (not self._named or self._next_epoch == untouched.number):
                self._next_epoch, self._resume = untouched.number, self._begun_from  # nothing of it was handed out
            resume, named = self._resume, self._named
            resume = self._fitted(resume) if resume is not None else None
            self._drop()
            epoch = self._dealt(self._next_epoch, resume)
            if resume is not None and not named and epoch.finished:
                resume = None  # the state was taken at an epoch's very end
                epoch = self._dealt(self._next_epoch + 1, None)
            self._begun_from, self._touched = resume, False
            self._before = resume.get("before", 0) if resume is not None else 0
            going_on = counted(resume) + ceil(epoch.pending / self._deal.batch_size) if resume is not None else None
            self._length = going_on
            self._resume, self._named = None, False
            self._epoch = self._read = epoch
            self._next_epoch = epoch.number + 1
            self._waiting = None
            self._pace.paused()
            self._idle.began(time.monotonic())
            self._history.begin(epoch, self._done, resumed=self._resumed)
        if self._agreement is not None:
            self._agreement.begin(self._place.current, epoch.number, resume)
        if self._watch is None and not self._history.replaying:
            self._start_watch()
        elif self._watch is not None:
            self._watch.nudge()
        return epoch

    def ready(self, epoch: Epoch) -> bool:
        """Whether ``draw`` would return at once."""
        with self._lock:
            return epoch is not self._read or not epoch.pending or self._chosen(epoch) is not None

    def is_current(self, epoch: Epoch) -> bool:
        """Whether no other pass has begun since, and no state was loaded."""
        return epoch is self._epoch

    def draw(self, epoch: Epoch) -> Drawn | None:
        """Return the next batch, ``None`` at the end of the pass or once it was abandoned. May wait.

        Raises ``RuntimeError`` if it was displaced: by another pass, or by a state that was loaded meanwhile.
        """
        while True:
            with self._lock:
                if epoch is not self._epoch and epoch.pending:
                    raise RuntimeError(DISPLACED)
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

    def failure(self, error: BaseException, rows: Ints) -> RuntimeError:
        """Return what to raise in place of an exception that the loop would take for the end of the epoch."""
        return failure("collate_fn, or the dataset,", error, self.dataset.manifest, rows.tolist())

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
                self._touched = True
                self._read_through = epoch.finished
                self._behind[rows] = True
                self._behind[self._left_out] = True
        if self._labels is not None:
            self._labels.seen(rows)

    def end(self, epoch: Epoch) -> None:
        """The pass is over: what is saved from here on is the next epoch, untouched."""
        with self._lock:
            if epoch is self._epoch:
                self._drop()
        self._agree_on_end()

    def abandon(self, epoch: Epoch) -> None:
        """The pass is not gone on with. What it had drawn ahead was not consumed; a state says so until the next."""
        with self._lock:
            if epoch is self._epoch:
                self._read, self._waiting = None, None
                if epoch.finished:
                    self._drop()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _consumer(self) -> bytes:
        """The name under which this rank reports what it needs."""
        return blake3.blake3(f"{self._name}\0{self._place.current[0]}".encode()).digest(CONSUMER_BYTES)

    @property
    def _is_known(self) -> bool:
        """Whether the next pass is of an order that another process would read as well."""
        if self._given is not None:
            asked = hasattr(self._given.sampler, "set_epoch") and (self._named or self._given.named is not None)
            return asked or self._given.is_fixed
        return self._named or not self._deal.shuffle

    def _settle(self) -> None:
        """Take the rank that this process has now, for good. Whatever ranks have to agree on is compared here."""
        self._place.settle()
        deal = self.deal
        if deal != self._deal:
            self._deal = deal
            self._history = History(self.dataset.manifest.digest, deal, *self._files)

    def _take_over(self) -> None:
        """Take the epoch that the user set on his own sampler, unless he set one here."""
        epoch = self._given.named if self._given is not None and not self._named else None
        if epoch is not None:
            self.set_epoch(epoch)

    def _agree_on_end(self) -> None:
        """Compare a pass that was read to its end with those of other ranks, once."""
        with self._lock:
            over, self._read_through = self._read_through, False
        if over and self._agreement is not None:
            self._agreement.finish(self._place.current)

    def _fitted(self, state: State) -> State:
        deal = self.deal
        if self._given is not None:
            rank, world_size = self._place.current
            deal = replace(deal, rank=rank, world_size=world_size)
        return fitted(state, str(self.dataset.manifest.digest), deal, sampler=self._given is not None)

    def _drop(self) -> None:
        self._epoch = self._read = None
        self._done = np.zeros(0, bool)
        self._history.flush()

    def _dealt(self, number: int, resume: State | None) -> Epoch:
        samples = self._deal.samples
        done = unpack(resume["done"], samples) if resume is not None else np.zeros(samples, bool)
        order = self._deal.order(number, done) if self._given is None else self._given.rows(number, done, resume)
        share, left_out = self._deal.share(order)
        own = unpack(resume["own"], len(share)) if resume is not None else None
        self._done, self._behind = done, done.copy()
        self._left_out = left_out if self._given is None else left_out[:0]
        if own is not None and own.any():
            self._behind[share[own]] = True
            self._behind[self._left_out] = True
        batches = resume["batches"] if resume is not None else 0
        replayed = self._history.order(number, self._layout) if self._history.replaying else None
        if replayed is not None and len(replayed) < len(share):
            log.warning("replay: of epoch %d the ledger has %d of %d samples", number, len(replayed), len(share))
        return Epoch(number, share, self._layout, own=own, batches=batches, replayed=replayed)

    def _state(self, epoch: int, batches: int, done: Mask, own: Mask) -> State:
        return make_state(str(self.dataset.manifest.digest), self.deal, epoch, batches, done, own)

    def _given_state(self, given: GivenOrder, epoch: Epoch) -> State:
        rank, world_size = self._place.current
        done = np.ones_like(self._behind) if epoch.finished else self._behind
        state = counting(self._state(epoch.number, 0, done, self._done[:0]), self._before + epoch.batches)
        return given.state({**state, "rank": rank, "world_size": world_size}, epoch)

    def _view(self) -> View | None:
        return self._watch.view if self.substitute and self._watch is not None else None

    def _chosen(self, epoch: Epoch) -> Ints | None:
        """Return the entries of the next batch, or ``None`` while it is worth waiting for."""
        view = self._view()
        entries = epoch.choose(self._deal.batch_size, view, self._lookahead)
        if entries is not None:
            return entries
        assert view is not None
        assert self._watch is not None
        # With a lookahead what is missing was asked for in time, or there is no room for it: no wait brings it.
        if self._lookahead is not None or epoch.order.is_hopeless(view):
            return epoch.completed(self._deal.batch_size, view, self._lookahead)
        now, usable = time.monotonic(), int(epoch.order.left[view.resident].sum())
        if self._waiting is None:
            self._waiting = Waiting(now, now, usable)
            self._watch.nudge()
        elif now - self._waiting.began >= PATIENCE_SECONDS_MAX:
            return epoch.completed(self._deal.batch_size, view, self._lookahead)
        elif usable > self._waiting.usable:
            self._waiting = Waiting(self._waiting.began, now, usable)
        elif now - self._waiting.since >= self._patience:
            return epoch.completed(self._deal.batch_size, view, self._lookahead)
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
        self._watch = NeedsReporter(len(self._layout.counts), exchange, self._report)
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
        shards = epoch.soon(self._lookahead or SOON_BATCHES * self._deal.batch_size)
        if view is not None:
            shards = [shard for shard in shards if not view.resident[shard]]
        return tuple(shards[:SOON_SHARDS])


_made: Counter[str] = Counter()  # loaders of this process by what they read


def _name(job: str, dataset: Digest) -> str:
    """Return the name that a loader's ranks share: a job that starts again takes the place of what it was.

    A job may read several datasets, and one of them by several loaders: which is which, their order says.
    """
    name = f"{job}\0{dataset}"
    _made[name] += 1
    return f"{name}\0{_made[name]}"

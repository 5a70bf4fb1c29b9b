"""``BatchSampler``: which samples make the next batch, decided in the main process when the batch is drawn.

    drawn → fetched (its bytes are in memory) → consumed (the training loop has it)

What is drawn depends on what is resident; what is saved depends on what was consumed. ``passes`` keeps track of both,
``consumer`` reports to the cache, ``draw_wait`` says how long a draw waits for it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import blake3
from torch.utils.data import Dataset, Sampler

from quiver import forks
from quiver.residency import CONSUMER_BYTES
from quiver.substitution import Ints
from quiver_client.failure import NAMED, failure
from quiver_client.loader import draw_wait
from quiver_client.loader.arguments import job_of, lookahead_of, shuffle_of, whole
from quiver_client.loader.consumer import CacheConsumer
from quiver_client.loader.draw_wait import DrawWait
from quiver_client.loader.epoch import Deal, Drawn, Epoch, ShardLayout
from quiver_client.loader.labels import ADVICE, ADVICE_ON_BLOCKS, LabelWatch
from quiver_client.loader.merged_state import merged_state
from quiver_client.loader.passes import Passes
from quiver_client.loader.rank import SettledRank
from quiver_client.loader.rank_agreement import RankAgreement
from quiver_client.loader.recording import open_recording
from quiver_client.loader.state import State
from quiver_client.loader.trainers import Share, keeps_one_state, refuse_wrapper
from quiver_client.loader.user_sampler import UserSampler, rank_given
from quiver_client.resolution import resolved

SOON_BATCHES: Final = 64  # how far ahead shards are requested if the order is fixed
DISPLACED: Final = (
    "this pass was ended by another one, or by a state that was loaded: a loader is iterated by one loop at a time"
)


class BatchSampler(Sampler[list[int]]):
    """Batches of sample numbers, resident ones first, each sample exactly once per epoch.

    ``quiver_client.DataLoader`` has one; a stock ``DataLoader(dataset, batch_sampler=BatchSampler(dataset, 256))``
    takes one as well, and so does torchdata's ``StatefulDataLoader``. There a batch counts as consumed when it is
    drawn; see ``DataLoader`` for the arguments. Each iteration is one epoch, and the next one the next epoch.
    """

    def __init__(  # noqa: PLR0913 - each is one of the loader's
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool | str = True,
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
        block_shards: int | None = None,
    ) -> None:
        self.samples = resolved(dataset)
        placement, identity = self.samples.placement(), self.samples.identity
        for name, file in (("ledger", ledger), ("replay", replay)):
            if file is not None and sampler is not None:
                raise ValueError(f"{name}: it records orders that follow from a seed, and a sampler's does not")
        settled = SettledRank(*rank_given(sampler, rank, world_size))
        self._name = _name(job_of(job), identity)
        self.dataset = dataset
        user = UserSampler(sampler, len(self.samples)) if sampler is not None else None
        if sampler is not None and isinstance(shuffle, str):
            raise ValueError("sampler: it determines the order; give either sampler or shuffle")
        layout = ShardLayout.of(placement)
        is_shuffled, blocks = shuffle_of(shuffle, block_shards, layout)
        deal = Deal(
            samples=len(self.samples),
            seed=whole("seed", seed, 0),
            shuffle=is_shuffled,
            rank=0,
            world_size=1,
            batch_size=whole("batch_size", batch_size, 1),
            drop_last=bool(drop_last),
            block_shards=blocks,
        )
        is_fixed = not deal.shuffle or bool(deal.block_shards) or sampler is not None or replay is not None
        self.substitute = bool(substitute) and not is_fixed
        self._lookahead = lookahead_of(lookahead)
        self._passes = Passes(identity, layout, deal, settled, user)
        # A rank that was told to read everything may be the only one that does, so it is not compared with others.
        self._agreement = None if settled.is_whole else RankAgreement(placement, identity, self.deal, sampler)
        self._is_read_through = False  # the pass has ended, and was not compared with other ranks' yet
        self._files = ledger, replay
        self._recorder, self._replay = open_recording(identity, self.deal, *self._files)
        self._labels = LabelWatch.of(placement, ADVICE_ON_BLOCKS if blocks else ADVICE) if deal.shuffle else None
        if self._labels is not None and blocks and not self._labels.is_idle:
            self._labels.foresee(self._passes.share(0), deal.batch_size)
        self._lock = forks.rlock()
        self._wait = DrawWait()
        takes_any = self.substitute and self._lookahead is None
        soon = None if takes_any else self._lookahead or SOON_BATCHES * deal.batch_size
        self._consumer = CacheConsumer(
            placement.leaves, self._passes, self._wait, self._lock, soon_samples=soon, is_fixed=not self.substitute
        )
        self._leaves = placement.leaves

    # -- as a sampler -------------------------------------------------------------------------------------------------

    @property
    def deal(self) -> Deal:
        """The settings that determine the shares; before the first pass, as if that began now."""
        return self._passes.deal

    @property
    def sampler(self) -> Iterable[int]:
        """The sampler that was given, or else the rank's share as a sampler.

        There is no ``batch_size`` or ``drop_last`` beside it: Lightning would make another order from them.
        """
        return Share(self) if self._passes.user is None else self._passes.user.sampler

    @property
    def epoch(self) -> int:
        """The number of the epoch that is being read, or else of the next one."""
        return self._passes.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch; of a resumed one, no fewer than were handed out and are left."""
        with self._lock:
            return self._passes.batches

    def __iter__(self) -> Iterator[list[int]]:
        # Begin now, not with the first batch: a dispatcher requests that in one rank, and the others wait for it.
        refuse_wrapper(sys._getframe(1), self.deal, fixed=not self.substitute, known=self._passes.is_reproducible)
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
        raise TypeError("a BatchSampler cannot be pickled: it decides by the state of the process that made it")

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read this epoch: all of it, or what a loaded state left of it."""
        with self._lock:
            self._passes.set_epoch(whole("epoch", epoch, 0))
            self._recorder.flush()

    def state_dict(self, *, merged: bool = False) -> State:
        """Return the state: what is consumed so far. Prefetched batches that were not handed out do not count.

        ``merged``: return that of all ranks, which all have to call this; see ``DataLoader.state_dict``.
        """
        if merged or keeps_one_state(sys._getframe(1)):
            return merged_state(self._state, *self._passes.rank.current)
        return self._state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken. Raises ``ValueError`` with the reason if the state does not fit."""
        with self._lock:
            self._passes.load(state)
            self._recorder.flush()

    def check_shares(self) -> None:
        """Raise ``ValueError`` if a trainer treats this order as a rank's share while each rank reads all of it."""
        user = self._passes.user
        if user is not None and not user.is_share:
            self._passes.rank.refuse_whole()

    def share(self, epoch: int) -> Ints:
        """Return this rank's share of a whole epoch, in the order of the permutation."""
        return self._passes.share(epoch)

    def close(self) -> None:
        """Stop reporting needs, and close the ledger. The next iteration opens them again; the state stays."""
        with self._lock:
            if self._passes.current is not None:
                self.abandon(self._passes.current)
            self._recorder.close()
        self._consumer.close()

    # -- as a loader uses it ------------------------------------------------------------------------------------------

    def begin(self) -> Epoch:
        """Begin the next epoch, or the rest of a resumed one."""
        self._compare_end()
        passes = self._passes
        with self._lock:
            if passes.settle():
                self._recorder, self._replay = open_recording(passes.dataset, passes.deal, *self._files)
            epoch = passes.begin(self._replay)
            self._wait.cancel()
            self._consumer.begin(self._consumer_name)
            self._recorder.begin(epoch, passes.done, resumed=passes.is_resumed)
        if self._agreement is not None:
            self._agreement.begin(passes.rank.current, epoch.number, passes.resumed_from)
        if self._replay is None:
            self._consumer.start(wait_for_answer=self.substitute)
        return epoch

    def poll(self, epoch: Epoch) -> bool:
        """Return whether ``draw`` would return at once; if not, begin the wait for the cache."""
        with self._lock:
            return epoch is not self._passes.reading or not epoch.pending or self._choose(epoch) is not None

    def is_current(self, epoch: Epoch) -> bool:
        """Whether no other pass has begun since, and no state was loaded."""
        return epoch is self._passes.current

    def draw(self, epoch: Epoch) -> Drawn | None:
        """Return the next batch, ``None`` at the end of the pass or once it was abandoned. May wait.

        Raises ``RuntimeError`` if another pass began or a state was loaded meanwhile.
        """
        while True:
            with self._lock:
                if epoch is not self._passes.current and epoch.pending:
                    raise RuntimeError(DISPLACED)
                if epoch is not self._passes.reading or not epoch.pending:
                    return None
                entries = self._choose(epoch)
                if entries is not None:
                    return self._take(epoch, entries)
            self._consumer.wait_for_report(draw_wait.PATIENCE_SECONDS_MIN)

    def asked(self) -> None:
        """The training loop waits for a batch."""
        with self._lock:
            self._consumer.asked()

    def failure(self, error: BaseException, rows: Ints) -> RuntimeError:
        """Return what to raise in place of an exception that the loop would take for the end of the epoch."""
        named = [self.samples.named(row) for row in rows[:NAMED].tolist()]
        return failure("collate_fn, or the dataset,", error, named, len(rows))

    def fetched(self, epoch: Epoch, number: int) -> None:
        """The bytes of a batch are in memory."""
        with self._lock:
            epoch.fetched(number)

    def consumed(self, epoch: Epoch, number: int, waited_seconds: float = 0.0) -> None:
        """The training loop received a batch, after waiting for it."""
        with self._lock:
            self._recorder.consumed(number)
            rows = epoch.consume(number)
            self._consumer.consumed(rows, waited_seconds)
            if self.is_current(epoch):
                self._passes.consumed(rows)
                self._is_read_through = epoch.finished
        if self._labels is not None:
            self._labels.seen(rows)

    def end(self, epoch: Epoch) -> None:
        """The pass has ended: from now on the state is that of the next epoch, with nothing consumed."""
        with self._lock:
            if self.is_current(epoch):
                self._passes.drop()
                self._recorder.flush()
        self._compare_end()

    def abandon(self, epoch: Epoch) -> None:
        """Stop reading the pass. Batches that were drawn ahead were not consumed, and the state says so."""
        with self._lock:
            if self.is_current(epoch):
                self._wait.cancel()
                self._passes.stop_reading()
                if epoch.finished:
                    self._recorder.flush()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _state(self) -> State:
        with self._lock:
            self._recorder.flush()
            return self._passes.state(is_recorded=self._recorder.is_recording)

    @property
    def _consumer_name(self) -> bytes:
        """The name under which this rank reports what it needs."""
        return blake3.blake3(f"{self._name}\0{self._passes.rank.current[0]}".encode()).digest(CONSUMER_BYTES)

    def _compare_end(self) -> None:
        """Compare a pass that was read to its end with other ranks' passes, once."""
        with self._lock:
            is_read_through, self._is_read_through = self._is_read_through, False
        if is_read_through and self._agreement is not None:
            self._agreement.finish(self._passes.rank.current)

    def _choose(self, epoch: Epoch) -> Ints | None:
        """Return the entries of the next batch, or ``None`` while it is worth waiting for."""
        batch_size = self.deal.batch_size
        view = self._consumer.view if self.substitute else None
        entries = epoch.choose(batch_size, view, self._lookahead)
        if entries is not None or view is None:
            return entries
        # With a lookahead, missing shards were requested in time, or there is no room for them: waiting does not help.
        if self._lookahead is None and not epoch.order.is_hopeless(view):
            was_waiting = self._wait.is_waiting
            if self._wait.go_on(time.monotonic(), int(epoch.order.left[view.resident].sum())):
                if not was_waiting:
                    self._consumer.report_now()
                return None
        return epoch.completed(batch_size, view, self._lookahead)

    def _take(self, epoch: Epoch, entries: Ints) -> Drawn:
        if self._wait.is_waiting:
            self._consumer.starved(self._wait.end(time.monotonic()))
        self._recorder.drawn(epoch, epoch.drawn, entries)
        drawn = epoch.draw(entries)
        self._leaves[0].count("substitutions", drawn.substituted)
        return drawn


_made: Counter[str] = Counter()  # loaders of this process by what they read


def _name(job: str, dataset: str) -> str:
    """Return the name that a loader's ranks share: a job that restarts replaces its earlier run.

    A job may read several datasets, and one of them by several loaders, which are numbered in order of creation.
    """
    name = f"{job}\0{dataset}"
    _made[name] += 1
    return f"{name}\0{_made[name]}"

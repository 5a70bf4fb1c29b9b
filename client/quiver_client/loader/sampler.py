"""``BatchSampler``: which samples make the next batch, decided in the main process when the batch is drawn.

    drawn → fetched (its bytes are in memory) → consumed (the training loop has it)

What is drawn depends on what is resident; what is saved depends on what was consumed. ``passes`` keeps track of both,
``consumer`` reports to the cache, ``draw_wait`` says how long a draw waits for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import blake3
import numpy as np
from torch.utils.data import Dataset

from quiver import forks
from quiver.residency import CONSUMER_BYTES
from quiver.substitution import Ints
from quiver_client.failure import NAMED, failure
from quiver_client.identity import identity_of
from quiver_client.loader import draw_wait
from quiver_client.loader.arguments import job_of, lookahead_of, shared_name, shuffle_of, whole
from quiver_client.loader.consumer import CacheConsumer
from quiver_client.loader.draw_wait import DrawWait
from quiver_client.loader.epoch import Deal, Drawn, Epoch, ShardLayout
from quiver_client.loader.known_order import KnownOrder
from quiver_client.loader.labels import ADVICE, ADVICE_ON_BLOCKS, LabelWatch
from quiver_client.loader.ledger.amendments import Amendment
from quiver_client.loader.ledger.recording import open_recording
from quiver_client.loader.loop_rate import NOT_TIMED, LoopSpeed, LoopTurn
from quiver_client.loader.merged_state import unpacked
from quiver_client.loader.order_sampler import OrderSampler
from quiver_client.loader.passes import OpenPass, Passes
from quiver_client.loader.probing import Probed
from quiver_client.loader.progress import ProgressLine
from quiver_client.loader.put_aside import PutAside
from quiver_client.loader.rank import SettledRank
from quiver_client.loader.rank_agreement import RankAgreement
from quiver_client.loader.replicas.group import group_of
from quiver_client.loader.replicas.role import role_of
from quiver_client.loader.state import State, counted
from quiver_client.loader.trainers.rebuilding import rebuildable
from quiver_client.loader.trainers.wrappers import share_of
from quiver_client.loader.user_sampler import UserSampler, rank_given
from quiver_client.mix import Mix
from quiver_client.placement import Leaf
from quiver_client.resolution import resolved

SOON_BATCHES: Final = 64  # how far ahead shards are requested if the order is fixed
HELD_SECONDS: Final = 1.0  # between two checks whether the loop asks for its last batch; it wakes the draw, too
DISPLACED: Final = (
    "this pass was ended by a state that was loaded: what is left of it belongs to the pass that resumes. Iterate the"
    " loader again"
)


@rebuildable
class BatchSampler(OrderSampler):
    """Batches of sample numbers, resident ones first, each sample exactly once per epoch.

    ``quiver_client.DataLoader`` has one; a stock ``DataLoader(dataset, batch_sampler=BatchSampler(dataset, 256))``
    takes one as well, and so does torchdata's ``StatefulDataLoader``. There a batch counts as consumed when it is
    drawn; see ``DataLoader`` for the arguments. Each iteration is one epoch, and the next one the next epoch.
    """

    def __new__(cls, dataset: Any, *args: Any, **named: Any) -> BatchSampler:  # noqa: ARG004 - __init__ takes them
        """Return the sampler of this kind of dataset."""
        if cls is BatchSampler and isinstance(dataset, Mix):
            from quiver_client.loader.mix.sampler import MixBatchSampler  # a subclass of this class

            return super().__new__(MixBatchSampler)
        return super().__new__(cls)

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
        group: str | None = None,
        tenant: str | None = None,
        ledger: str | None = None,
        replay: str | None = None,
        sampler: Iterable[int] | None = None,
        mesh: Any = None,
        replicate: Any = None,
        timeout: float = 0,
        block_shards: int | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.samples = resolved(dataset)
        placement, identity = self.samples.placement(), self.samples.identity
        for name, file in (("ledger", ledger), ("replay", replay)):
            if file is not None and sampler is not None:
                raise ValueError(f"{name}: it records orders that follow from a seed, and a sampler's does not")
        replicas = group_of(mesh, replicate, rank, world_size)
        if replicas is not None:
            rank, world_size = replicas.rank, replicas.world_size
        settled = SettledRank(*rank_given(sampler, rank, world_size), of_group=replicas is not None)
        self._whose = identity_of(job, group, tenant)
        self._name = shared_name(job_of(job), identity)
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
        self._role = role_of(replicas, identity, self.deal, substitute=self.substitute, timeout=timeout)
        is_compared = self._role.leads and not settled.is_whole
        compared = RankAgreement(placement, identity, self.deal, sampler, of_groups=replicas is not None)
        self._agreement = compared if is_compared else None
        self._finalizer = weakref.finalize(self, self._role.stop)
        self._finalizer.atexit = False  # a stream is stopped at exit by itself
        self._aside = PutAside()  # passes that other loops read
        self._is_read_through = False  # the pass has ended, and was not compared with other ranks' yet
        self._files = ledger if self._role.leads else None, replay
        self._records = ledger is not None
        self._recorder, self._replay = open_recording(identity, self.deal, *self._files)
        is_watched = deal.shuffle and self._role.leads
        self._labels = LabelWatch.of(placement, ADVICE_ON_BLOCKS if blocks else ADVICE) if is_watched else None
        if self._labels is not None and blocks and not self._labels.is_idle:
            self._labels.foresee(self._passes.share(0), deal.batch_size)
        self._lock = forks.rlock()
        self._wait = DrawWait()
        self.starved_seconds = 0.0  # in which draws waited, since nothing that is left was resident
        self._was_asked = forks.event()
        takes_any = self.substitute and self._lookahead is None
        soon = None if takes_any else self._lookahead or SOON_BATCHES * deal.batch_size
        known = None if self.substitute else KnownOrder(layout.shard_of, self._passes.following)
        self._consumer = CacheConsumer(
            placement.leaves, self._passes, self._wait, self._lock, soon_samples=soon, known=known
        )
        self._leaves = placement.leaves
        for leaf in self._leaves if not self._role.leads else ():
            leaf.follow()

    @property
    def arguments(self) -> dict[str, Any]:
        """What this order was made with, by name."""
        return dict(self._arguments)

    # -- as a sampler -------------------------------------------------------------------------------------------------

    @property
    def deal(self) -> Deal:
        """The settings that determine the shares; before the first pass, as if that began now."""
        return self._passes.deal

    def split(self, parts: int) -> None:
        """Make the batches of each rank smaller: one of the size that was given is split between ``parts`` ranks.

        Raises ``ValueError`` naming ``batch_size`` if it cannot be.
        """
        with self._lock:
            if self._passes.split(parts):
                self._recorder, self._replay = open_recording(self._passes.dataset, self.deal, *self._files)

    @property
    def sampler(self) -> Iterable[int]:
        """The sampler that was given, or else the rank's share as a sampler."""
        return share_of(self) if self._passes.user is None else self._passes.user.sampler

    @property
    def epoch(self) -> int:
        """The number of the epoch that is being read, or else of the next one."""
        return self._passes.epoch

    @property
    def layout(self) -> ShardLayout:
        """Which shard each sample lies in, and what shards have."""
        return self._passes.layout

    def __len__(self) -> int:
        """Batches of a whole epoch; of a resumed one, no fewer than were handed out and are left."""
        with self._lock:
            return self._passes.batches

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read this epoch: all of it, or what a loaded state left of it."""
        with self._lock:
            self._passes.set_epoch(whole("epoch", epoch, 0))
            self._recorder.flush()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken. Raises ``ValueError`` with the reason if the state does not fit."""
        with self._lock:
            self._passes.load(unpacked(state))
            self._aside.clear()
            self._recorder.flush()

    def count_on(self) -> None:
        """Read the epoch that follows next, whatever epoch a wrapper set the user's sampler to."""
        with self._lock:
            self._passes.count_on()

    @property
    def handed_out(self) -> int:
        """Batches that a loaded state counts in the epoch of the next pass; 0 where that pass begins an epoch."""
        with self._lock:
            return self._passes.handed_out

    @property
    def kept_of_last(self) -> int | None:
        """How many samples of the ranks' last batches, gathered in order of rank, are no repeats; 0 for all of them.

        ``None`` if that is not known: the repeated samples are somewhere else.
        """
        kept = self._passes.kept_of_last
        return None if kept and (self.substitute or self._replay is not None) else kept

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
        self._role.close()
        self._consumer.close()

    can_replace = True
    """Whether bad samples can be replaced or skipped."""

    @property
    def is_in_group(self) -> bool:
        """Whether other ranks have to get the same samples."""
        return self._role.is_in_group

    # -- as a loader uses it ------------------------------------------------------------------------------------------

    def begin(self) -> Epoch:
        """Begin the next epoch, or the rest of a resumed one. A pass that another loop reads is put aside."""
        self._compare_end()
        passes = self._passes
        with self._lock:
            opened = passes.open_pass()
            if passes.settle():
                self._recorder, self._replay = open_recording(passes.dataset, passes.deal, *self._files)
            epoch = passes.begin(self._replay)
            self._aside.put(opened)
            self._become_current(epoch)
            if passes.resumed_from is not None:
                read_before = epoch.number * self.deal.share_samples
                self._consumer.resume(read_before + counted(passes.resumed_from) * self.deal.batch_size)
            passes.rank.warn_of_replicas(is_fixed=not self.substitute)
        try:
            if self._agreement is not None:
                self._agreement.begin(passes.rank.current, epoch.number, passes.resumed_from)
            if self.is_in_group:
                epoch.prepare(self.deal.batch_size)  # what is known of the order is compared
            self._role.begin(epoch)
        except BaseException:
            self.abandon(epoch)
            raise
        if self._replay is None and self._role.leads:
            self._consumer.start(wait_for_answer=self.substitute)
        return epoch

    def poll(self, epoch: Epoch) -> bool:
        """Return whether ``draw`` would return at once; if not, begin the wait for the cache."""
        if epoch is self._passes.reading:
            epoch.prepare(self.deal.batch_size)
        with self._lock:
            is_read = epoch is self._passes.reading or epoch in self._aside
            if not is_read or not epoch.pending:
                return True
            return not epoch.is_held(self.deal.batch_size) and self._choose(epoch) is not None

    def is_current(self, epoch: Epoch) -> bool:
        """Whether this pass was asked last, and no state was loaded since."""
        return epoch is self._passes.current

    def draw(self, epoch: Epoch) -> Drawn | None:
        """Return the next batch, ``None`` at the end of the pass or once it was abandoned. May wait.

        Raises ``RuntimeError`` if a state was loaded meanwhile.
        """
        while True:
            if epoch is self._passes.reading or epoch in self._aside:
                epoch.prepare(self.deal.batch_size)
            with self._lock:
                is_aside = epoch in self._aside
                if not is_aside and epoch is not self._passes.current and epoch.pending:
                    raise RuntimeError(DISPLACED)
                if (not is_aside and epoch is not self._passes.reading) or not epoch.pending:
                    return None
                is_held = epoch.is_held(self.deal.batch_size)
                entries = self._choose(epoch) if not is_held else None
                if entries is not None:
                    return self._take(epoch, entries)
                self._was_asked.clear()
            if is_held:
                self._was_asked.wait(HELD_SECONDS)
            elif not self._role.wait(epoch):
                self._consumer.wait_for_report(draw_wait.PATIENCE_SECONDS_MIN)

    def asked(self, epoch: Epoch | None = None) -> None:
        """A loop waits for a batch of this pass, which becomes the current one; ``None``: of the current pass."""
        with self._lock:
            self._role.asked()
            if epoch is not None:
                self._go_on(self._aside.take(epoch))
            self._consumer.asked()
            if self._passes.reading is not None:
                self._passes.reading.asked()
            self._was_asked.set()

    def show_first_fill(self, line: ProgressLine) -> None:
        """Tell the line before each report, in the reporting thread, which shards are resident."""
        layout = self._passes.layout
        line.measure(self._leaves[0].manifest.path.stem, layout.sample_bytes * layout.counts)
        self._consumer.on_view = line.learn

    @property
    def speeds(self) -> tuple[LoopSpeed, ...]:
        """How fast the loop reads, and could, by dataset of a mixture."""
        with self._lock:
            return (self._consumer.speed,)

    @property
    def is_probe_wanted(self) -> bool:
        """Whether the cache asks this rank for a series of probes."""
        return self._consumer.is_probe_wanted and self._passes.rank.current[0] == 0

    def tell_probed(self, probed: Probed | None) -> None:
        """A series of probes has ended: report its result; ``None``: there is none."""
        with self._lock:
            self._consumer.tell_probed(probed)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """What is read through caches."""
        return self._leaves

    def failure(self, error: BaseException, rows: Ints) -> RuntimeError:
        """Return what to raise in place of an exception that the loop would take for the end of the epoch."""
        named = [self.samples.named(row) for row in rows[:NAMED].tolist()]
        return failure("collate_fn, or the dataset,", error, named, len(rows))

    def fetched(self, epoch: Epoch, number: int) -> None:
        """The bytes of a batch are in memory."""
        with self._lock:
            epoch.fetched(number)

    def hold_last(self, epoch: Epoch) -> None:
        """Keep the last batch's samples pending until the loop asks for it: they may replace bad ones of others."""
        with self._lock:
            if not self._passes.keeps_size:
                epoch.hold_last()

    def replace(self, epoch: Epoch, number: int, failed: Mapping[int, int], wanted: int) -> Ints:
        """Return up to ``wanted`` samples to hand out in place of bad ones: pending ones, else some once more.

        ``failed``: bad samples by their place in the batch, in which those count that were added before. They are
        consumed with the batch.
        """
        with self._lock:
            epoch.mark_bad(np.fromiter(failed.values(), np.int64, len(failed)))
            rows, shards = epoch.add_pending(number, wanted)
            repeated = epoch.repeats(number, wanted - len(rows), self.deal.seed)
            added = [(False, shard) for shard in shards] + [(True, row) for row in repeated.tolist()]
            self._amend(epoch, number, Amendment(tuple(added), tuple(sorted(failed))))
        self._leaves[0].count("replaced", len(added))
        self._leaves[0].count("skipped", len(failed) - len(added))
        return np.concatenate([rows, repeated])

    def consumed(self, epoch: Epoch, number: int, turn: LoopTurn = NOT_TIMED) -> None:
        """The training loop received a batch."""
        with self._lock:
            self._role.consumed(epoch, number)
            self._go_on(self._aside.take(epoch))  # in another thread another pass may have been asked meanwhile
            self._recorder.consumed(epoch, number)
            epoch.amendments.pop(number, None)
            rows = epoch.consume(number)
            self._consumer.consumed(rows, turn)
            if self.is_current(epoch):
                self._passes.consumed(rows)
                self._is_read_through = epoch.finished
        if self._labels is not None:
            self._labels.seen(rows)

    def end(self, epoch: Epoch) -> None:
        """The pass has ended: from now on the state is that of the next epoch, with nothing consumed."""
        with self._lock:
            self._aside.take(epoch)
            self._recorder.forget(epoch)
            if self.is_current(epoch):
                self._passes.drop()
                self._recorder.flush()
                self._return_to_outer()
        self._role.leave(epoch, at_end=True)
        self._compare_end()
        self._role.finish(epoch)

    def abandon(self, epoch: Epoch) -> None:
        """Stop reading the pass. Batches that were drawn ahead were not consumed, and the state says so."""
        with self._lock:
            self._aside.take(epoch)
            self._recorder.forget(epoch)
            if self.is_current(epoch):
                self._wait.cancel()
                self._passes.stop_reading()
                self._was_asked.set()
                if epoch.finished:
                    self._recorder.flush()
                self._return_to_outer()
        self._role.leave(epoch, at_end=False)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _state(self, batches: int | None) -> State:
        with self._lock:
            self._recorder.flush()
            is_recorded, claimant = self._is_recorded, self._aside.claimant()
            if claimant is not None:
                return self._passes.state_of(claimant, is_recorded=is_recorded, batches=batches)
            return self._passes.state(is_recorded=is_recorded, batches=batches)

    @property
    def _ranks(self) -> tuple[int, int]:
        """This rank, and of how many."""
        return self._passes.rank.current

    @property
    def _dealt_to(self) -> tuple[int, int]:
        """Rank and world size of the share that this order is."""
        return self._passes.dealt_to

    @property
    def _is_reproducible(self) -> bool:
        """Whether another process would read the next pass in the same order, if nothing is substituted."""
        return self._passes.is_reproducible

    @property
    def _is_users(self) -> bool:
        """Whether a sampler of the user's gives the order."""
        return self._passes.user is not None

    @property
    def _consumer_name(self) -> bytes:
        """The name under which this rank reports what it needs."""
        rank = self._passes.rank
        name = f"{self._name}\0{rank.current[0]}"
        if rank.process is not None:  # others of the job may read this share, each by its own choice
            name += f"\0{rank.process}"
        return blake3.blake3(name.encode()).digest(CONSUMER_BYTES)

    @property
    def _is_recorded(self) -> bool:
        """Whether a ledger records the order, here or in the rank that decides for this one."""
        return self._recorder.is_recording if self._role.leads else self._records

    def _become_current(self, epoch: Epoch) -> None:
        self._wait.cancel()
        self._consumer.begin(self._consumer_name, self._whose)
        self._recorder.begin(epoch, self._passes.done, resumed=self._passes.is_resumed)

    def _go_on(self, opened: OpenPass | None) -> None:
        """Make a pass current that was put aside, in place of the one that is. Locked."""
        if opened is not None:
            self._aside.put(self._passes.open_pass())
            self._passes.go_on(opened)
            self._become_current(opened.epoch)

    def _return_to_outer(self) -> None:
        """An inner loop's pass has ended: the outer loop's is current again, before that asks. Locked."""
        outer = self._aside.innermost()
        if outer is not None:
            self._go_on(self._aside.take(outer.epoch))

    def _compare_end(self) -> None:
        """Compare a pass that was read to its end with other ranks' passes, once."""
        with self._lock:
            is_read_through, self._is_read_through = self._is_read_through, False
        if is_read_through and self._agreement is not None:
            self._agreement.finish(self._passes.rank.current)

    def _choose(self, epoch: Epoch) -> Ints | None:
        """Return the entries of the next batch, or ``None`` while it is worth waiting for."""
        if self._role.follows:
            decided: Ints | None = self._role.decision(epoch)
            return decided
        if not self._role.has_room(epoch):
            return None
        batch_size = self.deal.batch_size
        if epoch in self._aside:  # drawn ahead, as nothing is reported for it: it does not wait for the cache
            return epoch.choose(batch_size, None, None)
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
        if self._wait.is_waiting and epoch not in self._aside:
            seconds = self._wait.end(time.monotonic())
            self.starved_seconds += seconds
            self._consumer.starved(seconds)
        self._recorder.drawn(epoch, epoch.drawn, entries)
        self._role.drawn(epoch, entries)
        drawn = epoch.draw(entries)
        self._leaves[0].count("substitutions", drawn.substituted)
        if epoch.owed and len(drawn.rows) < self.deal.batch_size:
            repeated = epoch.fill(drawn, self.deal.batch_size, self.deal.seed)
            self._amend(epoch, drawn.number, Amendment(tuple((True, row) for row in repeated.tolist())))
            drawn = drawn._replace(rows=np.concatenate([drawn.rows, repeated]))
        return drawn

    def _amend(self, epoch: Epoch, number: int, change: Amendment) -> None:
        before = epoch.amendments.get(number, Amendment())
        epoch.amendments[number] = before.and_then(change.added, change.failed)
        self._recorder.amended(epoch, number, epoch.amendments[number])

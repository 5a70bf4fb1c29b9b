"""``MixBatchSampler``: which samples of which parts make the next batch of a mixture.

How many of each part follows from the weights alone (``mix_schedule``), so it is the same in every rank and whatever is
resident; which ones, each part decides by its own passes and its own residency (``mix_part``), as ``BatchSampler`` does
for one dataset. If one part's samples are not resident, the batch waits for it as that one would; no other part takes
its place.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import blake3
import msgspec
import numpy as np
from torch.utils.data import Sampler

from quiver import forks
from quiver.residency import CONSUMER_BYTES
from quiver.substitution import Ints
from quiver_client.failure import NAMED, failure
from quiver_client.identity import identity_of
from quiver_client.loader import draw_wait
from quiver_client.loader.arguments import job_of, lookahead_of, shared_name, shuffle_of, whole
from quiver_client.loader.epoch import Deal, Drawn, ShardLayout
from quiver_client.loader.loop_rate import NOT_TIMED, LoopSpeed, LoopTurn
from quiver_client.loader.mix.agreement import MixAgreement
from quiver_client.loader.mix.guided import Losses
from quiver_client.loader.mix.mixed_pass import MixedPart, MixPass
from quiver_client.loader.mix.part import Chosen
from quiver_client.loader.mix.schedule import Schedule, in_units, placed_after, samples_for, spread
from quiver_client.loader.mix.state import VERSION, MixState, PartState
from quiver_client.loader.probing import Probed
from quiver_client.loader.rank import SettledRank
from quiver_client.loader.replicas.group import group_of
from quiver_client.loader.replicas.role import role_of
from quiver_client.loader.sampler import SOON_BATCHES, BatchSampler
from quiver_client.loader.state import State
from quiver_client.loader.trainers.wrappers import share_of
from quiver_client.mix import Mix
from quiver_client.placement import Leaf

log = logging.getLogger("quiver_client")

DISPLACED = (
    "this pass was ended by another one over the same Mix, or by a state that was loaded: a loader over a Mix is"
    " iterated by one loop at a time. Make a loader for each loop"
)

UNSUPPORTED = {
    "ledger": "a mixture has one order per part; record each part by a loader of its own",
    "replay": "a mixture has one order per part; substitute=False repeats the same order without a ledger",
    "sampler": "the Mix decides the order; give weights, or the sampler to a loader over one dataset",
}

GUIDED = (
    "the weights of a guided mixture follow from what each rank reports, and ranks that get the same samples may report"
    " different losses; give the Mix weights, or no guided="
)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a mixture is in its epochs; see ``mix_state``."""

    epoch: int = 0
    batches: int = 0
    taken: int = 0
    before: int = 0


class MixBatchSampler(BatchSampler):
    """What ``BatchSampler(Mix(...), ...)`` returns: see there. Each iteration is one epoch of the mixture."""

    can_replace = False

    def __init__(  # noqa: PLR0913 - each is one of the loader's
        self,
        dataset: Any,
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
        block_shards: int | None = None,
        mesh: Any = None,
        replicate: Any = None,
        timeout: float = 0,
    ) -> None:
        """Raises ``ValueError`` naming the argument that is wrong, or that a mixture does not support."""
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        for name, value in (("ledger", ledger), ("replay", replay), ("sampler", sampler)):
            if value is not None:
                raise ValueError(f"{name}: {UNSUPPORTED[name]}")
        Sampler.__init__(self)
        mix: Mix = dataset
        self.mix = self.samples = mix
        mix.is_ordered = True
        replicas = group_of(mesh, replicate, rank, world_size)
        if replicas is not None:
            rank, world_size = replicas.rank, replicas.world_size
            if mix.guided is not None and len(replicas.members) > 1:
                raise ValueError(f"{'replicate' if mesh is None else 'mesh'}: {GUIDED}")
        self._rank = SettledRank(rank, world_size, of_group=replicas is not None)
        self._lookahead = lookahead_of(lookahead)
        self._deal = Deal(
            samples=len(mix),
            seed=whole("seed", seed, 0),
            shuffle=bool(shuffle),
            rank=0,
            world_size=1,
            batch_size=whole("batch_size", batch_size, 1),
            drop_last=bool(drop_last),
        )
        self._batch_size = self._deal.batch_size  # as it was given
        self._shuffle = shuffle, block_shards
        self.substitute = bool(substitute) and self._deal.shuffle and shuffle != "block"
        self._lock = forks.rlock()
        takes_any = self.substitute and self._lookahead is None
        soon = None if takes_any else self._lookahead or SOON_BATCHES * self._deal.batch_size
        self._parts = [MixedPart(mix, name, self._part_deal, self._lock, soon) for name in mix.parts]
        self._whose = identity_of(job, group, tenant)
        self._name = shared_name(job_of(job), mix.identity)
        self._role = role_of(replicas, mix.identity, self._deal, substitute=self.substitute, timeout=timeout)
        for part in self._parts if not self._role.leads else ():
            part.follow()
        self._finalizer = weakref.finalize(self, self._role.stop)
        self._finalizer.atexit = False  # a stream is stopped at exit by itself
        agreed = MixAgreement(mix, self._deal, of_groups=replicas is not None)
        self._agreed = agreed if self._role.leads and not self._rank.is_whole else None
        # Guided weights change, so all have one unit.
        self._base = mix.shares if mix.guided is None else in_units(mix.weights)
        self._schedule = Schedule.fresh(self._base)  # of the next batch to draw
        self._handed_out = self._schedule  # of the batch after those that were handed out
        self._steps = 0  # batches that were handed out since the run began
        self._losses = Losses(mix.parts, mix.guided) if mix.guided is not None else None
        self._guided_at = -1  # the block of batches whose weights ``_schedule`` has
        self._at = Position()
        self._named: int | None = None
        self._current: MixPass | None = None
        self._reading: MixPass | None = None
        self._has_begun = False  # a batch of the current pass was handed out
        self._is_read_through = False
        self.starved_seconds = 0.0
        self._waiting: MixedPart = self._parts[0]

    # -- as a sampler -------------------------------------------------------------------------------------------------

    @property
    def deal(self) -> Deal:
        """The settings of one epoch: ``samples`` are those of all ranks."""
        rank, world_size = self._rank.current
        samples = self._whole_epoch * world_size
        return replace(self._deal, samples=samples, rank=rank, world_size=world_size)

    @property
    def dataset(self) -> Any:  # type: ignore[override]
        return self.mix

    @property
    def sampler(self) -> Any:
        """The rank's share as a sampler: for trainers that look whether samples are dealt already."""
        return share_of(self)

    def count_on(self) -> None:
        """A mixture has no sampler of the user's, whose epoch a wrapper could set."""

    @property
    def epoch(self) -> int:
        if self._reading is not None:
            return self._reading.number
        return self._at.epoch if self._named is None else self._named

    def __len__(self) -> int:
        """Batches of a whole epoch; of a resumed one, no fewer than were handed out and are left."""
        with self._lock:
            left = self._left(self._at) if self._is_partial else 0
            resumed = self._at.batches + -(-left // self._deal.batch_size) if left else 0
            return max(-(-self._whole_epoch // self._deal.batch_size), resumed)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read this epoch of the mixture.

        The one that comes next continues where the parts are. Any other begins where the parts would be if all epochs
        before it had been read in the order of the permutations.
        """
        with self._lock:
            self._named = whole("epoch", epoch, 0)

    @property
    def handed_out(self) -> int:
        with self._lock:
            is_next = self._named in (None, self._at.epoch) and self._reading is None
            return self._at.batches if is_next and self._is_partial else 0

    @property
    def kept_of_last(self) -> int | None:
        """Which samples a mixture repeats does not follow from where they are in a batch."""
        return None

    def split(self, parts: int) -> None:
        if self._batch_size % parts:
            raise ValueError(f"batch_size={self._batch_size}: with split_batches give a multiple of {parts} ranks")
        with self._lock:
            self._deal = replace(self._deal, batch_size=self._batch_size // parts)

    def _state(self, batches: int | None) -> State:
        """Return what was handed out so far, part by part."""
        with self._lock:
            if batches is not None and batches < self._at.batches:
                raise ValueError(
                    "batches: the state of a mixture is that of now. A stock loader draws ahead of the training loop;"
                    " give the trainer a quiver_client.DataLoader"
                )
            if self._reading is None and self._named is not None and self._rank.is_known:
                self._place()
            rank, world_size = self._rank.current
            numbers = {
                **self._facts,
                "version": VERSION,
                "epoch": self._at.epoch,
                "rank": rank,
                "world_size": world_size,
                "batch_size": self._deal.batch_size,
                "drop_last": self._deal.drop_last,
                "batches": self._at.batches,
                "taken": self._at.taken,
                "before": self._at.before,
                "left": self._left(self._at),
            }
            parts = {
                part.name: PartState(weight, deficit, tuple(part.passes.states()))
                for part, weight, deficit in zip(self._parts, self._base, self._handed_out.deficits, strict=True)
            }
            return MixState(numbers, parts, self._guided_state()).plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken. Other weights than its own apply from here on, and are counted anew."""
        loaded = MixState.parsed(state)
        loaded.check(self._facts, list(self.mix.parts))
        with self._lock:
            if self._rank.is_known:
                self._settle_parts()
                self._check_rank(loaded)
            self._current = self._reading = None
            for part in self._parts:
                part.passes.load(loaded.parts[part.name].passes)
                if self._rank.is_known:
                    part.passes.check()
            self._at = Position(loaded["epoch"], loaded["batches"], loaded["taken"], loaded["before"])
            self._named = None
            each = [loaded.parts[part.name] for part in self._parts]
            self._schedule = Schedule.fresh(self._base)
            is_same = tuple(part.weight for part in each) == self._base
            if is_same:
                self._schedule = Schedule(self._base, tuple(part.deficit for part in each))
            self._load_guided(loaded.guided, is_same=is_same)
            self._handed_out = self._schedule

    def check_shares(self) -> None:
        """Every rank has its own share."""

    def close(self) -> None:
        """Stop reporting needs. The next iteration begins again; the state stays."""
        with self._lock:
            if self._current is not None:
                self.abandon(self._current)
        self._role.close()
        for part in self._parts:
            part.consumer.close()

    # -- as a loader uses it ------------------------------------------------------------------------------------------

    def begin(self) -> Any:
        """Begin the next epoch, or the rest of a resumed one."""
        self._compare_end()
        with self._lock:
            if self._current is not None:
                self.abandon(self._current)
            self._put_back()
            self._rank.settle()
            self._settle_parts()
            self._place()
            self._rank.warn_of_replicas(is_fixed=not self.substitute)
            where = blake3.blake3(msgspec.msgpack.encode(self._state(None))).hexdigest(16)
            epoch = MixPass(self._at.epoch, self._left(self._at), where)
            self._current = self._reading = epoch
            for part in self._drawn_parts:
                part.wait.cancel()
                part.consumer.begin(self._name_of(part), self._whose)
                part.passes.is_read = True
                part.passes.is_repeated = part.passes.share <= self._soon_samples(part)
                part.passes.open_next()
        try:
            if self._agreed is not None:
                self._agreed.begin_at(self._rank.current, epoch.number, self._dealt_before())
            self._role.begin(epoch)
        except BaseException:
            self.abandon(epoch)
            raise
        for part in self._drawn_parts if self._role.leads else ():
            part.consumer.start(wait_for_answer=self.substitute)
        return epoch

    def poll(self, epoch: Any) -> bool:
        with self._lock:
            reading = self._reading
            if reading is None or epoch is not reading or not reading.pending:
                return True
            return self._choose_parts(reading) is not None

    def is_current(self, epoch: Any) -> bool:
        return epoch is self._current

    def draw(self, epoch: Any) -> Drawn | None:
        while True:
            with self._lock:
                if epoch is not self._current and epoch.pending:
                    raise RuntimeError(DISPLACED)
                reading = self._reading
                if reading is None or epoch is not reading or not reading.pending:
                    return None
                chosen = self._choose_parts(reading)
                if chosen is not None:
                    return self._take_parts(reading, chosen)
                waiting = self._waiting
            if not self._role.wait(epoch):
                waiting.consumer.wait_for_report(draw_wait.PATIENCE_SECONDS_MIN)

    def asked(self, epoch: Any = None) -> None:
        """A loop waits for a batch. A mixture has one pass at a time: one that begins ends the one before.

        Raises ``RuntimeError`` if this pass was ended so: its samples are pending again, and others will get them.
        """
        with self._lock:
            if epoch is not None and epoch is not self._current and not epoch.finished:
                raise RuntimeError(DISPLACED)
            self._role.asked()
            for part in self._drawn_parts:
                part.consumer.asked()

    def failure(self, error: BaseException, rows: Ints) -> RuntimeError:
        """Return what to raise in place of an exception that the loop would take for the end of the epoch."""
        named = [self.mix.named(row) for row in rows[:NAMED].tolist()]
        return failure("collate_fn, or a part of the mix,", error, named, len(rows))

    def fetched(self, epoch: Any, number: int) -> None:
        with self._lock:
            if number in epoch.in_flight:
                for part, taken in epoch.in_flight[number].taken:
                    part.passes.fetched(taken)

    def consumed(self, epoch: Any, number: int, turn: LoopTurn = NOT_TIMED) -> None:
        """The training loop received a batch."""
        with self._lock:
            self._role.consumed(epoch, number)
            batch = epoch.in_flight.pop(number)
            if not self.is_current(epoch):
                return
            self._take_reports()
            for part, taken in batch.taken:
                part.consume(taken, turn)
            drawn = {part.name for part, _ in batch.taken}
            for other in (part for part in self._parts if part.name not in drawn):
                other.consumer.passed_over(turn)
            self._handed_out, self._has_begun = batch.after, True
            self._steps += 1
            at = self._at
            self._at = replace(at, batches=at.batches + 1, taken=at.taken + len(batch.rows))
            self._is_read_through = epoch.finished

    def end(self, epoch: Any) -> None:
        """The pass has ended: what it drew and the loop did not receive, since it raised, is not read again."""
        with self._lock:
            if self.is_current(epoch):
                for number in sorted(epoch.in_flight):
                    batch = epoch.in_flight.pop(number)
                    for part, taken in batch.taken:
                        part.passes.consume(taken)
                self._stop_reading()
                self._handed_out, self._guided_at = self._schedule, -1
                self._at = Position(self._at.epoch + 1)
                self._current = None
        self._role.leave(epoch, at_end=True)
        self._compare_end()
        self._role.finish(epoch)

    def abandon(self, epoch: Any) -> None:
        """Stop reading the pass. What was drawn ahead is pending again when the next one begins.

        Not yet: a loader also calls this at the end of a pass, before ``end``.
        """
        with self._lock:
            if self.is_current(epoch) and self._reading is not None:
                self._stop_reading()
                if epoch.finished:
                    self._at = Position(self._at.epoch + 1)
                    self._current = None
        self._role.leave(epoch, at_end=False)

    def show_first_fill(self, line: Any) -> None:
        """Show nothing: a mixture fills several caches, at rates of their own."""

    @property
    def speeds(self) -> tuple[LoopSpeed, ...]:
        """How fast the loop reads each part, and could."""
        with self._lock:
            return tuple(part.consumer.speed for part in self._parts)

    @property
    def is_probe_wanted(self) -> bool:
        """Whether the cache of a part asks this rank for a series of probes."""
        return self._ranks[0] == 0 and any(part.consumer.is_probe_wanted for part in self._parts)

    def tell_probed(self, probed: Probed | None) -> None:
        """A series of probes has ended: report its result, divided between the parts as what they read is."""
        with self._lock:
            sizes = [part.consumer.speed.batch_bytes for part in self._parts]
            for part, size in zip(self._parts, sizes, strict=True):
                part.consumer.tell_probed(probed and probed.of_share(size / max(sum(sizes), 1.0)))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.mix.placement().leaves

    # -- where the mixture is -----------------------------------------------------------------------------------------

    @property
    def _is_partial(self) -> bool:
        """Whether something of the epoch was handed out, and it has not been read to its end."""
        return self._at.batches > 0 or self._at.before > 0

    def _place(self) -> None:
        """Go to where the next pass begins."""
        at, named, self._named = self._at, self._named, None
        broken_off = self._current is not None and self._has_begun
        self._current, self._has_begun = None, False
        if named is None:
            if broken_off or (self._is_partial and not self._left(at)):
                self._at = Position(at.epoch + 1)
        elif named == at.epoch and not broken_off:
            pass
        elif named == at.epoch + 1 and self._is_partial:
            self._at = Position(named)
        else:
            self._jump(named)

    def _put_back(self) -> None:
        """Make pending again what was drawn and not handed out, in a pass that was broken off."""
        for part in self._parts:
            part.passes.put_back()
        self._schedule, self._guided_at = self._handed_out, -1

    def _jump(self, epoch: int) -> None:
        counts = placed_after(self._base, epoch * self._whole_epoch)
        for part, count in zip(self._parts, counts, strict=True):
            part.passes.jump(count)
        self._schedule = self._handed_out = Schedule.fresh(self._base)
        self._at = Position(epoch)

    @property
    def _whole_epoch(self) -> int:
        """Samples of a whole epoch of this rank: the same number for every rank."""
        _, world_size = self._rank.current
        deal = self._deal
        if isinstance(self.mix.epoch, int):
            samples = self.mix.epoch // world_size if deal.drop_last else -(-self.mix.epoch // world_size)
        else:
            shares = [replace(each.passes.deal, world_size=world_size, rank=0).share_samples for each in self._parts]
            unit = sum(self._base)
            needed = [samples_for(w, unit, share) for w, share in zip(self._base, shares, strict=True) if w]
            samples = max(needed) if self.mix.epoch == "longest" else min(needed)
        return samples // deal.batch_size * deal.batch_size if deal.drop_last else samples

    def _left(self, at: Position) -> int:
        """Return how many samples of the epoch are left for this rank."""
        _, world_size = self._rank.current
        dealt = -(-max(self._whole_epoch * world_size - at.before, 0) // world_size)
        if self._deal.drop_last:
            dealt -= dealt % self._deal.batch_size
        return max(dealt - at.taken, 0)

    @property
    def _facts(self) -> dict[str, Any]:
        return {
            "dataset": self.mix.identity,
            "samples": len(self.mix),
            "seed": self._deal.seed,
            "mix_seed": self.mix.seed,
            "shuffle": self._deal.shuffle,
        }

    def _part_deal(self, name: str, layout: ShardLayout) -> Deal:
        """Return how a part is dealt: in shares of any length, by an order that depends on its name."""
        text = f"{self._deal.seed}\0{self.mix.seed}\0{name}".encode()
        seed = int.from_bytes(blake3.blake3(text).digest(6), "big")
        _, blocks = shuffle_of(*self._shuffle, layout)
        return replace(self._deal, samples=self.mix.sizes[name], seed=seed, batch_size=1, block_shards=blocks)

    def _settle_parts(self) -> None:
        for part in self._parts:
            part.passes.settle(*self._rank.current)
        for part in self._drawn_parts:
            if not part.passes.share:
                raise ValueError(
                    f"drop_last: part {part.name!r} has fewer samples than there are ranks, so it would never be drawn;"
                    " leave drop_last out"
                )

    def _check_rank(self, loaded: MixState) -> None:
        rank, world_size = self._rank.current
        is_touched = loaded["taken"] or any(each.passes[0].get("own") for each in loaded.parts.values())
        if is_touched and loaded["world_size"] > 1 and (loaded["rank"], loaded["world_size"]) != (rank, world_size):
            raise ValueError(
                f"state: it is that of rank {loaded['rank']} of {loaded['world_size']}, and this is rank {rank} of"
                f" {world_size}; merge the states of all ranks with merge_states first"
            )

    def _dealt_before(self) -> list[Any]:
        """Return what ranks must agree on when a pass begins: after which samples the shares were dealt.

        Guided ranks may be in different passes of a part.
        """
        parts = [] if self._losses is not None else [part.passes.dealt_before() for part in self._parts]
        return [*parts, self._at.before] if self._at.before or any(parts) else []

    def _compare_end(self) -> None:
        with self._lock:
            is_read_through, self._is_read_through = self._is_read_through, False
        if is_read_through and self._agreed is not None:
            self._agreed.finish(self._rank.current)

    # -- a batch ------------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> tuple[int, int]:
        return self._rank.current

    @property
    def _dealt_to(self) -> tuple[int, int]:
        return self._rank.current

    @property
    def _is_reproducible(self) -> bool:
        """Where a pass begins depends on the passes before it, unless it is named."""
        return self._named is not None

    @property
    def _is_users(self) -> bool:
        return False

    @property
    def _drawn_parts(self) -> list[MixedPart]:
        return [part for part, weight in zip(self._parts, self._base, strict=True) if weight]

    def _soon_samples(self, part: MixedPart) -> int:
        """Return about how many samples of a part the next batches have."""
        weight = dict(zip(self._parts, self._base, strict=True))[part]
        return SOON_BATCHES * self._deal.batch_size * weight // sum(self._base)

    def _name_of(self, part: MixedPart) -> bytes:
        text = f"{self._name}\0{part.name}\0{self._rank.current[0]}"
        if self._rank.process is not None:  # others of the job may read this share, each by its own choice
            text += f"\0{self._rank.process}"
        return blake3.blake3(text.encode()).digest(CONSUMER_BYTES)

    def _choose_parts(self, epoch: MixPass) -> list[tuple[MixedPart, Chosen]] | None:
        """Return the entries of the next batch by part, or ``None`` while it is worth waiting for one of them."""
        if not self._role.has_room(epoch):
            return None
        decided = self._role.decision(epoch)
        if self._role.follows and decided is None:
            return None
        self._guide(epoch)
        counts = self._schedule.counts(min(self._deal.batch_size, epoch.pending))
        if decided is not None:
            return self._decided_parts(iter(decided), counts)
        chosen: list[tuple[MixedPart, Chosen]] = []
        is_waiting = False
        for part, count in zip(self._parts, counts, strict=True):
            if not count:
                continue
            found = part.choose(count, substitute=self.substitute, lookahead=self._lookahead)
            if found is None:
                self._waiting, is_waiting = part, True
            else:
                chosen.append((part, found))
        return None if is_waiting else chosen

    def _decided_parts(self, decided: Iterator[bytes], counts: Sequence[int]) -> list[tuple[MixedPart, Chosen]]:
        """Return the entries of the next batch as the leader of this rank decided."""
        found = [(part, part.choose_decided(n, decided)) for part, n in zip(self._parts, counts, strict=True) if n]
        return [(part, chosen) for part, chosen in found if chosen is not None]

    def _take_parts(self, epoch: MixPass, chosen: list[tuple[MixedPart, Chosen]]) -> Drawn:
        self._role.drawn(epoch, chosen)
        taken = [(part, part.draw(found)) for part, found in chosen]
        self.starved_seconds += max((part.waited_seconds for part, _ in taken), default=0.0)
        by_name = {part.name: len(each.rows) for part, each in taken}
        self._schedule = self._schedule.after([by_name.get(part.name, 0) for part in self._parts])
        number = epoch.draw(taken, self._schedule)
        batch = epoch.in_flight[number]
        return Drawn(number, batch.rows, sum(each.substituted for _, each in taken), batch.epochs)

    def _stop_reading(self) -> None:
        self._reading = None
        for part in self._parts:
            part.wait.cancel()
            part.passes.is_read = False

    # -- guided -------------------------------------------------------------------------------------------------------

    def _guide(self, epoch: MixPass) -> None:
        """Set the weights of the block of batches that begins with the next one, if one does."""
        guided = self.mix.guided
        if guided is None or self._losses is None:
            return
        drawn = self._steps + len(epoch.in_flight)
        block = drawn // guided.interval
        if block == self._guided_at or (drawn % guided.interval and self._guided_at >= 0):
            return
        is_first = self._guided_at < 0 and drawn % guided.interval
        self._guided_at = block
        if is_first:  # resumed within a block, whose weights the state has
            return
        base = self.mix.weights
        available = [part.available for part in self._parts]
        weights = guided.weights(base, self._losses.utilities(block), available)
        self._schedule = replace(self._schedule, weights=in_units(weights))
        self.mix.drawn_at(weights)
        log.debug("mix: weights from batch %d on: %s", drawn, np.round(weights, 4).tolist())

    def _take_reports(self) -> None:
        """Note what the loop reported since the batch before: it belongs to the block of that batch."""
        if self._losses is None or self.mix.guided is None:
            return
        block = max(self._steps - 1, 0) // self.mix.guided.interval
        for part, loss in self.mix.take_reports():
            self._losses.add(block, part, loss)

    def _guided_state(self) -> dict[str, Any] | None:
        if self._losses is None:
            return None
        self._take_reports()
        weights = dict(zip(self.mix.parts, self._handed_out.weights, strict=True))
        return {"weights": weights, "steps": self._steps, **self._losses.state()}

    def _load_guided(self, state: Mapping[str, Any] | None, *, is_same: bool) -> None:
        """Take over losses and, if the weights that the user gave are the same, the weights that they led to."""
        self._guided_at = -1
        if self._losses is None or self.mix.guided is None:
            return
        self._losses = Losses(self.mix.parts, self.mix.guided)
        if state is None:
            return
        try:
            weights = [int(state["weights"][name]) for name in self.mix.parts]
            self._steps = int(state["steps"])
            self._losses.load(state)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state: 'guided' cannot be read: {error}; was it made by state_dict()?") from error
        if is_same and sum(weights) == sum(self._base):
            self._schedule = replace(self._schedule, weights=tuple(weights))

    def share(self, epoch: int) -> Ints:
        """Return this rank's samples of the coming epoch ``(n,)`` as they come if all are resident."""
        with self._lock:
            if self._reading is None:
                self._settle_parts()
            passes = [part.passes.copied() for part in self._parts]
            schedule, left = self._handed_out, self._left(self._at)
        batches = [np.zeros(0, np.int64)]
        while left:
            counts = schedule.counts(min(self._deal.batch_size, left))
            schedule = schedule.after(counts)
            taken = [each.draw_plain(count) for each, count in zip(passes, counts, strict=True)]
            batches.append(spread([rows + part.offset for rows, part in zip(taken, self._parts, strict=True)]))
            left -= sum(counts)
        return np.concatenate(batches)

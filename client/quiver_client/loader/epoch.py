"""One pass over an epoch, or over what remains of a resumed one: batches are drawn ahead, and consumed when handed out.

Values only: no thread and no lock; ``BatchSampler`` holds its lock while it calls. In a saved state a batch that was
drawn and not consumed is still pending; one that is consumed never becomes pending again.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple

import blake3
import numpy as np
import numpy.typing as npt

from quiver.errors import BadRequest
from quiver.manifest import Manifest
from quiver.shuffles import block_permutation
from quiver.substitution import (
    DRAINED_AT_ONCE,
    DRAINED_WHERE_ALIKE,
    Ints,
    Mask,
    Order,
    View,
    dealt,
    permutation,
)
from quiver_client.loader.ledger.amendments import Amendment
from quiver_client.placement import NOWHERE, Placement

DECISION: Final = np.dtype("<i8")  # an entry of a batch, as it is sent to another process
RECENT_BATCHES: Final = 256  # more than a stock loader's workers draw ahead


@dataclass(frozen=True, slots=True)
class Deal:
    """The settings that determine the ranks' shares of an epoch. All but ``rank`` are the same in every rank."""

    samples: int
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    block_shards: int = 0  # of a block shuffle, which ``shuffle`` includes; 0: all samples are mixed

    def order(self, epoch: int, done: Mask, shard_of: Ints | None = None) -> Ints:
        """Return the samples of an epoch to deal: its permutation without those already ``done`` ``(samples,)``.

        ``shard_of`` ``(samples,)``: the shard of each sample, on which a block shuffle depends.
        """
        if self.block_shards:
            if shard_of is None:
                raise TypeError("the order of a block shuffle depends on the shards of the dataset")
            order = block_permutation(shard_of, self.seed, epoch, self.block_shards)
        else:
            order = permutation(self.samples, self.seed, epoch, shuffle=self.shuffle)
        return order[~done[order]] if done.any() else order

    def share(self, order: Ints) -> tuple[Ints, Ints]:
        """Return this rank's share of ``order``, and the samples that no rank gets."""
        return dealt(order, self.rank, self.world_size, self.batch_size, drop_last=self.drop_last)

    @property
    def share_samples(self) -> int:
        """Samples of a rank's share of a whole epoch: the same number for every rank."""
        if self.drop_last:
            return self.batches * self.batch_size
        return ceil(self.samples / self.world_size)

    @property
    def batches(self) -> int:
        """Batches of a whole epoch: the same number for every rank."""
        if self.drop_last:
            return self.samples // self.world_size // self.batch_size
        return ceil(ceil(self.samples / self.world_size) / self.batch_size)


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """Which shard each sample lies in ``(samples,)``; by shard ``(shards,)`` how many samples, and their mean bytes.

    The shards are those of all manifests that the dataset reads, one manifest after another. ``counts`` are of whole
    shards, also where a selection has few of their samples: needs are reported as shares of a shard. A sample of a join
    lies in several shards: ``shard_of`` is where most of its bytes are, ``beside`` the others, ``NOWHERE`` for none.
    """

    shard_of: Ints
    counts: Ints
    sample_bytes: npt.NDArray[np.float64]
    shard_bytes: float  # of a shard, on average
    drained_at_once: int = DRAINED_AT_ONCE
    beside: tuple[Ints, ...] = ()

    @property
    def is_alike(self) -> bool:
        """Whether the samples of a shard may be alike, since they stood together in the origin."""
        return self.drained_at_once > DRAINED_AT_ONCE

    @classmethod
    def of(cls, placement: Placement) -> ShardLayout:
        manifests = [leaf.manifest for leaf in placement.leaves]
        inside = [shards_of(manifest) for manifest in manifests]
        counts = np.concatenate(
            [np.bincount(own, minlength=each.shard_count) for own, each in zip(inside, manifests, strict=True)]
        )
        firsts = np.cumsum([0, *(manifest.shard_count for manifest in manifests)])
        shard_of = np.concatenate([own + first for own, first in zip(inside, firsts.tolist(), strict=False)])
        sizes = np.concatenate([manifest.tables.shard_sizes.astype(np.float64) for manifest in manifests])
        sample_bytes = np.divide(sizes, counts, where=counts > 0, out=np.zeros(len(sizes)))
        # The samples of a shard are alike where they lie in the origin's order, and where other leaves have others.
        alike = len(manifests) > 1 or manifests[0].header.layout == "sequential"
        beside = tuple(np.where(rows == NOWHERE, NOWHERE, shard_of[rows]) for rows in placement.beside)
        drained = DRAINED_WHERE_ALIKE if alike else DRAINED_AT_ONCE
        return cls(shard_of[placement.rows], counts, sample_bytes, float(sizes.mean()), drained, beside)

    def bytes(self, rows: Ints) -> float:
        """Return about how many bytes these samples have."""
        besides = (beside[rows] for beside in self.beside)
        further = sum(float(self.sample_bytes[shards[shards != NOWHERE]].sum()) for shards in besides)
        return float(self.sample_bytes[self.shard_of[rows]].sum()) + further

    def beside_of(self, rows: Ints) -> Ints:
        """Return how many of these samples lie beside in each shard ``(shards,)``."""
        shards = np.concatenate([np.zeros(0, np.int64), *(beside[rows] for beside in self.beside)])
        return np.bincount(shards[shards != NOWHERE], minlength=len(self.counts))


def shards_of(manifest: Manifest) -> Ints:
    """Return the shard of each sample of a manifest ``(samples,)``."""
    tables = manifest.tables
    shards: Ints = np.searchsorted(tables.firsts.astype(np.int64), tables.blob_of, "right") - 1
    return shards


class Drawn(NamedTuple):
    """A drawn batch: its number in this pass, its samples, and how many of them were drawn early.

    ``epochs`` ``(n,)``: the epoch that each sample is of, where they are of different ones.
    """

    number: int
    rows: Ints
    substituted: int
    epochs: Ints | None = None


class Replayed(NamedTuple):
    """An epoch as a ledger has it: samples in order, and, if bad ones were left out, the batches as they were."""

    rows: Ints
    sizes: list[int] | None = None  # of the batches
    repeated: tuple[Ints, ...] = ()  # by batch: samples that were handed out once more at its end
    lost: Ints = np.zeros(0, np.int64)  # samples that were bad


class Epoch:
    """Which entries of one rank's share of one epoch are pending, drawn and consumed."""

    is_known = True
    """Whether all its samples are known when it begins."""

    has_all = False
    """Whether it is of a user's sampler that gave each sample of the dataset once."""

    def __init__(
        self,
        epoch: int,
        share: Ints,
        layout: ShardLayout,
        *,
        own: Mask | None = None,
        batches: int = 0,
        replayed: Replayed | None = None,
    ) -> None:
        """``own`` ``(share,)``: the entries that this rank consumed before, in ``batches`` batches.

        ``replayed``: samples in the order in which to draw them, in place of the share's own order.
        """
        self.number = epoch
        self.share = share
        self.consumed = np.zeros(len(share), bool) if own is None else own.copy()
        self.batches = batches
        self.handed_out = 0  # batches of this pass
        self.has_skipped = False  # a later batch was consumed first: this one raised, or came out of order
        self._entries = np.flatnonzero(~self.consumed)
        self._replayed: list[tuple[int, Ints]] = []  # batches to come: samples to draw, and those to repeat
        self._repeating = 0  # samples of those batches of them that only repeat others
        self._keeps_size = False
        self._holds_last = False
        self._asked = 0  # how often the loop asked for a batch of this pass
        self.owed = 0  # samples to be repeated at the end, since as many bad ones were replaced by pending ones
        self._filled: dict[int, int] = {}  # of batches that were not consumed, how many samples of them are repeated
        self._bad: set[int] = set()  # rows
        self.amendments: dict[int, Amendment] = {}  # of batches in which samples were bad, until they are consumed
        if replayed is not None:
            known, sizes = _entries_of(share, self._entries, replayed.rows, replayed.sizes)
            if replayed.sizes is not None:
                each_batch = zip(sizes, replayed.sizes, replayed.repeated, strict=True)
                self._replayed = [
                    (size, repeated)
                    for at, (size, recorded, repeated) in enumerate(each_batch)
                    if size or (not recorded and len(repeated) and at >= batches)
                ]
                self._repeating = sum(len(repeated) for size, repeated in self._replayed if not size)
            is_lost = np.isin(share, replayed.lost)
            self.consumed |= is_lost
            left = np.isin(self._entries, known, invert=True) & ~is_lost[self._entries]
            self._entries = np.concatenate([known, self._entries[left]])  # entries that the ledger lacks come last
        self._rows = share[self._entries]
        self._shard_count = len(layout.counts)
        self.order = Order(layout.shard_of[self._rows], self._shard_count, layout.drained_at_once)
        self.drawn = 0
        self._in_flight: dict[int, Ints] = {}
        self._unread = np.zeros(self._shard_count, np.int64)  # drawn, and not in memory yet
        self._layout = layout
        self._beside = layout.beside_of(self._rows) if layout.beside else None  # not in memory yet
        self._fetching: dict[int, Ints] = {}
        self._recent: deque[tuple[int, Ints]] = deque(maxlen=RECENT_BATCHES)  # the last that were consumed

    @property
    def pending(self) -> int:
        """Entries not drawn yet, and samples to be repeated in place of bad ones."""
        return len(self.order) + self.owed + self._repeating

    @property
    def finished(self) -> bool:
        return not self.pending and not self._in_flight

    def last_batch(self, batch_size: int) -> int:
        """Return how many samples the last batch of this pass has."""
        return len(self._entries) % batch_size or min(batch_size, len(self._entries))

    @property
    def left(self) -> Ints:
        """Entries by shard whose bytes have yet to be read ``(shards,)``."""
        left = self.order.left + self._unread
        return left if self._beside is None else left + self._beside

    def prepare(self, count: int) -> None:
        """Find the next ``count`` samples, if that may take time. Called without the sampler's lock."""

    @property
    def read(self) -> int:
        """Entries whose bytes are in memory, or were consumed in this pass."""
        return max(len(self.order.shards) - len(self.order) - int(self._unread.sum()), 0)

    def soon(self, samples: int) -> list[int]:
        """Return the shards of the next ``samples`` entries of the permutation, in the order of their first use."""
        shards = self.order.shards[self.order.plain(samples)]
        distinct, first = np.unique(shards, return_index=True)
        soon: list[int] = distinct[np.argsort(first)].tolist()
        return soon

    def choose(self, count: int, view: View | None, lookahead: int | None) -> Ints | None:
        """Return the entries of the next batch, ``None`` if it has to wait. Without a ``view``: the permutation's."""
        if self._replayed:
            return self.order.plain(self._replayed[0][0])
        if view is None:
            return self.order.plain(min(count, len(self.order)))
        return self.order.substituted(count, view, lookahead)

    def completed(self, count: int, view: View, lookahead: int | None) -> Ints:
        """Return the entries of a batch that waits no longer, none from beyond the ``lookahead``."""
        if lookahead is None:
            return self.order.completed(count, view)
        count = min(count, len(self.order))
        window = self.order.plain(max(lookahead, count))
        absent = ~view.resident[self.order.shards[window]]
        return np.sort(window[np.argsort(absent, kind="stable")[:count]])

    def draw(self, entries: Ints) -> Drawn:
        """Draw a batch: its entries are no longer pending."""
        plain = self.order.plain(len(entries))
        # All that is pending up to the last of ``plain`` is in it.
        early = int(np.count_nonzero(entries > plain[-1])) if len(entries) else 0
        shards = self.order.shards[entries]
        self.order.take(entries)
        number, self.drawn = self.drawn, self.drawn + 1
        self._in_flight[number] = entries
        self._fetching[number] = shards
        self._unread += np.bincount(shards, minlength=self._shard_count)
        repeated = self._replayed.pop(0)[1] if self._replayed else None
        if repeated is not None and not len(entries):
            self._repeating -= len(repeated)
        rows = self._rows[entries]
        return Drawn(number, rows if repeated is None else np.concatenate([rows, repeated]), early)

    # -- bad samples --------------------------------------------------------------------------------------------------

    def keep_size(self, owed: int) -> None:
        """Keep number and size of the batches, by repeating good samples where no other can replace a bad one."""
        self._keeps_size, self.owed = True, owed

    def hold_last(self) -> None:
        """Draw the last batch only when the loop asks for it: until then its samples can replace bad ones."""
        self._holds_last = True

    def asked(self) -> None:
        """The loop waits for its next batch."""
        self._asked += 1

    def is_held(self, batch_size: int) -> bool:
        """Whether the next batch is the last one, and the loop does not ask for it yet."""
        return self._holds_last and len(self.order) <= batch_size and self._asked <= self.drawn

    def add_pending(self, number: int, count: int) -> tuple[Ints, list[int]]:
        """Add up to ``count`` pending entries to a batch that was drawn; return their samples and shards."""
        taken = [self.order.take_last() for _ in range(min(count, len(self.order)))]
        entries = np.array([entry for entry, _ in taken], np.int64)
        self._in_flight[number] = np.concatenate([self._in_flight[number], entries])
        if self._keeps_size:
            self.owed += len(taken)
        return self._rows[entries], [shard for _, shard in taken]

    def repeats(self, number: int, count: int, seed: int) -> Ints:
        """Return up to ``count`` samples to repeat: of those that were handed out, else of this share.

        None if batches may get fewer.
        """
        if not self._keeps_size or not count:
            return self._rows[:0]
        chance = np.random.default_rng([seed, self.number, number, len(self._bad)])
        bad = np.fromiter(self._bad, np.int64, len(self._bad))
        for pool in (self.share[self.consumed], self.share):
            good = pool[~np.isin(pool, bad)]
            if len(good):
                return good[chance.integers(len(good), size=count)]
        return self._rows[:0]

    def fill(self, drawn: Drawn, batch_size: int, seed: int) -> Ints:
        """Return what to repeat in a batch that is smaller than others since bad samples were replaced."""
        count = min(self.owed, batch_size - len(drawn.rows))
        self.owed -= count
        self._filled[drawn.number] = count
        return self.repeats(drawn.number, count, seed)

    @property
    def owed_to_resume(self) -> int:
        """``owed`` for a state, in which batches that were drawn and not consumed are still pending."""
        return self.owed + sum(self._filled.values())

    def mark_bad(self, rows: Ints) -> None:
        """Never repeat these samples in this pass."""
        self._bad.update(rows.tolist())

    @property
    def identity(self) -> str:
        """A digest of the samples that were pending when the pass began, in their order."""
        return blake3.blake3(self._rows.view(np.uint8).data).hexdigest(16)

    def encode_decision(self, entries: Ints) -> bytes:
        """Return a batch's entries for another process that reads the same pass."""
        return entries.astype(DECISION).tobytes()

    def decode_decision(self, decision: bytes, count_max: int) -> Ints:
        """Return the entries of a batch that another process decided. Raises ``BadRequest`` if it cannot be drawn."""
        if not decision or len(decision) % DECISION.itemsize or len(decision) > count_max * DECISION.itemsize:
            raise BadRequest(f"{len(decision)} bytes are no batch of at most {count_max} samples")
        entries = np.frombuffer(decision, DECISION).astype(np.int64)
        if not self.order.are_pending(entries):
            raise BadRequest("it has entries that are not pending here")
        return entries

    def rows(self, number: int) -> Ints:
        """Return the samples of a batch that was drawn and not consumed."""
        return self._rows[self._in_flight[number]]

    def fetched(self, number: int) -> None:
        """Record that a batch is in memory: it does not need its shards any more."""
        shards = self._fetching.pop(number, None)
        if shards is not None:
            self._unread -= np.bincount(shards, minlength=self._shard_count)
            if self._beside is not None:
                self._beside -= self._layout.beside_of(self.rows(number))

    def consume(self, number: int) -> Ints:
        """Mark a batch as consumed; return its samples."""
        self.fetched(number)
        self.has_skipped |= any(earlier < number for earlier in self._in_flight)
        entries = self._in_flight.pop(number)
        self._filled.pop(number, None)
        self.consumed[self._entries[entries]] = True
        self.batches += 1
        self._recent.append((number, entries))
        self.handed_out += 1
        return self._rows[entries]

    def as_of(self, batches: int) -> Epoch:
        """Return a copy as it was when only so many batches were consumed, to be saved and not to be read.

        Raises ``ValueError`` if that is more than ``RECENT_BATCHES`` batches ago.
        """
        undone = self._since(batches)
        earlier = copy.copy(self)
        earlier.batches, earlier.consumed = batches, self.consumed.copy()
        earlier._in_flight = self._in_flight | dict(undone)
        for _, entries in undone:
            earlier.consumed[self._entries[entries]] = False
        return earlier

    def rows_since(self, batches: int) -> Ints:
        """Return the samples that were consumed after so many batches."""
        return np.concatenate([self._rows[:0], *(self._rows[entries] for _, entries in self._since(batches))])

    def _since(self, batches: int) -> list[tuple[int, Ints]]:
        back = self.batches - batches
        if back > len(self._recent):
            raise ValueError(f"batches: the state can be that of {len(self._recent)} batches ago, not of {back}")
        return list(self._recent)[len(self._recent) - back :]


def _entries_of(share: Ints, pending: Ints, rows: Ints, sizes: list[int] | None = None) -> tuple[Ints, list[int]]:
    """Return the pending entries of a share in the order of ``rows``, without samples that are not pending.

    Where the share has a sample twice, as padding, its first occurrence in ``rows`` is the first of its entries.
    ``sizes``: of the batches that ``rows`` are; returned without the samples that are not pending.
    """
    by_row = pending[np.argsort(share[pending], kind="stable")]
    sorted_rows = share[by_row]
    nth = np.zeros(len(rows), np.int64)  # of this sample in ``rows``
    order = np.argsort(rows, kind="stable")
    starts = np.flatnonzero(np.r_[True, rows[order][1:] != rows[order][:-1]]) if len(rows) else np.zeros(0, np.int64)
    lengths = np.diff(np.append(starts, len(rows)))
    nth[order] = np.arange(len(rows)) - np.repeat(starts, lengths)
    at = np.searchsorted(sorted_rows, rows) + nth
    found = at < len(sorted_rows)
    found[found] = sorted_rows[at[found]] == rows[found]
    entries: Ints = by_row[at[found]]
    if sizes is None:
        return entries, []
    counts = np.concatenate([[0], np.cumsum(found)])
    return entries, np.diff(counts[np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)]).tolist()

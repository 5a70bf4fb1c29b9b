"""One part of a mixture in one rank: its passes one after another, of which every batch takes some samples.

A part's passes have nothing to do with the mixture's epochs. When a pass is drawn to its end the next one begins, in
the middle of a batch if need be; so several passes can be *open*: the oldest has samples in batches that are drawn and
not consumed, while the newest is drawn from. Values only: no thread and no lock; the sampler holds its own while it
calls.

Invariant: each pass gives every sample of this rank's share once. Samples that were drawn ahead and not consumed are
pending again once the loop stops reading (``put_back``), and in a saved state at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import blake3
import numpy as np

from quiver.substitution import Ints, Mask, View
from quiver_client.loader.epoch import Deal, Epoch, ShardLayout
from quiver_client.loader.state import State, fitted, has_positions, located, make_state, unpack

Chosen = list[tuple[Epoch, Ints]]  # entries of one or, where a pass ends within the batch, of several passes
Choose = Callable[[Epoch, int], Ints | None]


class Taken(NamedTuple):
    """The samples of a part in a drawn batch, by pass: the pass, and the batch's number in it."""

    batches: tuple[tuple[Epoch, int], ...]
    rows: Ints  # (n,): of the part
    epochs: Ints  # (n,): the number of the pass that each is of
    substituted: int


class PartPasses:
    """The passes of one part. ``identity``: of its samples, in hexadecimal; states are of it."""

    def __init__(self, name: str, identity: str, layout: ShardLayout, deal: Deal) -> None:
        self.name = name
        self.layout = layout
        self.is_read = False  # a loop reads: needs are reported
        self._identity = identity
        self._deal = deal
        self._open: list[tuple[Epoch, Mask]] = []  # oldest first, each with what was done before its shares were dealt
        self._resumes: list[State] = []  # states of passes to open before others
        self._next = 0  # the pass that comes after those
        self.is_repeated = False  # each shard is needed again soon after it was drained
        self._resident: Callable[[], Mask | None] = lambda: None
        self._has_samples = np.bincount(layout.shard_of, minlength=len(layout.counts)) > 0

    def __repr__(self) -> str:
        passes = ", ".join(f"pass {epoch.number}: {epoch.pending} pending" for epoch, _ in self._open)
        return f"PartPasses({self.name}: {passes or f'pass {self._next} comes next'})"

    # -- needs, as the consumer reads them ----------------------------------------------------------------------------

    @property
    def reading(self) -> PartPasses | None:
        return self if self.is_read else None

    @property
    def left(self) -> Ints:
        """Entries by shard whose bytes have yet to be read ``(shards,)``.

        A part that is repeated every few batches reads a shard again soon after it was drained. Once all that it needs
        is resident, a drained shard counts as one entry, so that it is not the first to be evicted. Not earlier: what
        is drained has to make room for what is missing where not all of the part fits.
        """
        total = np.zeros(len(self.layout.counts), np.int64)
        for epoch, _ in self._open:
            total += epoch.left
        resident = self._resident() if self.is_repeated else None
        if resident is not None and not (total[~resident] > 0).any():
            total[resident & (total == 0) & self._has_samples] = 1
        return total

    def keep(self, resident: Callable[[], Mask | None]) -> None:
        """Ask ``resident`` which shards are resident when needs are reported."""
        self._resident = resident

    def soon(self, samples: int) -> list[int]:
        """Return the shards of the next ``samples`` entries, in the order of their first use."""
        found: dict[int, None] = {}
        for epoch, _ in self._open:
            count = min(samples, epoch.pending)
            found.update(dict.fromkeys(epoch.soon(count) if count else ()))
            samples -= count
        return list(found)

    # -- a batch ------------------------------------------------------------------------------------------------------

    @property
    def deal(self) -> Deal:
        return self._deal

    @property
    def share(self) -> int:
        """Samples of this rank in one pass."""
        return self._deal.share_samples

    @property
    def pending(self) -> int:
        """Samples of the open passes that are not drawn yet."""
        return sum(epoch.pending for epoch, _ in self._open)

    def usable(self, view: View) -> int:
        """Return how many of those are resident."""
        return sum(int(epoch.order.left[view.resident].sum()) for epoch, _ in self._open)

    def dealt_before(self) -> str:
        """Return a digest of what was read of the passes before their shares were dealt; "" for nothing."""
        done = [np.packbits(done).tobytes() for _, done in self._open if done.any()]
        return blake3.blake3(b"".join(done)).hexdigest(16) if done else ""

    def settle(self, rank: int, world_size: int) -> None:
        """Deal to this rank of this many. Called before the first pass is opened."""
        self._deal = replace(self._deal, rank=rank, world_size=world_size)

    def open_next(self) -> None:
        """Open the pass that comes next unless one has pending samples: from then on its needs are reported."""
        if not any(epoch.pending for epoch, _ in self._open):
            self._pending_pass(len(self._open))

    def choose(self, count: int, choose: Choose) -> Chosen | None:
        """Return ``count`` entries, from the oldest pass on; ``None`` if ``choose`` says of one to wait."""
        chosen: Chosen = []
        at = 0
        while count:
            epoch = self._pending_pass(at)
            wanted = min(count, epoch.pending)
            if wanted:
                entries = choose(epoch, wanted)
                if entries is None:
                    return None
                chosen.append((epoch, entries))
                count -= len(entries)
            at += 1
        return chosen

    def draw(self, chosen: Chosen) -> Taken:
        """Draw what ``choose`` returned: it is no longer pending."""
        drawn = [(epoch, epoch.draw(entries)) for epoch, entries in chosen]
        self.open_next()
        rows = [each.rows for _, each in drawn]
        passes = [np.full(len(each.rows), epoch.number, np.int64) for epoch, each in drawn]
        return Taken(
            tuple((epoch, each.number) for epoch, each in drawn),
            np.concatenate(rows),
            np.concatenate(passes),
            sum(each.substituted for _, each in drawn),
        )

    def fetched(self, taken: Taken) -> None:
        """Record that samples are in memory: they do not need their shards any more."""
        for epoch, number in taken.batches:
            epoch.fetched(number)

    def consume(self, taken: Taken) -> int:
        """Mark samples as consumed; return how many passes that completed."""
        for epoch, number in taken.batches:
            epoch.consume(number)
        before = len(self._open)
        self._open = [(epoch, done) for epoch, done in self._open if not epoch.finished]
        return before - len(self._open)

    def put_back(self) -> None:
        """Make pending again what was drawn and not consumed."""
        touched = self._touched()
        if len(touched) < len(self._open):
            self._next = self._open[len(touched)][0].number
        self._open = [
            (Epoch(epoch.number, epoch.share, self.layout, own=epoch.consumed), done) for epoch, done in touched
        ]

    def jump(self, samples: int) -> None:
        """Go to where a run that drew ``samples`` samples in the order of the permutations would be."""
        number, offset = divmod(samples, self.share)
        self._open, self._resumes, self._next = [], [], number
        if offset:
            own = np.arange(self.share) < offset
            self._open = [self._opened(number, np.zeros(self._deal.samples, bool), own)]
            self._next = number + 1

    def copied(self) -> PartPasses:
        """Return passes that begin where what was consumed of these ends."""
        copy = PartPasses(self.name, self._identity, self.layout, self._deal)
        copy.load(self.states())
        return copy

    def draw_plain(self, count: int) -> Ints:
        """Draw samples as if all were resident."""
        chosen = self.choose(count, lambda epoch, wanted: epoch.choose(wanted, None, None)) if count else []
        return self.draw(chosen).rows if chosen else np.zeros(0, np.int64)

    # -- the state ----------------------------------------------------------------------------------------------------

    def states(self) -> list[State]:
        """Return the states of the passes that are not consumed, oldest first; at least one."""
        states = [self._state(epoch.number, done, epoch) for epoch, done in self._touched()] + self._resumes
        if states:
            return states
        number = self._open[0][0].number if self._open else self._next
        return [self._state(number, np.zeros(0, bool), None)]

    def load(self, states: Sequence[State]) -> None:
        """Resume from states that ``states`` or a merge of them returned, of this part."""
        self._open, self._resumes = [], list(states)
        self._next = self._resumes[-1]["epoch"] + 1

    def check(self) -> None:
        """Raise ``ValueError`` if loaded states do not fit this rank."""
        self._resumes = [self._fitted(state) for state in self._resumes]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _touched(self) -> list[tuple[Epoch, Mask]]:
        """Return the open passes up to the last one of which something is consumed."""
        if self._resumes:
            return self._open
        last = [at for at, (epoch, done) in enumerate(self._open) if epoch.consumed.any() or done.any()]
        return self._open[: last[-1] + 1] if last else []

    def _pending_pass(self, at: int) -> Epoch:
        """Return the open pass at this place, opening passes up to it."""
        while at >= len(self._open):
            resume = self._fitted(self._resumes.pop(0)) if self._resumes else None
            if resume is None:
                self._open.append(self._opened(self._next, np.zeros(self._deal.samples, bool), None))
                self._next += 1
            else:
                done = unpack(resume["done"], self._deal.samples)
                self._open.append(self._opened(resume["epoch"], done, resume["own"]))
        return self._open[at][0]

    def _opened(self, number: int, done: Mask, own: bytes | Mask | None) -> tuple[Epoch, Mask]:
        share, _ = self._deal.share(self._deal.order(number, done, self.layout.shard_of))
        mask = own if isinstance(own, np.ndarray) else unpack(own, len(share))
        return Epoch(number, share, self.layout, own=mask), done

    def _fitted(self, state: State) -> State:
        try:
            state = fitted(state, self._identity, self._deal)
        except ValueError as error:
            raise ValueError(f"part {self.name!r}: {error}") from None
        if not has_positions(state):
            return state
        done = unpack(state["done"], self._deal.samples)
        return located(state, self._deal.order(state["epoch"], done, self.layout.shard_of))

    def _state(self, number: int, done: Mask, epoch: Epoch | None) -> State:
        own: Any = np.zeros(0, bool)
        if epoch is not None and self._deal.world_size == 1:  # its state is ``merge_states`` of itself
            done = done.copy()
            done[epoch.share[epoch.consumed]] = True
        elif epoch is not None:
            own = epoch.consumed
        return make_state(self._identity, self._deal, number, 0, done, own)

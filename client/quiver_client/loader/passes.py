"""A loader's passes: which epoch comes next, which one is read, what of it is consumed, and the state of all that.

A pass reads one epoch, or what a resumed run left of it. Values only: no thread, no lock, no file; ``BatchSampler``
holds its lock while it calls. What is saved depends on what was consumed, never on what was drawn ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

import numpy as np

from quiver.substitution import Ints, Mask
from quiver_client.loader.epoch import Deal, Epoch, ShardLayout
from quiver_client.loader.lazy_sampler import LazyEpoch
from quiver_client.loader.ledger.recording import Replay
from quiver_client.loader.rank import SettledRank
from quiver_client.loader.state import (
    State,
    belonging,
    counted,
    counting,
    fitted,
    has_positions,
    is_untouched,
    located,
    make_state,
    of_sampler,
    rest_of,
    unpack,
)
from quiver_client.loader.user_sampler import UserSampler

log = logging.getLogger("quiver_client")

_OF_A_PASS: Final = (
    *("current", "reading", "done", "resumed_from"),
    *("_before", "_length", "_has_begun", "_consumed", "_left_out"),
)


@dataclass(frozen=True, slots=True)
class OpenPass:
    """What there is to know of a pass that was begun, to go on with it after another pass.

    ``is_left``: when it was put aside, the user had named another epoch to read next, so no loop goes on with it.
    """

    epoch: Epoch
    values: Mapping[str, Any]
    is_left: bool


@dataclass(frozen=True, slots=True)
class _Was:
    """What is saved of a pass."""

    epoch: Epoch
    before: int  # batches of its epoch that were handed out before the shares were dealt
    done: Mask  # (samples,): consumed before the shares were dealt
    consumed: Mask  # (samples,): and since


class Passes:
    """The passes of one loader in one rank. ``user``: the sampler that gives the order, in place of a seed."""

    def __init__(
        self, dataset: str, layout: ShardLayout, deal: Deal, rank: SettledRank, user: UserSampler | None
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.user = user
        self.current: Epoch | None = None  # the last pass that began; its state is saved
        self.reading: Epoch | None = None  # the pass that a loop reads: its needs are reported
        self.is_resumed = False  # from the state of another run, whose ledger is continued
        self.done: Mask = np.zeros(0, bool)  # (samples,): consumed before the shares of this pass were dealt
        self.resumed_from: State | None = None  # the state that this pass resumed from
        self.dataset = dataset  # its identity
        self._deal = deal
        self._deal = self.deal
        self._batch_size = deal.batch_size  # as it was given
        self._next_epoch = 0
        self._is_named = False  # the user has set which epoch comes next
        self._resume: State | None = None  # the state that the next pass resumes from
        self._before = 0  # batches of its epoch that were handed out before the shares were dealt
        self._length: int | None = None  # batches of the whole epoch, where the pass was resumed
        self._has_begun = False  # a batch of this pass was handed out
        self._consumed: Mask = self.done  # (samples,): ``done``, and what was consumed since
        self._left_out: Ints = np.zeros(0, np.int64)  # by drop_last
        self._ended: _Was | None = None  # the pass before, of which a stock loader may still hold batches

    # -- what comes next ----------------------------------------------------------------------------------------------

    @property
    def deal(self) -> Deal:
        """The settings that determine the shares; before the first pass, as if that began now."""
        if self.user is not None:  # the user's sampler has dealt the shares
            return self._deal
        rank, world_size = self.rank.current
        if (rank, world_size) == (self._deal.rank, self._deal.world_size):
            return self._deal
        return replace(self._deal, rank=rank, world_size=world_size)

    @property
    def keeps_size(self) -> bool:
        """Whether batches keep their number and size, by repeating samples in place of bad ones: other ranks have as
        many, or ``drop_last`` promises whole ones."""
        return self._deal.world_size > 1 or self._deal.drop_last

    def settle(self) -> bool:
        """Settle the rank as this process has it now; return whether that changed the deal."""
        self.rank.settle()
        before, self._deal = self._deal, self.deal
        return self._deal != before

    def split(self, parts: int) -> bool:
        """Deal batches of the given size divided by ``parts``; return whether that changed the deal."""
        if self._batch_size % parts:
            raise ValueError(
                f"batch_size={self._batch_size}: with split_batches it must be a multiple of {parts} ranks"
            )
        before, self._deal = self._deal, replace(self._deal, batch_size=self._batch_size // parts)
        return self._deal != before

    @property
    def dealt_to(self) -> tuple[int, int]:
        """Rank and world size of the share that this order is: one of one if each rank reads all of a sampler."""
        return (0, 1) if self.user is not None and not self.user.is_share else self.rank.current

    @property
    def epoch(self) -> int:
        """The number of the epoch that is being read, or else of the next one."""
        return self.current.number if self.current is not None else self._next_epoch

    @property
    def handed_out(self) -> int:
        """Batches of the next pass's epoch that a loaded state counts; 0 where that pass begins an epoch."""
        resume = self._resume
        if self.current is not None:
            is_named = self._is_named and self._next_epoch != self.current.number
            resume = None if self._has_begun or is_named else self.resumed_from
        return counted(resume) if resume is not None and self._batches_left(self._fitted(resume)) else 0

    @property
    def kept_of_last(self) -> int | None:
        """How many samples precede the first repeated one in the last batches of all ranks; 0 if none is repeated.

        ``None`` if the repeated ones are not the last of all. For an order that was not changed by substitution.
        """
        deal, epoch = self.deal, self.current
        repeated = -(deal.samples - int(self.done.sum())) % deal.world_size
        if deal.drop_last or self.user is not None or not repeated:
            return 0
        last = epoch.last_batch(deal.batch_size) if epoch is not None else None
        if last is None or (repeated > 1 and last > 1):
            return None  # each of the last ranks has one at the end of its batch
        return last * deal.world_size - repeated

    @property
    def is_reproducible(self) -> bool:
        """Whether another process would read the next pass in the same order."""
        if self.user is not None:
            is_named = hasattr(self.user.sampler, "set_epoch") and (self._is_named or self.user.named is not None)
            return is_named or self.user.is_fixed
        return self._is_named or not self._deal.shuffle

    @property
    def batches(self) -> int:
        """Batches of a whole epoch; of a resumed one, no fewer than were handed out and are left.

        Never fewer than a whole epoch: a trainer that asks once, as Lightning does, uses the number for all epochs.
        """
        whole = self.deal.batches if self.user is None else self.user.batches(self._deal)
        return max(whole, self._resumed_batches or 0)

    @property
    def _resumed_batches(self) -> int | None:
        if self.current is not None and (self.reading is not None or not self._has_begun):
            return self._length
        if self._resume is None:
            return None
        try:
            resume = self._fitted(self._resume)
        except ValueError:
            return None  # the next pass will raise the error
        left = self._batches_left(resume)
        return counted(resume) + left if left or self._is_named else None

    def _batches_left(self, resume: State) -> int:
        """Return how many batches a state has left for this rank."""
        samples, rest = self._deal.samples, rest_of(resume)
        deal = self.deal
        if "given" in resume and self.user is not None:
            given: int = resume["given"]
            # Of a sampler without a length it is only known that something is left.
            return max(self.user.batches(deal) - given // deal.batch_size, 0) if self.user.has_length else 1
        left = len(rest) if rest is not None else samples - int(unpack(resume["done"], samples).sum())
        share = replace(deal, samples=left).share_samples
        own = int(unpack(resume["own"], share).sum()) if resume["own"] else 0
        return ceil((share - own) / deal.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass read this epoch: all of it, or what a loaded state left of it."""
        self._next_epoch, self._is_named = epoch, True
        if self.current is not None and self.reading is None:
            if not self._has_begun and self.current.number == epoch:
                self._resume = self.resumed_from
            self.drop()  # a pass that was broken off is not continued
        if self._resume is not None and self._resume["epoch"] != epoch:
            if not is_untouched(self._resume):
                log.warning("set_epoch(%d): the loaded state, of epoch %d, is dropped", epoch, self._resume["epoch"])
            self._resume = None

    def count_on(self) -> None:
        """Read the epoch that follows, or that a state says, next, whatever epoch the user's sampler was set to."""
        if self.user is not None and not self._is_named:
            self.user.leave_at(self._next_epoch)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin(self, replay: Replay | None) -> Epoch:
        """Begin the next epoch, or what a resumed run left of one, in the order of a ``replay`` if there is one."""
        named = self.user.named if self.user is not None and not self._is_named else None
        if named is not None:  # the user set the sampler's epoch instead of the loader's
            self.set_epoch(named)
        untouched = self.current if not self._has_begun else None
        if untouched is not None and (not self._is_named or self._next_epoch == untouched.number):
            self._next_epoch, self._resume = untouched.number, self.resumed_from  # nothing of it was handed out
        resume = self._fitted(self._resume) if self._resume is not None else None
        is_named = self._is_named
        self.drop()
        self._ended = None
        epoch = self._dealt(self._next_epoch, resume, replay)
        if resume is not None and not is_named and epoch.finished:
            resume = None  # the state was taken at the very end of an epoch
            epoch = self._dealt(self._next_epoch + 1, None, replay)
        self.resumed_from, self._has_begun = resume, False
        self._before = resume.get("before", 0) if resume is not None else 0
        left = ceil(epoch.pending / self._deal.batch_size)
        is_known = resume is not None and not isinstance(epoch, LazyEpoch)
        self._length = counted(resume) + left if resume is not None and is_known else None
        self._resume, self._is_named = None, False
        self.current = self.reading = epoch
        self._next_epoch = epoch.number + 1
        return epoch

    def share(self, epoch: int) -> Ints:
        """Return this rank's share of a whole epoch."""
        deal = self.deal
        return deal.share(deal.order(epoch, np.zeros(deal.samples, bool), self.layout.shard_of))[0]

    def following(self, epoch: Epoch) -> Ints | None:
        """Return the samples of the epoch after this one in their order, ``None`` if they are not known."""
        if self.user is not None:
            return epoch.share if self.user.is_fixed else None
        return self.share(epoch.number + 1)

    def consumed(self, rows: Ints) -> None:
        """The loop received these samples of the current pass."""
        self._has_begun = True
        self._consumed[rows] = True
        self._consumed[self._left_out] = True

    def stop_reading(self) -> None:
        """Stop reading this pass. Batches that were drawn ahead were not consumed, and the state says so."""
        self.reading = None
        if self.current is not None and self.current.finished:
            self.drop()

    def open_pass(self) -> OpenPass | None:
        """Return the pass that a loop reads, so that ``go_on`` can go on with it."""
        if self.reading is None:
            return None
        named = self._next_epoch if self._is_named else self.user.named if self.user is not None else None
        values = {name: getattr(self, name) for name in _OF_A_PASS}
        return OpenPass(self.reading, values, is_left=named not in (None, self.reading.number))

    def go_on(self, opened: OpenPass) -> None:
        """Go on with a pass after another one. The epoch that follows is the one after this pass's."""
        vars(self).update(opened.values)
        self._next_epoch, self._is_named, self._resume = opened.epoch.number + 1, False, None

    def state_of(self, opened: OpenPass, *, is_recorded: bool, batches: int | None = None) -> State:
        """Return the state of a pass that is not the current one."""
        now = {name: getattr(self, name) for name in _OF_A_PASS}
        vars(self).update(opened.values)
        try:
            return self.state(is_recorded=is_recorded, batches=batches)
        finally:
            vars(self).update(now)

    def drop(self) -> None:
        """Forget this pass: from here on the state is the next epoch's, untouched."""
        self._ended = self._now or self._ended
        self.current = self.reading = None
        self.done = np.zeros(0, bool)

    def _dealt(self, number: int, resume: State | None, replay: Replay | None) -> Epoch:
        samples = self._deal.samples
        done = unpack(resume["done"], samples) if resume is not None else np.zeros(samples, bool)
        lazy = self.user.lazy(number, done, resume, self.layout, self._deal) if self.user is not None else None
        if lazy is not None:
            self.done, self._consumed, self._left_out = done, done.copy(), np.zeros(0, np.int64)
            return lazy
        if self.user is None:
            order = self._deal.order(number, done, self.layout.shard_of)
        else:
            order = self.user.rows(number, done, resume)
        share, left_out = self._deal.share(order)
        own = unpack(resume["own"], len(share)) if resume is not None else None
        self.done, self._consumed = done, done.copy()
        self._left_out = left_out if self.user is None else left_out[:0]
        if own is not None and own.any():
            self._consumed[share[own]] = True
            self._consumed[self._left_out] = True
        batches = resume["batches"] if resume is not None else 0
        replayed = replay.order(number, self._deal, self.layout) if replay is not None else None
        known = len(replayed.rows) + len(replayed.lost) if replayed is not None else len(share)
        if known < len(share):
            log.warning("replay: of epoch %d the ledger has %d of %d samples", number, known, len(share))
        epoch = Epoch(number, share, self.layout, own=own, batches=batches, replayed=replayed)
        epoch.has_all = self.user is not None and self.user.has_all
        if self.keeps_size:
            epoch.keep_size(resume.get("owed", 0) if resume is not None else 0)
        return epoch

    # -- the state ----------------------------------------------------------------------------------------------------

    def state(self, *, is_recorded: bool, batches: int | None = None) -> State:
        """Return the state: what is consumed so far, or was when ``batches`` of this epoch had been.

        ``is_recorded``: a ledger records the order. It counts skipped batches, too, so after a skip the state does not
        count the batches of this deal, and the pass that resumes deals again.
        """
        was = self._was(batches)
        if was is None:
            untouched = self._state(self._next_epoch, 0, self.done[:0], self.done[:0])
            return self._resume or (untouched if self.user is None else self._ranks(of_sampler(untouched, None)))
        epoch, nothing = was.epoch, was.done[:0]
        if self.user is not None:
            return self._users_state(self.user, was)
        # One rank alone needs no ``own``: its state is ``merge_states`` of itself, kept up to date.
        if self._deal.world_size == 1 and (was.done.any() or (epoch.has_skipped and is_recorded)):
            state = self._state(epoch.number, 0, was.consumed, nothing)
            return counting(state, was.before + epoch.batches)
        state = counting(self._state(epoch.number, epoch.batches, was.done, epoch.consumed), was.before)
        return {**state, "owed": epoch.owed_to_resume} if epoch.owed_to_resume else state

    def _was(self, batches: int | None) -> _Was | None:
        """Return what is to be saved: the current pass, or as it or the one that ended was ``batches`` into it."""
        now = self._now
        if batches is None:
            return now
        of = now or self._ended
        if of is None or batches >= of.before + of.epoch.batches:
            return now
        epoch = of.epoch.as_of(batches - of.before)
        consumed = of.consumed.copy()
        consumed[of.epoch.rows_since(batches - of.before)] = False
        return replace(of, epoch=epoch, consumed=consumed)

    @property
    def _now(self) -> _Was | None:
        if self.current is None:
            return None
        return _Was(self.current, self._before, self.done, self._consumed)

    def load(self, state: Mapping[str, Any]) -> None:
        """Make the next pass resume where a state was taken. ``ValueError`` for one that does not fit."""
        # The rank may be unknown yet: then the first pass finds out whether the state is this rank's.
        belongs = belonging(state, self.dataset, self._deal)
        is_foreign = belongs.get("sampler") and self.user is None and not is_untouched(belongs)
        resume = self._fitted(belongs) if self.rank.is_known or is_foreign else self._located(belongs)
        self.drop()
        self._ended = None
        self._resume, self.is_resumed = resume, True
        self._next_epoch, self._is_named = resume["epoch"], False
        if self.user is not None:
            self.user.leave_at(self._next_epoch)

    def _fitted(self, state: State) -> State:
        if self.user is None:
            return self._located(fitted(state, self.dataset, self.deal))
        rank, world_size = self.rank.current
        deal = replace(self.deal, rank=rank, world_size=world_size)
        return self._located(fitted(state, self.dataset, deal, sampler=True, in_order=self.user.is_fixed))

    def _located(self, state: State) -> State:
        """Return a state that says which samples are consumed where it said which positions of an order are."""
        if not has_positions(state):
            return state
        done = unpack(state["done"], self._deal.samples)
        return located(state, self._deal.order(state["epoch"], done, self.layout.shard_of))

    def _state(self, epoch: int, batches: int, done: Mask, own: Mask) -> State:
        return make_state(self.dataset, self.deal, epoch, batches, done, own)

    def _users_state(self, user: UserSampler, was: _Was) -> State:
        epoch = was.epoch
        done = np.ones_like(was.consumed) if epoch.finished else was.consumed
        state = counting(self._state(epoch.number, 0, done, was.done[:0]), was.before + epoch.batches)
        return user.state(self._ranks(state), epoch)

    def _ranks(self, state: State) -> State:
        """Return the state of a sampler's order as that of this rank."""
        rank, world_size = self.rank.current
        return {**state, "rank": rank, "world_size": world_size}

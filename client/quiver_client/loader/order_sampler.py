"""``OrderSampler``: an order of batches as torch, trainers and checkpoints see it, a batch sampler.

What they read, iterate, wrap and save is here, the same for one dataset and for a mixture. How the next batch is
decided is the subclass's: ``sampler``, and ``mix.sampler``.
"""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import Sampler

from quiver_client import read_clock
from quiver_client.loader.epoch import Deal, Drawn
from quiver_client.loader.loop_rate import NOT_TIMED, LoopTurn
from quiver_client.loader.merged_state import merged_state, packed, trainers_state
from quiver_client.loader.state import State, marked
from quiver_client.loader.trainers.wrappers import (
    Reader,
    flattens_states,
    keeps_one_state,
    pass_through,
    wrapping_shard,
)


class OrderSampler(Sampler[list[int]]):
    """Batches of sample numbers. Each iteration is one epoch; there a batch counts as consumed when it is drawn."""

    substitute: bool
    """Whether samples are drawn early because they are resident: then the order is not fixed."""

    even_batches = True  # set by Accelerate's join_uneven_inputs; all ranks have the same number of batches anyway

    @property
    @abstractmethod
    def deal(self) -> Deal:
        """The settings that determine the shares; before the first pass, as if that began now."""

    @property
    @abstractmethod
    def handed_out(self) -> int:
        """Batches that a loaded state counts in the epoch of the next pass; 0 where that pass begins an epoch."""

    @property
    def batch_size(self) -> int:
        """Samples of a batch in this rank. There is no ``drop_last`` beside it: Lightning would make another order.

        Accelerate's ``BatchSamplerShard``, which deals batches to ranks, reads this when it is made over an order; one
        over an order that is dealt already then hands its batches on (``pass_through``).
        """
        shard = wrapping_shard(sys._getframe(1))
        rank, world_size = self._dealt_to
        if shard is not None and world_size > 1:
            parts = shard.num_processes if shard.split_batches else 1
            if pass_through(shard, rank, world_size):
                self.split(parts)
        return self.deal.batch_size

    @abstractmethod
    def split(self, parts: int) -> None:
        """Make the batches of each rank smaller: one of the size that was given is split between ``parts`` ranks.

        Raises ``ValueError`` naming ``batch_size`` if it cannot be.
        """

    def __iter__(self) -> Iterator[list[int]]:
        # Check now, not with the first batch: a dispatcher requests that in one rank, and the others wait for it.
        return self._batches(self._checked(Reader.of(sys._getframe(1))))

    def _checked(self, reader: Reader) -> int:
        """Return how many batches the reader skips that are not read again. Raises if it would lose samples."""
        self.attend(reader)
        is_fixed, is_known = not self.substitute, self._is_reproducible
        skips = reader.skips(self.handed_out, reproducible=is_fixed and is_known)
        reader.check(*self._dealt_to, is_fixed=is_fixed and (is_known or not self._is_users))
        return skips

    def _batches(self, skips: int) -> Iterator[list[int]]:
        epoch = self.begin()
        try:
            for _ in range(skips):  # whole batches: a wrapper within the one that skips may hold short ones back
                yield [0] * self.deal.batch_size
            step: float | None = None
            read = 0.0
            while True:
                # A stock loader without workers reads and makes the batch in this thread before it asks for the next
                # one; one with workers also waits for them, and how long is not seen from here.
                asked = time.monotonic()
                self.asked(epoch)
                drawn = self.draw(epoch)
                if drawn is None:
                    break
                handed = time.monotonic()
                self.consumed(epoch, drawn.number, LoopTurn(handed - asked + read, step))
                before = read_clock.seconds()
                yield drawn.rows.tolist()
                read = read_clock.seconds() - before
                step = max(time.monotonic() - handed - read, 0.0)
            self.end(epoch)
        finally:
            self.abandon(epoch)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a BatchSampler cannot be pickled: it decides by the state of the process that made it")

    def state_dict(self, *, merged: bool = False, batches: int | None = None) -> State:
        """Return the state: what is consumed so far. Prefetched batches that were not handed out do not count.

        ``merged``: return that of all ranks, which all have to call this; see ``DataLoader.state_dict``. ``batches``:
        return the state that this was when so many batches of the epoch had been handed out, for a stock loader, which
        draws batches before the training loop asks for them.
        """
        own = partial(self._marked_state, batches)
        if merged:
            return merged_state(own, *self._ranks)
        asking = sys._getframe(1)
        if keeps_one_state(asking):
            state = trainers_state(own, *self._ranks)
            return packed(state) if flattens_states(asking) else state
        return own()

    def attend(self, reader: Reader) -> None:
        """Have Hugging Face's Trainer, if it is the reader, keep this order's state in its checkpoints."""
        if reader.training is not None:
            from quiver_client.integrations.transformers import attend

            attend(self, reader.training)

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read this epoch: all of it, or what a loaded state left of it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken. Raises ``ValueError`` with the reason if the state does not fit."""

    # -- an order, as a loader uses it: see ``order`` -----------------------------------------------------------------

    @abstractmethod
    def begin(self) -> Any: ...

    @abstractmethod
    def asked(self, epoch: Any = None) -> None: ...

    @abstractmethod
    def draw(self, epoch: Any) -> Drawn | None: ...

    @abstractmethod
    def consumed(self, epoch: Any, number: int, turn: LoopTurn = NOT_TIMED) -> None: ...

    @abstractmethod
    def end(self, epoch: Any) -> None: ...

    @abstractmethod
    def abandon(self, epoch: Any) -> None: ...

    # -- inside -------------------------------------------------------------------------------------------------------

    def _marked_state(self, batches: int | None) -> State:
        return marked(self._state(batches), in_order=not self.substitute)

    @abstractmethod
    def _state(self, batches: int | None) -> State:
        """Return this rank's state: that of now, or of when so many batches had been handed out."""

    @property
    @abstractmethod
    def _ranks(self) -> tuple[int, int]:
        """This rank, and of how many."""

    @property
    @abstractmethod
    def _dealt_to(self) -> tuple[int, int]:
        """Rank and world size of the share that this order is."""

    @property
    @abstractmethod
    def _is_reproducible(self) -> bool:
        """Whether another process would read the next pass in the same order, if nothing is substituted."""

    @property
    @abstractmethod
    def _is_users(self) -> bool:
        """Whether a sampler of the user's gives the order."""

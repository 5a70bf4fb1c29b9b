"""The order of a sampler that the user gave, and its state.

Lists and torch's own samplers, whose order is fixed once they are iterated, are read whole when an epoch begins; any
other one while the loop runs (``lazy_sampler``). The sampler may give another order the next time, so a state cannot
refer to positions in this one. It has one of four forms, the first that is possible:

- the sampler's own state, if it has ``state_dict`` and ``load_state_dict``, as torchdata's have
- the samples that are done, if the sampler gives each sample of the dataset once: those left follow
- the samples that are left, if it repeats or selects some. To know them, a sampler with a length is read to its end
- how many were handed out, if it has no length, or a huge one: a resumed run reads so many and leaves them out, which
  is exact only if the sampler gives the same order again
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sized
from typing import Any, Final

import numpy as np
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from quiver.substitution import Ints, Mask
from quiver_client.loader.epoch import Deal, Epoch, ShardLayout
from quiver_client.loader.lazy_sampler import READ_OUT_MAX, LazyEpoch, SamplerReader
from quiver_client.loader.state import State, of_sampler, rest_of, unpack

log = logging.getLogger("quiver_client")

FIXED: Final = (list, tuple, range, np.ndarray, SequentialSampler)  # give the same order each time
WHOLE: Final = (*FIXED, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class UserSampler:
    """A sampler over a dataset of ``samples``."""

    def __init__(self, sampler: Iterable[int], samples: int) -> None:
        self.sampler: Any = sampler
        self._samples = samples
        self.has_all = False  # it gave each sample once when it was read last
        self._has_given = False  # it gave samples in some epoch
        self._left_at: int | None = None  # the epoch that the loader set; another value was set by the user

    @property
    def is_share(self) -> bool:
        """Whether it gives each rank its own share, as far as its type tells."""
        return isinstance(self.sampler, DistributedSampler)

    @property
    def is_fixed(self) -> bool:
        """Whether it gives the same order each time, in every process."""
        dealt = isinstance(self.sampler, DistributedSampler) and not self.sampler.shuffle
        return type(self.sampler) in FIXED or dealt

    @property
    def is_lazy(self) -> bool:
        """Whether it is read while the loop runs."""
        is_endless = isinstance(self.sampler, Sized) and len(self.sampler) > max(self._samples, READ_OUT_MAX)
        return type(self.sampler) not in WHOLE or (is_endless and type(self.sampler) not in FIXED)

    @property
    def named(self) -> int | None:
        """The epoch that the user set the sampler to, ``None`` if the user did not."""
        epoch = getattr(self.sampler, "epoch", None) if hasattr(self.sampler, "set_epoch") else None
        return epoch if isinstance(epoch, int) and epoch != self._left_at else None

    def leave_at(self, epoch: int) -> None:
        """Set the sampler to the epoch that comes next unless the user sets another, which then shows in ``named``."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
            self._left_at = getattr(self.sampler, "epoch", None)

    @property
    def has_length(self) -> bool:
        return isinstance(self.sampler, Sized)

    def batches(self, deal: Deal) -> int:
        """Return the batches of an epoch. ``TypeError`` if the sampler has no length, as with torch's loader."""
        return len(self.sampler) // deal.batch_size if deal.drop_last else -(-len(self.sampler) // deal.batch_size)

    def rows(self, epoch: int, done: Mask, resume: State | None) -> Ints:
        """Return the samples of an epoch, in order: those that a state lists as left, or else all that are not done."""
        rest = rest_of(resume) if resume is not None else None
        if rest is not None:
            self.has_all = False
            return rest
        if self.is_lazy and done.all():
            return np.zeros(0, np.int64)  # the state of an epoch's end; the sampler may be endless
        rows = self._read(epoch)
        self._check_given(epoch, len(rows))
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._samples:
            raise ValueError(f"sampler: it gives indices outside the dataset's {self._samples} samples")
        self.has_all = self._is_whole(rows)
        return rows[~done[rows]]

    def lazy(self, epoch: int, done: Mask, resume: State | None, layout: ShardLayout, deal: Deal) -> LazyEpoch | None:
        """Return a pass over the sampler that reads it while the loop runs; ``None`` if the order is known."""
        is_counted = resume is not None and ("given" in resume or "sampler_state" in resume)
        if not self.is_lazy or (resume is not None and ("rest" in resume or (done.all() and not is_counted))):
            return None
        omitted = np.zeros_like(done) if is_counted else done
        self._set_epoch(epoch)
        self._left_at = getattr(self.sampler, "epoch", None)
        given = int(resume.get("given", 0)) if resume is not None else 0
        reader = self._reader(epoch, omitted, resume.get("sampler_state") if resume is not None else None, given)
        made = LazyEpoch(epoch, reader, layout, drop_last=deal.drop_last)
        made.samples_given_out = given if is_counted else int(done.sum())
        made.prepare(deal.batch_size)
        self._check_given(epoch, reader.given)
        return made

    def _reader(self, epoch: int, omitted: Mask, own: Any, given: int) -> SamplerReader:
        """Begin to read the sampler: from its ``own`` state, or else behind the first ``given`` samples."""

        def made() -> SamplerReader:
            return SamplerReader(self.sampler, self._samples, omitted, lambda: self.leave_at(epoch + 1))

        reader = made()
        if own is None:
            reader.read(given)
            return reader
        if reader.stateful is None:
            raise ValueError("state: it has a sampler's own state, and this sampler has no load_state_dict()")
        reader.stateful.load_state_dict(own)
        return made() if reader.stateful is self.sampler else reader

    def state(self, state: State, epoch: Epoch) -> State:
        """Return ``state``, in which everything consumed is done, as the state of this order."""
        if isinstance(epoch, LazyEpoch):
            return self._lazy_state(state, epoch)
        left = epoch.share[~epoch.consumed]
        return of_sampler(state, None if epoch.has_all or not len(left) else left)

    def _lazy_state(self, state: State, epoch: LazyEpoch) -> State:
        if epoch.finished:
            return of_sampler(state, None)
        own = epoch.sampler_state
        if own is not None:
            return of_sampler(state, None) | {"given": epoch.samples_given_out, "sampler_state": own}
        left = epoch.read_out()
        if left is None:
            return of_sampler(state, None) | {"given": epoch.samples_given_out}
        done = unpack(state["done"], self._samples)
        is_rest_of_all = len(left) + int(done.sum()) == self._samples == epoch.samples_given_out + len(left)
        follows = is_rest_of_all and not done[left].any() and len(np.unique(left)) == len(left)
        return of_sampler(state, None if follows else left)

    def _check_given(self, epoch: int, count: int) -> None:
        if not count and (self._has_given or (isinstance(self.sampler, Sized) and len(self.sampler))):
            raise ValueError(
                f"sampler: it gives no samples in epoch {epoch}, although it gave some before or has a length. An"
                " iterator can be read once only: give what can be iterated again, a list or a torch.utils.data.Sampler"
            )
        self._has_given = self._has_given or bool(count)

    def _is_whole(self, rows: Ints) -> bool:
        """Whether each sample of the dataset is among the rows, once."""
        given = np.zeros(self._samples, bool)
        given[rows] = True
        return len(rows) == self._samples and bool(given.all())

    def _set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _read(self, epoch: int) -> Ints:
        try:
            self._set_epoch(epoch)
            rows = np.fromiter(map(operator.index, self.sampler), np.int64)
        except TypeError as error:
            raise ValueError(f"sampler: it must give integers, the indices of samples: {error}") from error
        except StopIteration as error:  # it would end an enclosing loop
            raise RuntimeError("sampler: it raised StopIteration where an iterator was expected") from error
        self.leave_at(epoch + 1)
        if isinstance(self.sampler, Sized) and len(rows) < len(self.sampler):
            log.warning(
                "sampler: it gave %d samples where its len() says %d; the epoch ends there",
                len(rows),
                len(self.sampler),
            )
        return rows


def rank_given(
    sampler: Iterable[int] | None, rank: int | None, world_size: int | None
) -> tuple[int | None, int | None]:
    """Return the rank and world size that were given, as arguments or as those of a ``DistributedSampler``."""
    if not isinstance(sampler, DistributedSampler):
        return rank, world_size
    theirs = sampler.rank, sampler.num_replicas
    if (rank, world_size) not in ((None, None), theirs):
        raise ValueError(
            f"sampler: it is that of rank {theirs[0]} of {theirs[1]}; rank={rank}, world_size={world_size} were given"
        )
    return theirs

"""The order of a sampler that the user gave: read whole when an epoch begins, and saved as what is left of it.

The sampler's next order may be another, so places in this one mean nothing in a state. Where it gives each sample of
the dataset once, what is done says what is left; where it repeats or chooses samples, only what is left does.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sized
from typing import Any, Final

import numpy as np
from torch.utils.data import DistributedSampler, SequentialSampler

from quiver.substitution import Ints, Mask
from quiver_client.loader.epoch import Deal, Epoch
from quiver_client.loader.state import State, of_sampler, rest_of

log = logging.getLogger("quiver_client")

FIXED: Final = (list, tuple, range, np.ndarray, SequentialSampler)  # give the same each time


class GivenOrder:
    """A sampler over a dataset of so many samples."""

    def __init__(self, sampler: Iterable[int], samples: int) -> None:
        self.sampler: Any = sampler
        self._samples = samples
        self._has_all = False  # it gave each sample once
        self._gave = False  # it gave a sample in an epoch before
        self._set: int | None = None  # the epoch that we left it at; another one is the user's

    @property
    def is_share(self) -> bool:
        """Whether it gives each rank a share of its own, as far as its type says."""
        return isinstance(self.sampler, DistributedSampler)

    @property
    def is_fixed(self) -> bool:
        """Whether its next order is the same as its last, in another process too."""
        dealt = isinstance(self.sampler, DistributedSampler) and not self.sampler.shuffle
        return type(self.sampler) in FIXED or dealt

    @property
    def named(self) -> int | None:
        """The epoch that the user set the sampler to, if it is not the one that we left it at."""
        epoch = getattr(self.sampler, "epoch", None) if hasattr(self.sampler, "set_epoch") else None
        return epoch if isinstance(epoch, int) and epoch != self._set else None

    def leave_at(self, epoch: int) -> None:
        """Set the sampler to the epoch that comes next if the user says nothing, so that it shows if he does."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
            self._set = getattr(self.sampler, "epoch", None)

    def batches(self, deal: Deal) -> int | None:
        """Return the batches of an epoch, as far as the sampler says how long it is."""
        if not isinstance(self.sampler, Sized):
            return None
        return len(self.sampler) // deal.batch_size if deal.drop_last else -(-len(self.sampler) // deal.batch_size)

    def rows(self, epoch: int, done: Mask, resume: State | None) -> Ints:
        """Return the samples of an epoch, in order: what a state has left, or else all but those ``done``."""
        rest = rest_of(resume) if resume is not None else None
        if rest is not None:
            self._has_all = False
            return rest
        rows = self._read(epoch)
        if not len(rows) and (self._gave or (isinstance(self.sampler, Sized) and len(self.sampler))):
            raise ValueError(
                f"sampler: it gives no samples in epoch {epoch}, where it has given or promised some. An iterator gives"
                " them once: give what can be iterated again, a list or a torch.utils.data.Sampler"
            )
        self._gave = self._gave or bool(len(rows))
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._samples:
            raise ValueError(f"sampler: it gives indices that the dataset's {self._samples} samples do not have")
        given = np.zeros(self._samples, bool)
        given[rows] = True
        self._has_all = len(rows) == self._samples and bool(given.all())
        return rows[~done[rows]]

    def state(self, state: State, epoch: Epoch) -> State:
        """Return the state, in which all that was consumed is done, as one of this order."""
        left = epoch.share[~epoch.consumed]
        return of_sampler(state, None if self._has_all or not len(left) else left)

    def _read(self, epoch: int) -> Ints:
        try:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            rows = np.fromiter(map(operator.index, self.sampler), np.int64)
        except TypeError as error:
            raise ValueError(f"sampler: it is to give integers, the numbers of samples: {error}") from error
        except StopIteration as error:  # of its __iter__: a loop around this one would take it for its own end
            raise RuntimeError("sampler: it raised StopIteration where an iterator is wanted") from error
        self.leave_at(epoch + 1)
        if isinstance(self.sampler, Sized) and len(rows) < len(self.sampler):
            log.warning(
                "sampler: it gave %d samples where its len() says %d; the epoch ends there",
                len(rows),
                len(self.sampler),
            )
        return rows


def place_given(
    sampler: Iterable[int] | None, rank: int | None, world_size: int | None
) -> tuple[int | None, int | None]:
    """Return what was given of rank and world size, by hand or by torch's sampler of one rank's share."""
    if not isinstance(sampler, DistributedSampler):
        return rank, world_size
    theirs = sampler.rank, sampler.num_replicas
    if (rank, world_size) not in ((None, None), theirs):
        raise ValueError(f"sampler: it is of rank {theirs[0]} of {theirs[1]}, and rank={rank}, world_size={world_size}")
    return theirs

"""The order of a sampler that the user gave: read whole when an epoch begins, and saved as the samples that are left.

The sampler may give another order the next time, so a state cannot refer to positions in this one. If the sampler
gives each sample of the dataset once, those left follow from those done; if it repeats or selects samples, the state
lists those left.
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

FIXED: Final = (list, tuple, range, np.ndarray, SequentialSampler)  # give the same order each time


class UserSampler:
    """A sampler over a dataset of ``samples``."""

    def __init__(self, sampler: Iterable[int], samples: int) -> None:
        self.sampler: Any = sampler
        self._samples = samples
        self._has_all = False  # it gave each sample once in this epoch
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
    def named(self) -> int | None:
        """The epoch that the user set the sampler to, ``None`` if the user did not."""
        epoch = getattr(self.sampler, "epoch", None) if hasattr(self.sampler, "set_epoch") else None
        return epoch if isinstance(epoch, int) and epoch != self._left_at else None

    def leave_at(self, epoch: int) -> None:
        """Set the sampler to the epoch that comes next unless the user sets another, which then shows in ``named``."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
            self._left_at = getattr(self.sampler, "epoch", None)

    def batches(self, deal: Deal) -> int | None:
        """Return the batches of an epoch; ``None`` if the sampler has no length."""
        if not isinstance(self.sampler, Sized):
            return None
        return len(self.sampler) // deal.batch_size if deal.drop_last else -(-len(self.sampler) // deal.batch_size)

    def rows(self, epoch: int, done: Mask, resume: State | None) -> Ints:
        """Return the samples of an epoch, in order: those that a state lists as left, or else all that are not done."""
        rest = rest_of(resume) if resume is not None else None
        if rest is not None:
            self._has_all = False
            return rest
        rows = self._read(epoch)
        if not len(rows) and (self._has_given or (isinstance(self.sampler, Sized) and len(self.sampler))):
            raise ValueError(
                f"sampler: it gives no samples in epoch {epoch}, although it gave some before or has a length. An"
                " iterator can be read once only: give what can be iterated again, a list or a torch.utils.data.Sampler"
            )
        self._has_given = self._has_given or bool(len(rows))
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._samples:
            raise ValueError(f"sampler: it gives indices outside the dataset's {self._samples} samples")
        given = np.zeros(self._samples, bool)
        given[rows] = True
        self._has_all = len(rows) == self._samples and bool(given.all())
        return rows[~done[rows]]

    def state(self, state: State, epoch: Epoch) -> State:
        """Return ``state``, in which everything consumed is done, as the state of this order."""
        left = epoch.share[~epoch.consumed]
        return of_sampler(state, None if self._has_all or not len(left) else left)

    def _read(self, epoch: int) -> Ints:
        try:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
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

"""Orders that a trainer inserts into a loader: what Lightning reads of a batch sampler to make another one of it.

To deal a sampler of the user's to ranks, to switch shuffling off (``overfit_batches``) and to record what it predicts
from, Lightning makes the batch sampler again with another ``sampler``, and the loader again with that. There is no
public protocol for this: of torch's ``BatchSampler`` it reads the arguments that it has recorded itself, and ours
presents its arguments under the same names (``rebuilding``). ``tests/trainers`` runs the real package.
"""

from __future__ import annotations

from typing import Any, Final

from quiver_client.loader.epoch import Epoch
from quiver_client.loader.sampler import BatchSampler

WRAPPED: Final = "_batch_sampler"  # what a wrapper of a batch sampler calls it: Lightning's for ``predict``
SEEN: Final = "seen_batch_indices"  # where that one lists what was drawn

COMPOSED: Final = (
    "batch_sampler: this loader composes its batches itself; give batch_size, or a quiver_client.BatchSampler. For"
    " batches of another kind, give torch's DataLoader over the dataset"
)


def order_of(batch_sampler: Any, dataset: Any, *others: bool) -> BatchSampler:
    """Return the order that a batch sampler is, or wraps.

    ``others``: whether arguments were given that the order has already. Raises ``ValueError`` for any other one.
    """
    order = getattr(batch_sampler, WRAPPED, batch_sampler)
    if not isinstance(order, BatchSampler):
        raise ValueError(COMPOSED)
    if order.dataset is not dataset:
        raise ValueError("batch_sampler: it is over another dataset object; give the loader batch_sampler.dataset")
    if any(others):
        raise ValueError(
            "batch_sampler: it determines batch_size, shuffle, sampler and drop_last; give these to it, and not to the"
            " loader"
        )
    return order


class SeenBatches:
    """Tells a wrapper of the order which samples each batch holds, as if it had been iterated."""

    def __init__(self, batch_sampler: Any) -> None:
        self._wrapper = batch_sampler if hasattr(batch_sampler, WRAPPED) else None

    def begin(self) -> None:
        if self._wrapper is not None:
            setattr(self._wrapper, SEEN, [])

    def handed_out(self, epoch: Epoch, number: int) -> None:
        if self._wrapper is not None:
            getattr(self._wrapper, SEEN).append(epoch.rows(number).tolist())

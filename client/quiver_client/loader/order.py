"""What prefetchers, workers and the loader's iterator need of an order of batches, and of one pass over it.

``BatchSampler`` is such an order over one dataset; ``MixBatchSampler`` is one over a mixture. No other module of the
loader knows which of them it has.
"""

from __future__ import annotations

from typing import Protocol

from quiver.substitution import Ints


class OrderPass(Protocol):
    """One pass: an epoch, or what a resumed run left of it."""

    number: int
    """Of the epoch."""

    @property
    def pending(self) -> int:
        """Samples that are not drawn yet."""
        ...

    @property
    def finished(self) -> bool:
        """Whether everything is drawn and consumed."""
        ...

    def rows(self, number: int) -> Ints:
        """Return the samples of a batch that was drawn and not consumed."""
        ...

"""What prefetchers, workers and the loader's iterator need of an order of batches, and of one pass over it.

``BatchSampler`` is such an order over one dataset; ``MixBatchSampler`` is one over a mixture. No other module of the
loader knows which of them it has.
"""

from __future__ import annotations

from typing import Any, Protocol

from quiver.substitution import Ints
from quiver_client.loader.epoch import Drawn
from quiver_client.loader.loop_rate import NOT_TIMED, LoopTurn


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


class BatchOrder(Protocol):
    """An order of batches. ``epoch`` is always what ``begin`` of the same order returned. Safe from threads."""

    def begin(self) -> Any:
        """Begin the next pass, an ``OrderPass``."""
        ...

    def poll(self, epoch: Any) -> bool:
        """Return whether ``draw`` would return at once; if not, begin the wait for the cache."""
        ...

    def draw(self, epoch: Any) -> Drawn | None:
        """Return the next batch, ``None`` at the end of the pass or once it was abandoned. May wait."""
        ...

    def is_current(self, epoch: Any) -> bool:
        """Whether no other pass has begun since, and no state was loaded."""
        ...

    def asked(self, epoch: Any = None) -> None:
        """A loop waits for a batch of this pass, which becomes the current one; ``None``: of the current pass."""
        ...

    def fetched(self, epoch: Any, number: int) -> None:
        """The bytes of a batch are in memory."""
        ...

    def consumed(self, epoch: Any, number: int, turn: LoopTurn = NOT_TIMED) -> None:
        """The training loop received a batch; ``turn``: what that and its step before took."""
        ...

    def end(self, epoch: Any) -> None:
        """The pass has ended."""
        ...

    def abandon(self, epoch: Any) -> None:
        """Stop reading the pass."""
        ...

    def failure(self, error: BaseException, rows: Ints) -> RuntimeError:
        """Return what to raise in place of an exception that the loop would take for the end of the epoch."""
        ...

    def __len__(self) -> int: ...

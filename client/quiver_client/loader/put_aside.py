"""Passes that were begun and neither ended nor dropped, beside the current one: one loader, iterated by several loops.

A trainer that validates with its training loader begins a pass in the middle of another. Each iterator is a pass of its
own, with an ``Epoch`` of its own, so each hands out every sample of its share exactly once, in whatever order they are
asked. What exists once per loader (what is reported to the cache, the ledger's segment, the state) belongs to the
current pass, which is the one that was asked last; the others are put aside. An inner loop that ends gives its place
back to the loop around it.

The state is the outermost loop's: of the pass put aside first among those that claim it. A pass claims it once its loop
has come back for a second batch. One batch alone is what ``next(iter(loader))`` takes to look at the data; such an
iterator is often kept in a variable and never asked again, and the loop that follows it is the training loop.

Values only: no thread and no lock; ``BatchSampler`` holds its lock while it calls.
"""

from __future__ import annotations

import logging
from typing import Final

from quiver_client.loader.epoch import Epoch
from quiver_client.loader.passes import OpenPass

log = logging.getLogger("quiver_client")

CLAIMS_AFTER: Final = 2  # batches


class PutAside:
    """The passes put aside, the outermost loop's first."""

    def __init__(self) -> None:
        self._passes: dict[Epoch, OpenPass] = {}
        self._warned = False

    def __contains__(self, epoch: Epoch) -> bool:
        return epoch in self._passes

    def put(self, opened: OpenPass | None) -> None:
        """Put the pass aside that was current until now; ``None``: there was none."""
        if opened is None:
            return
        self._passes[opened.epoch] = opened
        if not self._warned and _claims(opened):
            self._warned = True
            log.warning(
                "a pass began within another one, of epoch %d, which has handed out %d batches. Each hands out every"
                " sample of its share once; until the outer one has ended, state_dict() is its state. If no loop goes"
                " on with it, delete its iterator, or call loader.close() before the next pass",
                opened.epoch.number,
                opened.epoch.handed_out,
            )

    def take(self, epoch: Epoch) -> OpenPass | None:
        """Return a pass and remove it from here; ``None`` if it is not put aside."""
        return self._passes.pop(epoch, None)

    def claimant(self) -> OpenPass | None:
        """Return the pass whose state is the loader's, in place of the current one's."""
        return next(filter(_claims, self._passes.values()), None)

    def innermost(self) -> OpenPass | None:
        """Return the pass that becomes current when an inner one ends, if one claims to be an outer loop's."""
        return next(filter(_claims, reversed(self._passes.values())), None)

    def clear(self) -> None:
        """Forget all: a state was loaded."""
        self._passes.clear()


def _claims(opened: OpenPass) -> bool:
    return opened.epoch.handed_out >= CLAIMS_AFTER and not opened.is_left

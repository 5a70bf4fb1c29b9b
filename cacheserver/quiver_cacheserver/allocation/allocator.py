"""Keeps the allocation of a daemon up to date."""

from __future__ import annotations

from quiver_cacheserver.allocation.solved import NOTHING, Solved


class Allocator:
    """The allocation that holds now. Belongs to the event loop."""

    def __init__(self) -> None:
        self.current: Solved = NOTHING

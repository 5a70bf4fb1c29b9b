"""Work on the event loop for each of many shards, cut into slices, so that other requests run in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from quiver.digest import Digest

SLICE: Final = 256  # shards of a request that are handled in one go: a few hundred microseconds of the loop


class Slices:
    """Work on the event loop for each shard of a request: a slice at a time, all large requests in turn."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def walk(self, shards: Sequence[Digest], step: Callable[[Sequence[Digest]], object]) -> None:
        """Take a step over many shards; a usual batch is one slice, for which nothing is waited for."""
        if len(shards) <= SLICE:
            step(shards)
            return
        for at in range(0, len(shards), SLICE):
            async with self.turn():
                step(shards[at : at + SLICE])

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Take an iteration of the loop for a step of one request, however many large ones there are.

        Not a thread: threads would compete for the GIL, which the loop reacquires for each event, 5 ms each time.
        """
        async with self._turn:
            await asyncio.sleep(0)
            yield

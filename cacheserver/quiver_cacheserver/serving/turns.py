"""Which reads are answered now: a bounded number at once, of which one address never has all.

A read that waits for a fill, an upload or a manifest releases its place, so that it does not block reads of resident
shards. Instead it holds a place among the waiting reads, which cost less. Afterwards it queues for its turn again,
address by address, so that none of a thousand readers that waited for one fill is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, Self

from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.budget import Budgets, Resource
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.residency.readers import ReadBy

RESUME_SECONDS: Final = 5.0  # after a wait; a reader's own patience is twice that


class Places:
    """Places of one resource, given to addresses in turn. On the event loop; ``end`` is safe from threads."""

    def __init__(self, budgets: Budgets, what: Resource) -> None:
        self.budgets = budgets
        self.what = what
        self._queue: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # of those that wait, by address
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self, client: str) -> None:
        """Release a place."""
        self.budgets.release(client, self.what)
        if self._queue and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    async def take(self, client: str, seconds: float) -> None:
        """Take a place, waiting for one if necessary. Raises ``OverCapacity`` if none is free in time."""
        if client not in self._queue and self.budgets.hold(client, self.what, counted=False):
            return
        self._loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = self._loop.create_future()
        self._queue.setdefault(client, deque()).append(mine)
        self._wake()
        try:
            async with asyncio.timeout(seconds):
                await mine
        except TimeoutError:
            if mine.done() and not mine.cancelled():
                return  # the place was granted just as the time expired
            self.budgets.refused[self.what] += 1
            raise self.budgets.refusal(self.what) from None
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.end(client)
            raise

    def _wake(self) -> None:
        """Give places to those that wait for one, one to each address in turn."""
        given = True
        while given:
            given = False
            for client, waiting in list(self._queue.items()):
                while waiting and waiting[0].done():  # those that timed out
                    waiting.popleft()
                if waiting and self.budgets.hold(client, self.what, counted=False):
                    waiting.popleft().set_result(None)
                    self._queue.move_to_end(client)
                    given = True
                if not waiting:
                    del self._queue[client]


class Turn:
    """One read, from the arrival of its request until its answer is sent. One thread or coroutine owns it at a time."""

    def __init__(self, places: Places, counters: Counters, caller: Caller, by: ReadBy) -> None:
        self.caller = caller
        self.by = by
        self.client = caller.budget
        self._places = places
        self._counters = counters
        self._held = False
        self._files = 0

    def begin(self) -> None:
        """Take a place among the reads that are answered. Raises ``OverCapacity`` if none is free."""
        if not self._places.budgets.hold(self.client, Resource.READS):
            raise self._places.budgets.refusal(Resource.READS)
        self._held = True
        self._counters.add("reads_in_flight", 1)

    def hold_files(self, count: int) -> None:
        """Hold descriptors for this many files until the end, instead of those held before. Raises ``OverCapacity``."""
        budgets = self._places.budgets
        before, self._files = self._files, 0
        if before:
            budgets.release(self.client, Resource.OPEN_FILES, before)
        if count and not budgets.hold(self.client, Resource.OPEN_FILES, count):
            raise budgets.refusal(Resource.OPEN_FILES)
        self._files = count

    def end(self) -> None:
        self._leave()
        self.hold_files(0)
        self._counters.add("reads_in_flight", -1)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Release the place for the duration of the block. Raises ``OverCapacity`` before or after it."""
        with self._places.budgets.holding(self.client, Resource.WAITING):
            self._leave()
            yield
            await self._places.take(self.client, RESUME_SECONDS)
            self._held = True

    def _leave(self) -> None:
        held, self._held = self._held, False
        if held:
            self._places.end(self.client)

"""The state of a daemon's drain: up, draining while it hands over, drained while it serves what it holds.

A daemon that drains owns no shards in the ring and fetches nothing ahead; it goes on serving. An operator begins a
drain (``quiver drain``), or an eviction notice, and the daemon stays up until it is told to end, or owns shards again
(``undrain``). SIGTERM begins one that no operator can take back, and ends the daemon afterwards (``serve``). The state
belongs to the process: a daemon that is started again is up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal

from quiver.errors import BadRequest
from quiver.handover import DrainStatus
from quiver.sizes import format_size
from quiver_cacheserver.draining.giver import Giver
from quiver_cacheserver.rack.registry import Registry

log = logging.getLogger(__name__)

SETTLE_SECONDS_MAX: Final = 2.0  # for fetches under way, before the ring changes
SETTLE_POLL_SECONDS: Final = 0.02


class Drain:
    """One daemon's drain. Belongs to the event loop."""

    def __init__(self, name: str, registry: Registry, giver: Giver, is_fetching: Callable[[], bool]) -> None:
        """``is_fetching``: whether shards are on their way to this daemon."""
        self.state: Literal["up", "draining"] = "up"
        self._name = name
        self._registry = registry
        self._giver = giver
        self._is_fetching = is_fetching
        self._ends = False
        self._changing = asyncio.Lock()
        self._settled = asyncio.Event()
        self._announcing: asyncio.Task[None] | None = None
        self._handing: asyncio.Task[None] | None = None

    @property
    def is_handing_over(self) -> bool:
        return self._handing is not None and not self._handing.done()

    @property
    def is_announced(self) -> bool:
        """Whether the registry knows that this daemon drains, or did not confirm it in time."""
        return self._announcing is not None and self._announcing.done()

    async def begin(self, deadline_seconds: float, why: str, *, ends: bool = False) -> None:
        """Leave placement, and hand over until the deadline. A handover under way goes on under the new deadline.

        Returns before either has ended. ``why``: for the log. ``ends``: the daemon ends afterwards.
        """
        self._ends |= ends  # not after the lock: an ``undrain`` that waits for it must not follow
        async with self._changing:
            await self._end_handover()
            self._begin(deadline_seconds, why)

    def _begin(self, deadline_seconds: float, why: str) -> None:
        deadline = self._giver.plan(deadline_seconds)
        if self.state == "up":
            log.info("%s drains: %s", self._name, why)
            self.state = "draining"
            settle_seconds = min(SETTLE_SECONDS_MAX, deadline_seconds / 4)
            self._announcing = asyncio.create_task(_logged(self._announce(settle_seconds)), name="announce")
        self._handing = asyncio.create_task(_logged(self._hand_over(deadline)), name="handover")

    async def undrain(self) -> None:
        """Own shards again. What was handed over stays where it is: a second copy that may be evicted.

        Raises ``BadRequest`` if the daemon was told to end: by then it fetches nothing any more.
        """
        async with self._changing:
            if self._ends:
                raise BadRequest("the daemon was told to end; start it again for it to own shards")
            await self._end_handover()
            if self.state == "up":
                return
            await _ended(self._announcing)
            self._announcing = None
            self._settled.clear()
            self.state = "up"
            self._giver.reset()
            log.info("%s drains no more: it owns shards again", self._name)
            await self._registry.undrain()

    async def close(self) -> None:
        """End a handover that is under way."""
        async with self._changing:
            await self._end_handover()
            await _ended(self._announcing)
            self._giver.close()

    def status(self) -> DrainStatus:
        if self.state == "up":
            return DrainStatus(self._name, "up")
        progress, now = self._giver.progress, time.monotonic()
        return DrainStatus(
            self._name,
            "draining" if self.is_handing_over else "drained",
            deadline_seconds=max(progress.deadline - now, 0.0) if self.is_handing_over else 0.0,
            elapsed_seconds=min(now, progress.ended) - progress.began,
            held_bytes=progress.held_bytes,
            elsewhere_bytes=progress.elsewhere_bytes,
            handed_over_bytes=progress.handed_over_bytes,
            refused_bytes=progress.refused_bytes,
            left_bytes=progress.left_bytes,
            handed_over_shards=progress.handed_over_shards,
            left_shards=progress.left_shards,
            manifests=progress.manifests,
            receivers=dict(progress.receivers),
            why=progress.why,
        )

    async def _announce(self, settle_seconds: float) -> None:
        """Tell the registry. What is being fetched comes first, or its next owner would read it from the origin too."""
        until = time.monotonic() + settle_seconds
        while self._is_fetching() and time.monotonic() < until:  # noqa: ASYNC110 - fetches end in many places
            await asyncio.sleep(SETTLE_POLL_SECONDS)
        self._settled.set()
        await self._registry.drain()

    async def _hand_over(self, deadline: float) -> None:
        if deadline <= time.monotonic():
            return
        try:
            await self._settled.wait()
            await self._giver.run(deadline)
        finally:
            log.info("%s %s", self._name, _told(self.status()))

    async def _end_handover(self) -> None:
        await _ended(self._handing)
        self._handing = None


def _told(status: DrainStatus) -> str:
    """Return what a handover achieved, for the log."""
    if status.why:
        return f"hands nothing over: {status.why}"
    count, members = status.handed_over_shards, len(status.receivers)
    told = (
        f"handed over {format_size(status.handed_over_bytes)} in {count} shard{'s' * (count != 1)} to"
        f" {members} member{'s' * (members != 1)} in {status.elapsed_seconds:.1f} s;"
        f" {format_size(status.elsewhere_bytes)} were held elsewhere already"
    )
    if status.refused_bytes:
        told += f"; no other member had room for {format_size(status.refused_bytes)}"
    if status.left_bytes:
        shards = f"{status.left_shards} shard{'s' * (status.left_shards != 1)}"
        told += f"; {format_size(status.left_bytes)} in {shards} were not handed over"
    return told


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """The supervisor of a drain's tasks: a bug costs a handover, never the daemon."""
    try:
        await work
    except Exception:
        log.exception("handing over failed")


async def _ended(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task])

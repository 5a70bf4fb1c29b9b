"""The giving side of a drain: names what only this daemon holds to the next owners, most needed first.

First each next owner is asked, in batches, which of the files it holds: those are skipped. Then every receiver is
offered its files, a window at a time, and fetches them; all receivers at once. One that is full, slow, away or too old
costs its own files a moment: they are offered to the next owner in the ring. A member that drains receives nothing.
When the ring changes, what is left is distributed anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeVar

from quiver.domain import Domain
from quiver.errors import NotFound, QuiverError, Unavailable
from quiver.handover import ASKED_MAX, OFFERED_MAX, HandoverAnswer, HandoverRequest, Taken
from quiver.lookup import as_rows
from quiver.residency import Needs
from quiver.ring import Ring
from quiver.store import Kind
from quiver.transport.attempt import Attempt
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.draining.queues import Queues, by_receiver
from quiver_cacheserver.draining.stock import Item, Key, alike, request_about, statuses_in, stock_of
from quiver_cacheserver.rack.peers import RUNNERS_UP, RackPeers
from quiver_cacheserver.rack.registry import Registry
from quiver_cacheserver.residency.rooms import Rooms

log = logging.getLogger(__name__)

T = TypeVar("T")

RECEIVERS_AT_ONCE: Final = 32  # threads, each of which waits for one receiver
WINDOW_BYTES: Final = 512 << 20  # offered to one receiver at a time: half a second of 10 Gbit/s
ASK_SECONDS_MAX: Final = 2.0  # for which all wait for a slow receiver to say what it holds
STALL_SECONDS: Final = 5.0  # without a single file, after which others are asked
FAILURES_MAX: Final = 2  # requests in a row
ROUNDS_IN_VAIN_MAX: Final = 2  # of asking everybody
DELIVERIES_MAX: Final = 12  # attempts to deliver a file to one receiver
PAUSE_SECONDS: Final = 0.2


@dataclass(slots=True)
class Progress:
    """How far a handover is. Bytes and counts are of shards."""

    began: float = 0.0
    deadline: float = 0.0
    ended: float = inf
    held_bytes: int = 0
    elsewhere_bytes: int = 0
    handed_over_bytes: int = 0
    refused_bytes: int = 0
    held_shards: int = 0
    elsewhere_shards: int = 0
    handed_over_shards: int = 0
    refused_shards: int = 0
    manifests: int = 0
    receivers: Counter[str] = field(default_factory=Counter)
    why: str = ""

    @property
    def left_bytes(self) -> int:
        return self.held_bytes - self.elsewhere_bytes - self.handed_over_bytes - self.refused_bytes

    @property
    def left_shards(self) -> int:
        return self.held_shards - self.elsewhere_shards - self.handed_over_shards - self.refused_shards


class Giver:
    """Hands over what a daemon holds. Belongs to the event loop; requests run in threads."""

    def __init__(
        self, registry: Registry, name: str, peers: RackPeers, rooms: Rooms, needs: Needs, counters: Counters
    ) -> None:
        self.progress = Progress()
        self._registry = registry
        self._name = name
        self._peers = peers
        self._rooms = rooms
        self._needs = needs
        self._counters = counters
        self._threads = ThreadPoolExecutor(RECEIVERS_AT_ONCE, thread_name_prefix="quiver-handover")
        self._offered: set[Key] = set()  # since the daemon was last up; a receiver that holds one has fetched it
        self._handed: set[Key] = set()
        self._seen: set[Key] = set()  # in this run

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def reset(self) -> None:
        """Forget what was handed over: the daemon is up again."""
        self._offered.clear()
        self._handed.clear()

    def plan(self, deadline_seconds: float) -> float:
        """Begin to count anew; return the deadline on the monotonic clock."""
        now = time.monotonic()
        deadline = now + deadline_seconds
        why = "" if deadline_seconds else "no time was given for it"
        self.progress = Progress(now, deadline, ended=inf if deadline_seconds else now, why=why)
        return deadline

    async def run(self, deadline: float) -> None:
        """Hand over until all is handed over or refused, or until the deadline."""
        progress, now = self.progress, time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(loop.time() + deadline - now):
                self._seen.clear()
                stock = await self._new_stock()
                in_vain = 0
                while not (why := self._nobody(others := self._others())) and stock:
                    before = progress.left_bytes, progress.manifests
                    stock, is_done = await self._round(stock, others)
                    if stock and is_done:
                        in_vain = in_vain + 1 if before == (progress.left_bytes, progress.manifests) else 0
                        if in_vain >= ROUNDS_IN_VAIN_MAX:
                            break
                        await asyncio.sleep(PAUSE_SECONDS)
                    stock = stock or await self._new_stock()
                progress.why = why
        except TimeoutError:
            pass
        finally:
            progress.ended = time.monotonic()

    def _others(self) -> Ring:
        """Return the ring without this daemon."""
        ring = self._registry.ring
        return Ring.of(ring.rack, [it for it in ring.members if it.id != self._name], ring.replicas)

    def _nobody(self, others: Ring) -> str:
        """Return why there is nobody to hand over to; ``""`` if there is somebody."""
        if not self._peers.asks:
            return "with tokens and without certificates daemons cannot ask one another"
        if others.owning:
            return ""
        return "every other member drains as well" if others.members else "the rack has no other member"

    # -- what there is ------------------------------------------------------------------------------------------------

    async def _new_stock(self) -> list[Item]:
        """Return what is held and was not looked at before: at first all, later what readers had filled."""
        stock = [it for it in await self._in_thread(stock_of, self._rooms, self._needs) if it.key not in self._seen]
        self._seen.update(it.key for it in stock)
        self.progress.held_bytes += sum(it.size_bytes for it in stock if it.kind is Kind.SHARD)
        self.progress.held_shards += sum(it.kind is Kind.SHARD for it in stock)
        return stock

    # -- one distribution over the receivers ---------------------------------------------------------------------------

    async def _round(self, stock: Sequence[Item], others: Ring) -> tuple[list[Item], bool]:
        """Hand over with the ring as it is now. Return what is left, and whether all of it was tried."""
        ended: set[int] = set()
        ranked = await self._in_thread(others.rank, as_rows(it.digest for it in stock), others.replicas + RUNNERS_UP)
        names = [member.id for member in others.members]
        candidates = [[names[at] for at in row if at >= 0] for row in ranked.tolist()]
        async with asyncio.TaskGroup() as tasks:
            handing = tasks.create_task(self._hand_over(stock, candidates, ended))
            watching = tasks.create_task(self._watch_ring(others))
            await asyncio.wait({handing, watching}, return_when=asyncio.FIRST_COMPLETED)
            is_done = handing.done()
            handing.cancel()
            watching.cancel()
        return [it for at, it in enumerate(stock) if at not in ended], is_done

    async def _watch_ring(self, others: Ring) -> None:
        """Return once another member came, left, or changed."""
        while self._others() == others:
            await self._registry.changed()

    async def _hand_over(self, stock: Sequence[Item], candidates: list[list[str]], ended: set[int]) -> None:
        """Ask who holds what, then offer the rest. ``ended`` gets all items but those that nobody could take now."""
        wanted = by_receiver(candidates)
        answers = await asyncio.gather(*(self._held_by(name, stock, its) for name, its in wanted.items()))
        silent = {name for name, held in zip(wanted, answers, strict=True) if held is None}
        for name, held in zip(wanted, answers, strict=True):
            for at in held or ():
                if at not in ended:
                    ended.add(at)
                    self._is_held(stock[at], name)
        left = [at for at in range(len(stock)) if at not in ended]
        queues = Queues([[name for name in candidates[at] if name not in silent] for at in left])
        work = _Work(queues, [stock[at] for at in left], left, ended)
        async with asyncio.TaskGroup() as tasks:
            for name in queues.receivers:
                tasks.create_task(self._give(name, work))
        for at in queues.refused | queues.gone:
            ended.add(left[at])
        for at in queues.refused:
            item = work.items[at]
            self.progress.refused_bytes += item.size_bytes if item.kind is Kind.SHARD else 0
            self.progress.refused_shards += item.kind is Kind.SHARD

    async def _held_by(self, name: str, stock: Sequence[Item], wanted: Sequence[int]) -> list[int] | None:
        """Return which items a member holds; ``None`` if it does not answer, or drains."""
        held: list[int] = []
        ends_at = time.monotonic() + ASK_SECONDS_MAX
        for some in alike(stock, wanted, ASKED_MAX):
            items, answer = [stock[at] for at in some], None
            while answer is None:
                try:
                    left_seconds = max(ends_at - time.monotonic(), 0.0)
                    answer = await self._ask(name, items, request_about(self._name, items), left_seconds)
                except QuiverError as error:
                    if isinstance(error, NotFound) or time.monotonic() + PAUSE_SECONDS > ends_at:
                        log.info("%s is handed nothing: %s", name, error)
                        return None
                    await asyncio.sleep(PAUSE_SECONDS)  # it may be busy: what it holds must not be moved in vain
            if answer.state != "up":
                return None
            held += [at for at, taken in zip(some, statuses_in(answer), strict=True) if taken == Taken.HELD]
            ends_at = time.monotonic() + ASK_SECONDS_MAX
        return held

    async def _give(self, name: str, work: _Work) -> None:
        """Offer one receiver its files until nobody has any left, or it is given up."""
        failures, progressed_at = 0, time.monotonic()
        while work.queues.left:
            some = work.queues.take(name, work.fits)
            if not some:
                await work.changed.wait()
                progressed_at = time.monotonic()
                continue
            try:
                answer = await self._offer(name, work, some)
            except QuiverError as error:
                failures += 1
                is_hopeless = failures >= FAILURES_MAX and work.queues.has_other(some)
                if is_hopeless or isinstance(error, NotFound):
                    log.info("%s is handed nothing more: %s", name, error)
                    work.give_up(name, some)
                    return
                work.queues.again(name, some)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if answer.state != "up":
                work.give_up(name, some)
                return
            failures = 0
            pending = self._settle(name, work, some, answer)
            if len(pending) < len(some):
                progressed_at = time.monotonic()
            elif time.monotonic() - progressed_at > STALL_SECONDS and work.queues.has_other(pending):
                log.info("%s is handed nothing more: it has taken nothing for %.0f s", name, STALL_SECONDS)
                work.give_up(name, pending)
                return
            else:
                await asyncio.sleep(PAUSE_SECONDS)
            work.queues.again(name, pending)

    async def _offer(self, name: str, work: _Work, some: Sequence[int]) -> HandoverAnswer:
        items = [work.items[at] for at in some]
        self._offered.update(it.key for it in items)
        return await self._ask(name, items, request_about(self._name, items, take=True), inf)

    def _settle(self, name: str, work: _Work, some: Sequence[int], answer: HandoverAnswer) -> list[int]:
        """Take in what a receiver says of its files; return those that are still under way there."""
        pending: list[int] = []
        for at, taken in zip(some, statuses_in(answer), strict=True):
            if taken == Taken.PENDING:
                pending.append(at)
            elif taken in (Taken.HELD, Taken.TAKEN):
                self._is_held(work.items[at], name)
                work.end(at)
            elif taken == Taken.GONE:
                work.forget(at)
            elif taken == Taken.FAILED and work.may_retry(at):
                pending.append(at)
            else:
                work.refuse(at, full=taken == Taken.NO_ROOM)
        return pending

    def _is_held(self, item: Item, name: str) -> None:
        """Count a file that a receiver holds: handed over if it was offered, else held elsewhere before."""
        progress, size_bytes = self.progress, item.size_bytes
        if item.kind is Kind.MANIFEST:
            progress.manifests += item.key in self._offered
        elif item.key in self._offered:
            progress.handed_over_bytes += size_bytes
            progress.handed_over_shards += 1
            progress.receivers[name] += size_bytes
            if item.key not in self._handed:
                self._handed.add(item.key)
                self._counters.add("handed_over_bytes", size_bytes)
        else:
            progress.elsewhere_bytes += size_bytes
            progress.elsewhere_shards += 1

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _ask(
        self, name: str, items: Sequence[Item], request: HandoverRequest, seconds_max: float
    ) -> HandoverAnswer:
        """Send a request about files of one domain. Its thread ends when this coroutine is cancelled."""
        left_seconds = self.progress.deadline - time.monotonic()
        attempt = Attempt(limit_seconds=min(seconds_max, left_seconds))
        try:
            return await self._in_thread(self._asked, name, items[0].domain, request, attempt)
        finally:
            attempt.cancel()

    def _asked(self, name: str, domain: Domain, request: HandoverRequest, attempt: Attempt) -> HandoverAnswer:
        peer = self._peers.member(name, domain)
        if peer is None:
            raise Unavailable(name, "it did not answer a moment ago, or left the ring")
        return peer.handover(request, attempt)

    def _in_thread(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class _Work:
    """The files that are not where they should be, and the queues that they wait in."""

    def __init__(self, queues: Queues, items: Sequence[Item], numbers: Sequence[int], ended: set[int]) -> None:
        """``numbers``: under which each item counts as ``ended``."""
        self.queues = queues
        self.items = items
        self.changed = asyncio.Event()  # set, and replaced, whenever a receiver may have got more, or all is done
        self._numbers = numbers
        self._ended = ended
        self._attempts: Counter[int] = Counter()

    def fits(self, taken: Sequence[int], item: int) -> bool:
        """Whether one more item belongs into the same offer."""
        first, last = self.items[taken[0]], self.items[item]
        if (first.kind, first.domain) != (last.kind, last.domain) or len(taken) >= OFFERED_MAX:
            return False
        return sum(self.items[at].size_bytes for at in taken) + last.size_bytes <= WINDOW_BYTES

    def end(self, item: int) -> None:
        self._ended.add(self._numbers[item])
        self.queues.end(item)
        self._tell()

    def refuse(self, item: int, *, full: bool) -> None:
        self.queues.refuse(item, full=full)
        self._tell()

    def forget(self, item: int) -> None:
        """A file that was evicted here, or was wrong, cannot be handed over."""
        self.queues.forget(item)
        self._tell()

    def may_retry(self, item: int) -> bool:
        """Whether to offer a file that was not delivered to the same receiver once more; counts the attempt."""
        self._attempts[item] += 1
        return self._attempts[item] % DELIVERIES_MAX != 0

    def give_up(self, receiver: str, items: Iterable[int]) -> None:
        """Give a receiver up, and offer these, which it was offered, and all that waits for it to others."""
        self.queues.drop(receiver)
        for item in items:
            self.queues.refuse(item, full=False)
        self._tell()

    def _tell(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

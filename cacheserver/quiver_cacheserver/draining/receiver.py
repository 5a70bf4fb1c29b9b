"""The receiving side of a drain: what a draining daemon offers is given room, and fetched from it.

The receiver decides. It fetches by the path of every fill, so each byte is verified and the disk's limits hold; it has
room for what fits, and evicts for it only what is worth less (``quiver.residency.worth``). It never reads the origin
for an offer: if the giver does not deliver, whoever needs the shard has it filled as usual.

Fetches have threads of their own. All of the usual ones may wait for a slow origin when a machine is taken away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import DiskFailed, NotFound, OverCapacity, QuiverError
from quiver.handover import HandoverAnswer, HandoverRequest, Taken
from quiver.peer import PeerClient
from quiver.residency import Decision, Needs
from quiver.residency.worth import Offered, rooms_for
from quiver.store import Kind
from quiver_cacheserver.draining import worth
from quiver_cacheserver.manifests import Manifests
from quiver_cacheserver.names import name_in
from quiver_cacheserver.rack.peers import RackPeers
from quiver_cacheserver.residency.filler import Filler
from quiver_cacheserver.residency.fills import Fills
from quiver_cacheserver.residency.rooms import Rooms

log = logging.getLogger(__name__)

THREADS: Final = 4  # as many as fills have: each has a shard in memory
PENDING_MAX: Final = 512  # fetches under way and waiting, of all givers
# The dataset of a fetch that no manifest describes. Commitments of no known dataset claim room and nothing else.
NO_DATASET: Final = Digest(bytes(DIGEST_BYTES))


class _Room(NamedTuple):
    """What to evict for an offer, and which of it some consumer needs."""

    evict: tuple[Digest, ...]
    forced: tuple[Digest, ...]


class Receiver:
    """What this daemon takes over from others. Belongs to the event loop; fetches run in threads."""

    def __init__(
        self, needs: Needs, rooms: Rooms, peers: RackPeers, filler: Filler, manifests: Manifests, fills: Fills
    ) -> None:
        self.taken_bytes = 0
        self._needs = needs
        self._rooms = rooms
        self._inventory = rooms.store.inventory
        self._peers = peers
        self._filler = filler
        self._manifests = manifests
        self._fills = fills
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quiver-takeover")
        self._deciding = asyncio.Lock()  # one decision at a time, so that each sees the room that the last one took
        self._coming: dict[tuple[Kind, Digest], asyncio.Future[Taken]] = {}  # by name

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    async def answer(
        self, request: HandoverRequest, client: str, domain: Domain = SINGLE, *, trusted: bool = False
    ) -> HandoverAnswer:
        """Say what is held of the files that a giver names, and fetch the rest if it asks for that.

        Fetches that take longer than the request waits continue. ``client``: on whose behalf room is made, unless the
        giver is ``trusted`` to say for whom each shard is kept.
        """
        statuses = {
            kind: [self._status(kind, digest, domain) for digest in files]
            for kind, files in ((Kind.SHARD, request.shards), (Kind.MANIFEST, request.manifests))
        }
        if request.take:
            begun = await self._begin(request, statuses, client, domain, trusted=trusted)
            if begun:
                await asyncio.wait(set(begun.values()), timeout=request.wait_ms / 1000)
            for (kind, at), future in begun.items():
                statuses[kind][at] = _result(future)
        return HandoverAnswer(bytes(statuses[Kind.SHARD]), bytes(statuses[Kind.MANIFEST]))

    def _status(self, kind: Kind, digest: Digest, domain: Domain) -> Taken:
        if self._inventory.has(kind, digest, domain):
            return Taken.HELD
        return Taken.PENDING if (kind, name_in(domain, digest)) in self._coming else Taken.ABSENT

    # -- taking -------------------------------------------------------------------------------------------------------

    async def _begin(
        self,
        request: HandoverRequest,
        statuses: dict[Kind, list[Taken]],
        client: str,
        domain: Domain,
        *,
        trusted: bool,
    ) -> dict[tuple[Kind, int], asyncio.Future[Taken]]:
        """Begin to fetch what is absent, as far as there is room; return all fetches that are waited for."""
        giver = self._peers.member(request.giver, domain)
        absent = [at for at, status in enumerate(statuses[Kind.SHARD]) if status is Taken.ABSENT]
        async with self._deciding:
            rooms = await self._decide(request, absent, domain)
            evicting = set(self._needs.commitments.evicting)  # another decision may have chosen the same meanwhile
            for at in absent:
                decision = rooms[at]
                if giver is None or decision is None:
                    statuses[Kind.SHARD][at] = Taken.FAILED if giver is None else Taken.NO_ROOM
                elif len(self._coming) >= PENDING_MAX or not evicting.isdisjoint(decision.evict):
                    statuses[Kind.SHARD][at] = Taken.PENDING
                elif (Kind.SHARD, decision.shard) not in self._coming:
                    holder = request.holder(at) if trusted else client
                    self._take_shard(request.shards[at], decision, giver, holder, domain)
        for at, status in enumerate(statuses[Kind.MANIFEST]):
            if status is Taken.ABSENT:
                statuses[Kind.MANIFEST][at] = Taken.FAILED if giver is None else Taken.PENDING
                if giver is not None and len(self._coming) < PENDING_MAX:
                    self._take_manifest(request.manifests[at], giver, domain)
        return {
            (kind, at): future
            for kind, files in ((Kind.SHARD, request.shards), (Kind.MANIFEST, request.manifests))
            for at, digest in enumerate(files)
            if (future := self._coming.get((kind, name_in(domain, digest)))) is not None
        }

    def _take_shard(self, digest: Digest, decision: Decision, giver: PeerClient, client: str, domain: Domain) -> None:
        self._needs.commitments.add(decision)
        work = partial(self._filler.take_over, digest, int(decision.size_bytes), giver, client, domain)
        future = self._start(Kind.SHARD, decision.shard, work)

        def ended(done: asyncio.Future[Taken]) -> None:
            self._needs.commitments.end(decision.recipe)
            if _result(done) is Taken.TAKEN:
                self.taken_bytes += int(decision.size_bytes)
                self._fills.arrived(decision.shard)

        future.add_done_callback(ended)

    def _take_manifest(self, digest: Digest, giver: PeerClient, domain: Domain) -> None:
        self._start(Kind.MANIFEST, name_in(domain, digest), partial(self._manifests.take_over, digest, giver, domain))

    def _start(self, kind: Kind, name: Digest, work: Callable[[], object]) -> asyncio.Future[Taken]:
        future = asyncio.get_running_loop().run_in_executor(self._threads, _taken, work)
        self._coming[kind, name] = future
        future.add_done_callback(lambda _: self._coming.pop((kind, name), None))
        return future

    # -- room ---------------------------------------------------------------------------------------------------------

    async def _decide(
        self, request: HandoverRequest, absent: Sequence[int], domain: Domain
    ) -> dict[int, Decision | None]:
        """Decide what to evict for each of the absent shards, which the giver names in the order of their need."""
        names = {at: name_in(domain, request.shards[at]) for at in absent}
        worths = worth.of_absent(self._needs, self._rooms, [request.shards[at] for at in absent], [*names.values()])
        offered = [Offered(request.sizes[at], float(worths[i])) for i, at in enumerate(absent)]
        free_bytes = self._rooms.free_bytes()
        dataset_of = self._datasets_of(list(names.values()))
        if sum(it.size_bytes for it in offered) <= free_bytes:
            return {at: Decision(names[at], dataset_of[names[at]], float(request.sizes[at])) for at in absent}
        commitments = self._needs.commitments
        spared = [*commitments.evicting, *commitments.coming]
        loop = asyncio.get_running_loop()
        rooms = await loop.run_in_executor(None, self._rooms_for, offered, free_bytes, spared)
        decisions: dict[int, Decision | None] = dict.fromkeys(absent)
        for at, room in zip(absent, rooms, strict=True):
            if room is not None:
                size_bytes = float(request.sizes[at])
                decisions[at] = Decision(names[at], dataset_of[names[at]], size_bytes, room.evict, room.forced)
        return decisions

    def _rooms_for(
        self, offered: Sequence[Offered], free_bytes: float, spared: Collection[Digest]
    ) -> list[_Room | None]:
        """In a thread, since all files are looked at: decide what to evict for each offer. ``spared`` are not."""
        shelf = self._rooms.shelf()
        may_go = ~self._rooms.pinned_of(shelf.digests)
        may_go[shelf.rows_of(spared)] = False
        held = np.flatnonzero(may_go)
        needed, values = shelf.needed[held], worth.of_held(self._needs, shelf)[held]
        rooms = rooms_for(offered, free_bytes, shelf.sizes[held], values, shelf.idle[held])

        def named(rows: npt.NDArray[np.int64]) -> tuple[Digest, ...]:
            return tuple(map(shelf.name, held[rows].tolist()))

        return [None if room is None else _Room(named(room), named(room[needed[room] > 0])) for room in rooms]

    def _datasets_of(self, names: Sequence[Digest]) -> dict[Digest, Digest]:
        """Return for each shard a reported dataset that it is of: so the policy counts it as coming."""
        found = dict.fromkeys(names, NO_DATASET)
        known = [name for name in names if self._needs.shards.get(name) is not None]
        slots = self._needs.slots_of(known)
        for dataset, it in self._needs.datasets.items() if known else ():
            for at in np.flatnonzero(np.isin(slots, it.slots)).tolist():
                found[known[at]] = dataset
        return found


def _result(future: asyncio.Future[Taken]) -> Taken:
    """Return how far a fetch is. One that failed unexpectedly, or was cancelled as this daemon ends, has failed."""
    if not future.done():
        return Taken.PENDING
    if future.cancelled():
        return Taken.FAILED
    if (error := future.exception()) is not None:
        log.error("taking a shard over failed unexpectedly", exc_info=error)
        return Taken.FAILED
    return future.result()


def _taken(work: Callable[[], object]) -> Taken:
    """In a thread: fetch, and return what came of it."""
    try:
        return Taken.HELD if work() is False else Taken.TAKEN
    except (OverCapacity, DiskFailed):  # a disk that takes no files has no room either: another member may have some
        return Taken.NO_ROOM
    except NotFound:
        return Taken.GONE
    except QuiverError as error:
        log.info("not taken over: %s", error)
        return Taken.FAILED

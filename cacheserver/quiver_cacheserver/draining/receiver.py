"""The receiving side of a drain: what a draining daemon offers is given room, and fetched from it.

The receiver decides. It fetches by the path of every fill, so each byte is verified and the disk's limits hold; it has
room for what fits, and evicts for it only what is worth less (``quiver.residency.worth``). It never reads the origin
for an offer: if the giver does not deliver, whoever needs the shard has it filled as usual.

Fetches have threads of their own. All of the usual ones may wait for a slow origin when a machine is taken away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np

from quiver.digest import DIGEST_BYTES, Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import OverCapacity, QuiverError
from quiver.handover import HandoverAnswer, HandoverRequest, Taken
from quiver.lookup import as_rows
from quiver.peer import PeerClient
from quiver.residency import Decision, Needs
from quiver.residency.eviction import IDLE_SECONDS
from quiver.residency.worth import Offered, rooms_for, worth_of
from quiver.store import Kind
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
            begun = self._begin(request, statuses, client, domain, trusted=trusted)
            if begun:
                await asyncio.wait(set(begun.values()), timeout=request.wait_ms / 1000)
            for (kind, at), future in begun.items():
                statuses[kind][at] = future.result() if future.done() else Taken.PENDING
        return HandoverAnswer(bytes(statuses[Kind.SHARD]), bytes(statuses[Kind.MANIFEST]))

    def _status(self, kind: Kind, digest: Digest, domain: Domain) -> Taken:
        if self._inventory.has(kind, digest, domain):
            return Taken.HELD
        return Taken.PENDING if (kind, name_in(domain, digest)) in self._coming else Taken.ABSENT

    # -- taking -------------------------------------------------------------------------------------------------------

    def _begin(
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
        rooms = self._decide(request, absent, domain)
        for at in absent:
            decision = rooms[at]
            if giver is None or decision is None:
                statuses[Kind.SHARD][at] = Taken.FAILED if giver is None else Taken.NO_ROOM
            elif len(self._coming) >= PENDING_MAX:
                statuses[Kind.SHARD][at] = Taken.PENDING
            else:
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
            if not done.cancelled() and done.result() is Taken.TAKEN:
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

    def _decide(self, request: HandoverRequest, absent: Sequence[int], domain: Domain) -> dict[int, Decision | None]:
        """Decide what to evict for each of the absent shards, which the giver names in the order of their need."""
        names = {at: name_in(domain, request.shards[at]) for at in absent}
        worth = self._worth_of_offers([request.shards[at] for at in absent], [*names.values()])
        offered = [Offered(request.sizes[at], worth[i]) for i, at in enumerate(absent)]
        free_bytes = self._rooms.free_bytes()
        if sum(it.size_bytes for it in offered) <= free_bytes:
            return {at: Decision(names[at], NO_DATASET, float(request.sizes[at])) for at in absent}
        shelf, commitments = self._rooms.shelf(), self._needs.commitments
        kept = np.ones(len(shelf), bool)
        kept[shelf.rows_of([*commitments.evicting, *commitments.coming])] = False
        at_all = np.flatnonzero(kept)
        counts, _ = self._needs.shown.counted(shelf.digests[at_all])
        needed, idle = shelf.needed[at_all], shelf.idle[at_all]
        in_use = shelf.in_use[at_all] | (idle < IDLE_SECONDS)
        held_worth = worth_of(counts, needed >= 0, in_use)
        rooms = rooms_for(offered, free_bytes, shelf.sizes[at_all], held_worth, idle)
        decisions: dict[int, Decision | None] = dict.fromkeys(absent)
        for at, room in zip(absent, rooms, strict=True):
            if room is not None:
                evict = tuple(shelf.name(int(row)) for row in at_all[room])
                forced = tuple(shelf.name(int(row)) for row in at_all[room[needed[room] > 0]])
                decisions[at] = Decision(names[at], NO_DATASET, float(request.sizes[at]), evict, forced)
        return decisions

    def _worth_of_offers(self, digests: Sequence[Digest], names: Sequence[Digest]) -> list[float]:
        """Return what the offered shards are worth to the consumers that this daemon hears: not what the giver says."""
        shown = self._needs.shown
        slots = shown.shards.rows_of(as_rows(names)) if len(shown.shards) else np.full(len(names), -1)
        counts = np.where(slots >= 0, shown.counts[slots], 0) if len(shown.counts) else np.zeros(len(names), np.int64)
        in_use = self._rooms.in_use_of(as_rows(digests))
        worth: list[float] = worth_of(counts.astype(np.int64), slots >= 0, in_use).tolist()
        return worth


def _taken(work: Callable[[], object]) -> Taken:
    """In a thread: fetch, and return what came of it."""
    try:
        return Taken.HELD if work() is False else Taken.TAKEN
    except OverCapacity:
        return Taken.NO_ROOM
    except QuiverError as error:
        log.info("not taken over: %s", error)
        return Taken.FAILED
    except RuntimeError:  # this daemon ends, and with it its threads
        return Taken.FAILED

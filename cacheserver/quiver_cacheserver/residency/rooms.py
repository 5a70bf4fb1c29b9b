"""Room for a daemon's files: what to evict for fills, uploads and manifests, decided in one place by one policy.

Nothing is evicted for a shard that no source has: room is made last, once a shard was fetched and verified, or the
first megabytes of an upload have arrived. A fetch by the policy names what it evicts (``Decision.evict``). If that
frees too little by then, or the fetch is a reader's, this module decides what to evict, under the same lock as the
reservation. The policy is ``quiver.residency.eviction``; this module supplies its inputs. Manifests have a share of the
capacity: one beyond it evicts other manifests before any shard.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.lookup import DigestRows, as_rows
from quiver.residency import Candidates, Decision, Needs, OnBehalf, Shelf
from quiver.residency.eviction import IDLE_SECONDS
from quiver.store import Evict, Kind, MemoryInventory, Store, Writing
from quiver.store.table import FileListing
from quiver_cacheserver.budget import Budgets, Cost
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.names import name_in
from quiver_cacheserver.opened import READ_LEASE_SECONDS, OpenManifests
from quiver_cacheserver.pins import Pins
from quiver_cacheserver.residency.holders import Holders

MANIFESTS_SHARE: Final = 4  # manifests may take a quarter of the capacity; usually they take a thousandth


class _LookedUp(NamedTuple):
    """The slots in ``Needs`` of the files held at the last lookup, ordered by stamp."""

    shards: DigestRows
    keys: Sequence[npt.NDArray[np.uint8] | None]
    stamps: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]  # (n, keys): under each name; -1 for none


class Rooms:
    """Decides what to evict for whom. Safe from threads; the event loop calls only ``shelf`` and ``free_bytes``."""

    def __init__(
        self,
        store: Store[MemoryInventory],
        needs: Needs,
        opened: OpenManifests,
        budgets: Budgets,
        counters: Counters,
        pins: Pins | None = None,
    ) -> None:
        self.holders = Holders()
        self.pins = Pins(store) if pins is None else pins
        self.store = store
        self._inventory = store.inventory
        self._needs = needs
        self._opened = opened
        self._budgets = budgets
        self.counters = counters
        self._looked_up = _LookedUp(needs.shown.shards, (), np.zeros(0, np.int64), np.zeros((0, 0), np.int64))
        self._lock = threading.Lock()  # held while room is decided on and reserved, never while data is moved

    def check(self, kind: Kind, digest: Digest, size_bytes: int, client: str = "", domain: Domain = SINGLE) -> None:
        """Raise what ``reserve`` would raise now for lack of room. Evicts and reserves nothing."""
        with self._lock:
            self._evictions(kind, name_in(domain, digest), size_bytes, client)

    @contextlib.contextmanager
    def reserve(
        self, kind: Kind, digest: Digest, size_bytes: int, client: str = "", domain: Domain = SINGLE
    ) -> Iterator[Writing]:
        """Reserve room on behalf of a client, ``""`` for several, evicting what may be evicted for it.

        A file that only other sharing domains hold takes room once more while it is written, as an absent one does.

        Raises ``OverCapacity``, ``DiskFailed``. Without a ``commit`` inside the block nothing is kept.
        """
        with contextlib.ExitStack() as stack:
            with self._lock:
                evict = self._evictions(kind, name_in(domain, digest), size_bytes, client)
                self._charge(evict, client)
                writing = stack.enter_context(self.store.reserve(kind, digest, size_bytes, evict, domain))
            yield writing

    def free_bytes(self) -> float:
        """Return the room that is free, and promised to nothing that is coming; negative if there is too little.

        A decision that evicts more than its own shard takes has the rest to itself until it has done so: another one
        may be carried out first, and has to find its room without.
        """
        inventory, commitments = self._inventory, self._needs.commitments
        promised_bytes = 0.0
        for shard, size_bytes in commitments.promised():
            if not inventory.has(Kind.SHARD, shard):
                evict = {each for decision in commitments.decisions_of(shard) for each in decision.evict}
                freed_bytes = sum(inventory.size(Kind.SHARD, each) for each in evict)
                promised_bytes += max(size_bytes - freed_bytes, 0.0)
        reserved_bytes = inventory.reserved_bytes()
        free_bytes = self.store.capacity_bytes - (inventory.resident_bytes() - reserved_bytes)
        return free_bytes - max(reserved_bytes, promised_bytes)  # what is coming reserves its room when it was fetched

    def shards_bytes_max(self) -> float:
        """Return the room that there is for shards: all that manifests do not take."""
        return float(self.store.capacity_bytes - int(self._inventory.listing(Kind.MANIFEST).sizes.sum()))

    def with_room(self, decision: Decision, client: str) -> Decision | None:
        """Return the decision with everything to evict for it as of now; ``None`` if that frees too little."""
        given = sum(self._inventory.size(Kind.SHARD, digest) for digest in decision.evict)
        lacking_bytes = decision.size_bytes - self.free_bytes() - given
        if lacking_bytes <= 0:
            return decision
        shelf, commitments = self.shelf(), self._needs.commitments
        candidates = Candidates(shelf, without=[*commitments.evicting, *commitments.coming])
        chosen = candidates.choose(lacking_bytes, self.on_behalf(client))
        return None if chosen is None else decision._replace(evict=(*decision.evict, *map(shelf.name, chosen)))

    def shelf(self) -> Shelf:
        """Return the shards that are held, and which of them may be evicted."""
        held = self._inventory.listing(Kind.SHARD)
        idle = self._inventory.now() - held.used
        needed = self._needed(held)
        in_use = needed < 0  # if unknown, the manifests say whether it is
        asked = np.flatnonzero(in_use & (idle >= IDLE_SECONDS))
        in_use[asked] = self._opened.in_use_of(held.digests[asked])
        asked = np.flatnonzero((needed < 0) & (idle >= READ_LEASE_SECONDS[0]))
        lapsed = asked[self._opened.lapsed_of(held.digests[asked])]
        needed[lapsed], in_use[lapsed] = 0, False
        pinned = self.pins.within_limit(held.digests, held.sizes)
        needed[pinned], in_use[pinned] = 1, True
        return Shelf(held.digests, held.sizes, idle, needed, in_use, self.holders.of(held.names))

    def pinned_of(self, shards: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return which of these ``(n, 32)``, held or not, are of pinned datasets."""
        return self.pins.among(shards)

    def in_use_of(self, shards: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return which of these ``(n, 32)``, held or not, are of datasets that were read recently."""
        return self._opened.in_use_of(shards)

    def _needed(self, held: FileListing) -> npt.NDArray[np.int8]:
        """Return ``Needs.needed_of``, looking up only files that are new since the last call."""
        shown, before = self._needs.shown, self._looked_up
        slots = np.full((len(held.stamps), len(shown.keys)), -1, np.int64)
        new = np.ones(len(slots), bool)
        if before.shards is shown.shards and before.keys is shown.keys and len(before.stamps):
            at = np.minimum(np.searchsorted(before.stamps, held.stamps), len(before.stamps) - 1)
            new = before.stamps[at] != held.stamps
            slots[~new] = before.slots[at[~new]]
        slots[new] = shown.slots_of(held.digests[new])
        order = np.argsort(held.stamps)
        self._looked_up = _LookedUp(shown.shards, shown.keys, held.stamps[order], slots[order])
        return shown.needed(slots)

    def on_behalf(self, client: str) -> OnBehalf:
        """Return on whose behalf room is made for a client. One that had too much evicted may only replace its own."""
        if not client:
            return OnBehalf()
        spent = self._budgets.left(client, Cost.EVICTIONS, time.monotonic()) <= 0
        return OnBehalf(self.holders.number(client), spent)

    def on_behalf_of(self, clients: Mapping[Digest, str]) -> dict[Digest, OnBehalf]:
        """Return the same by dataset, of those whose consumers are at one address."""
        return {dataset: self.on_behalf(client) for dataset, client in clients.items() if client}

    def out_of_budget(self, clients: Set[str]) -> set[str]:
        """Return the clients for which no needed shard may be evicted now."""
        now = time.monotonic()
        return {client for client in clients if self._budgets.left(client, Cost.EVICTIONS, now) <= 0}

    def charge_forced(self, clients: Set[str]) -> None:
        """Charge clients for a needed shard that is evicted on their behalf."""
        now = time.monotonic()
        for client in clients:
            self._budgets.charge(client, Cost.EVICTIONS, 1, now)

    # -- what is evicted ----------------------------------------------------------------------------------------------

    def _evictions(self, kind: Kind, name: Digest, size_bytes: int, client: str) -> Evict:
        """Return what to evict so that ``size_bytes`` fit. Raises ``OverCapacity``."""
        lacking_bytes = self.store.lacking(size_bytes)
        if not lacking_bytes:
            return ()
        decided: list[tuple[Kind, Digest]] = []
        for victim in self._decided(name) if kind is Kind.SHARD else ():
            if lacking_bytes > 0 and (victim_bytes := self._inventory.size(Kind.SHARD, victim)):
                decided.append((Kind.SHARD, victim))
                lacking_bytes -= victim_bytes
        if lacking_bytes <= 0:
            return decided
        chosen = self._chosen(kind, lacking_bytes, client)
        if chosen is None:
            raise self.store.full()
        return [*decided, *chosen]

    def _decided(self, shard: Digest) -> list[Digest]:
        """Return what was decided to evict for a shard, by name, without what came to be needed or pinned since."""
        needs = self._needs
        decided = [
            victim
            for decision in needs.commitments.decisions_of(shard)
            for victim in decision.evict
            if victim in decision.forced or needs.needed_of(as_rows([victim]))[0] != 1
        ]
        pinned = self.pins.among(as_rows(decided)) if decided else ()
        return [victim for victim, stays in zip(decided, pinned, strict=True) if not stays]

    def _chosen(self, kind: Kind, free_bytes: int, client: str) -> Evict | None:
        """Return what to evict beyond the decision to free ``free_bytes``; ``None`` if that is impossible."""
        manifests = self._manifests_shelf()
        excess = int(manifests.sizes.sum()) - self.store.capacity_bytes // MANIFESTS_SHARE
        evict: list[tuple[Kind, Digest]] = []
        if excess + (free_bytes if kind is Kind.MANIFEST else 0) > 0:
            some = self._some(Kind.MANIFEST, manifests, free_bytes, client)
            if some is None and kind is Kind.MANIFEST:
                return None
            evict += some or ()
            free_bytes -= sum(self._inventory.size(*it) for it in some or ())
        if free_bytes > 0:
            shards = self._some(Kind.SHARD, self.shelf(), free_bytes, client)
            if shards is not None:
                evict += shards
            elif evict:
                return None
            else:  # manifests are small and needed for every fill: last
                return self._some(Kind.MANIFEST, manifests, free_bytes, client)
        return evict

    def _some(self, kind: Kind, shelf: Shelf, free_bytes: int, client: str) -> Evict | None:
        self.holders.prune(self._is_held, self._inventory.count(Kind.SHARD) + self._inventory.count(Kind.MANIFEST))
        candidates = Candidates(shelf, without=self._needs.commitments.evicting if kind is Kind.SHARD else ())
        chosen = candidates.choose(free_bytes, self.on_behalf(client))
        return None if chosen is None else [(kind, shelf.name(at)) for at in chosen]

    def _manifests_shelf(self) -> Shelf:
        held = self._inventory.listing(Kind.MANIFEST)
        kept, used = self._needs.manifests | self.pins.manifests, self._opened.recently_used()
        return Shelf(
            held.digests,
            held.sizes,
            self._inventory.now() - held.used,
            np.asarray([1 if digest in kept else -1 for digest in held.names], np.int8),
            np.asarray([digest in used for digest in held.names], bool),
            self.holders.of(held.names),
        )

    def _is_held(self, digest: Digest) -> bool:
        return self._inventory.has(Kind.SHARD, digest) or self._inventory.has(Kind.MANIFEST, digest)

    def _charge(self, evict: Evict, client: str) -> None:
        """Count evictions: of needed shards, and, against the client's budget, of other clients' files."""
        if not evict:
            return
        shards = as_rows(digest for kind, digest in evict if kind is Kind.SHARD)
        self.counters.add("forced_drops", int((self._needs.needed_of(shards) > 0).sum()))
        others = int((self.holders.of([digest for _, digest in evict]) != self.holders.number(client)).sum())
        if client and others:
            self._budgets.charge(client, Cost.EVICTIONS, others, time.monotonic())

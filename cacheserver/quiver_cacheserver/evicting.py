"""What a daemon evicts on behalf of whom: what nobody needs first, and of others' no more than is fair.

The policy is ``quiver.residency.choose_fairly``; here is what it is told. Manifests have a share of the capacity: past
it, manifests are evicted for one another, before any shard is.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency import StoredFile
from quiver_cacheserver.fairness import SHARED, Shelf, choose_fairly
from quiver.store import Kind, MemoryInventory
from quiver_cacheserver.budget import Cost

if TYPE_CHECKING:
    from quiver_cacheserver.node import Node

MANIFESTS_SHARE: Final = 4  # manifests may take a quarter of the capacity; usually they take a thousandth
HOLDERS_MAX: Final = 4096  # addresses told apart; beyond that what comes is everybody's
PRUNED_FROM: Final = 1024


class Holders:
    """For which client each shard was filled, as long as no other one read it. Safe from threads."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next = itertools.count(SHARED + 1)
        self._of: dict[Digest, int] = {}
        self._lock = threading.Lock()

    def brought(self, digest: Digest, client: str) -> None:
        """A shard came on behalf of a client; ``""``: of several, or of none."""
        number = self.number(client)
        if number == SHARED:
            self._of.pop(digest, None)
        else:
            self._of[digest] = number

    def read(self, digests: Iterable[Digest], client: str) -> None:
        """A client reads shards: what was filled for another one is everybody's from now on."""
        own = self._numbers.get(client, SHARED)
        for digest in digests:
            if self._of.get(digest, own) != own:
                self._of.pop(digest, None)

    def number(self, client: str) -> int:
        """Return the number of a client, ``SHARED`` for nobody in particular."""
        if not client:
            return SHARED
        with self._lock:
            if client not in self._numbers and len(self._numbers) >= HOLDERS_MAX:
                live = dict.fromkeys(list(self._of.values()))
                self._numbers = {name: number for name, number in self._numbers.items() if number in live}
                if len(self._numbers) >= HOLDERS_MAX:
                    return SHARED
            return self._numbers.setdefault(client, next(self._next))

    def of(self, held: Sequence[StoredFile]) -> list[int]:
        """Return the holder of each."""
        return [self._of.get(item.digest, SHARED) for item in held]

    def prune(self, held: Callable[[Digest], bool], count: int) -> None:
        """Forget what is not held any more, now and then: ``count`` things are."""
        if len(self._of) > count + PRUNED_FROM:
            for digest in [digest for digest in list(self._of) if not held(digest)]:
                self._of.pop(digest, None)


class Evicting:
    """``Store.choose`` of a daemon. Called in threads, under the lock under which room is given away."""

    def __init__(self, node: Node) -> None:
        inventory = node.store.inventory
        assert isinstance(inventory, MemoryInventory)
        self._node = node
        self._inventory = inventory
        self.holders = Holders()

    def choose(
        self, wanted: Kind, free_bytes: int, client: str, for_real: bool
    ) -> Mapping[Kind, Sequence[StoredFile]] | None:
        """Return what to evict so that something of a kind finds so many more bytes; ``None`` if that cannot be.

        ``for_real``: it is evicted then, which costs the client.
        """
        manifests = self._inventory.held(Kind.MANIFEST)
        excess = sum(item.size_bytes for item in manifests) - self._node.store.capacity_bytes // MANIFESTS_SHARE
        evicted: dict[Kind, Sequence[StoredFile]] = {}
        if excess + (free_bytes if wanted is Kind.MANIFEST else 0) > 0:
            some = self._some(Kind.MANIFEST, manifests, free_bytes, client, for_real)
            if some is None and wanted is Kind.MANIFEST:
                return None
            evicted[Kind.MANIFEST] = some or ()
            free_bytes -= sum(item.size_bytes for item in some or ())
        if free_bytes > 0:
            shards = self._some(Kind.SHARD, self._inventory.held(Kind.SHARD), free_bytes, client, for_real)
            if shards is not None:
                evicted[Kind.SHARD] = shards
            elif evicted:
                return None
            else:  # manifests are small and needed for every fill: last
                some = self._some(Kind.MANIFEST, manifests, free_bytes, client, for_real)
                return None if some is None else {Kind.MANIFEST: some}
        return evicted

    def _is_held(self, digest: Digest) -> bool:
        return self._inventory.has(Kind.SHARD, digest) or self._inventory.has(Kind.MANIFEST, digest)

    def _some(self, kind: Kind, held: list[StoredFile], free_bytes: int, client: str, for_real: bool) -> list[StoredFile] | None:
        self.holders.prune(self._is_held, self._inventory.count(Kind.SHARD) + self._inventory.count(Kind.MANIFEST))
        names = as_rows(item.digest for item in held)
        residency, manifests = self._node.residency, self._node.manifests
        used = np.fromiter((item.used for item in held), np.float64, len(held))
        shards = kind is Kind.SHARD
        shelf = Shelf(
            sizes=np.fromiter((item.size_bytes for item in held), np.int64, len(held)),
            idle=self._inventory.now() - used,
            needed=residency.needed_of(names) if shards else residency.reported_of(held),
            in_use=manifests.in_use_of(names) if shards else manifests.used_of(held),
            holders=np.fromiter(self.holders.of(held), np.int64, len(held)),
        )
        if shards:
            shelf.idle[_among(names, residency.given_up())] = np.inf  # evicting them was decided already
        now, holder, budgets = time.monotonic(), self.holders.number(client), self._node.budgets
        # One who had too much evicted takes the room of what is its own alone, which costs nobody else anything.
        if client and budgets.left(client, Cost.EVICTIONS, now) <= 0:
            shelf.needed[shelf.holders != holder] = 1
        chosen = choose_fairly(shelf, free_bytes, holder if client else None)
        if chosen is None:
            return None
        others = int((shelf.holders[chosen] != holder).sum())
        if client and others and for_real:
            budgets.charge(client, Cost.EVICTIONS, others, now)
        return [held[at] for at in chosen]


def _among(names: npt.NDArray[np.uint8], few: Iterable[Digest]) -> npt.NDArray[np.bool_]:
    """Return which of many digests ``(n, 32)`` are among a few."""
    found = np.zeros(len(names), bool)
    for digest in few:
        found |= (names == np.frombuffer(digest, np.uint8)).all(axis=1)
    return found

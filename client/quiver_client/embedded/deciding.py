"""What this process fetches into the folder, and what is evicted for it: the decisions of ``quiver.residency``.

No daemon decides for all: each process decides for its own consumers, by the needs of all consumers. Every fill of this
process, a prefetch or a reader's miss, has a decision that names every shard evicted for it. From the commitment of the
decision until its end, its shard counts as coming and the evicted ones as gone. A process may find that another one has
evicted the same shards before it; if the room does not suffice then, it decides again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from functools import partial
from typing import Final

from quiver.digest import Digest
from quiver.manifest import Manifest
from quiver.residency import Candidates, Decision, Needs, OriginEstimate, Recipe, Situation, choose_idle, decide
from quiver.store import Evict, FolderInventory, Kind, Store
from quiver.store.files import disk_errors
from quiver_client.embedded.folder_contents import FolderContents
from quiver_client.embedded.shared_needs import SharedNeeds

FRESH_SECONDS: Final = 0.5  # a reader's fill reads other processes' reports again only if they are older


class FolderDecider:
    """The decisions of one process on one dataset. Safe from threads."""

    def __init__(self, manifest: Manifest, store: Store[FolderInventory], needs: SharedNeeds) -> None:
        self._manifest = manifest
        self._store = store
        self._shared = needs
        self._contents = FolderContents(store)
        self._elsewhere: set[Recipe] = set()  # shards that other processes are filling

    def look(self, *, at_once: bool = False) -> None:
        """Scan the folder if it is time to, or ``at_once``. Raises ``OSError``; the last scan stays valid then."""
        with self._shared.locked():
            if not self._contents.begin_scan(time.monotonic(), at_once=at_once):
                return
        found = self._contents.scan()
        with self._shared.locked():
            self._contents.replace(found)
            self._shared.set_held(self._contents.files.keys())

    def fetches(
        self,
        consumer: bytes,
        fetches_max: int,
        origin: OriginEstimate,
        *,
        avoid: Iterable[int],
        elsewhere: Collection[Digest],
    ) -> list[Decision]:
        """Return the decisions to fetch now for a consumer of this process, committed: the caller ends each of them.

        ``avoid``: shards that failed a moment ago. ``elsewhere``: shards that other processes are filling.
        """
        now = time.monotonic()
        with self._shared.locked() as needs:
            self._commit_elsewhere(needs, elsewhere)
            needs.expire(now)
            situation = Situation(
                now=now,
                free_bytes=self._free_bytes(needs),
                fetches_max=fetches_max,
                origin=origin,
                shelf=partial(self._contents.shelf, self._shared.needed_of),
                only=consumer,
                avoid={self._recipe(self._manifest.shard_digest(shard)) for shard in avoid},
            )
            decisions = decide(needs, situation)
            for decision in decisions:
                needs.commit(decision)
            return decisions

    def passes_by(self, shard: int) -> bool:
        """Whether readers read an absent shard's samples from the origin, and the shard is not filled for them.

        So if all uses to come of the dataset are known, since then the policy fetches what is worth its room.
        """
        recipe = self._recipe(self._manifest.shard_digest(shard))
        with self._shared.locked() as needs:
            if not needs.is_planned(recipe.dataset) or recipe in needs.commitments:
                return False
            return self._free_bytes(needs) < float(self._manifest.tables.shard_sizes[shard])

    def for_reader(self, shard: int) -> Decision:
        """Return the decision to fill a shard that a reader misses, committed. It never evicts a needed shard.

        If no room can be made it evicts nothing, and the store rejects the fill. Raises ``DiskFailed``.
        """
        digest, size_bytes = self._manifest.shard_digest(shard), int(self._manifest.tables.shard_sizes[shard])
        recipe = self._recipe(digest)
        with disk_errors(self._store.root, "read from"):
            self.look()
        with self._shared.locked() as needs:
            is_short = self._free_bytes(needs) < size_bytes
        if is_short:
            self._shared.listen(FRESH_SECONDS)
        with self._shared.locked() as needs:
            committed = needs.commitments.get(recipe)
            if committed is not None and recipe not in self._elsewhere:
                return committed
            self._elsewhere.discard(recipe)
            evict = self._unneeded(needs, size_bytes - self._free_bytes(needs))
            decision = Decision(digest, self._manifest.digest, float(size_bytes), evict or ())
            needs.commitments.add(decision)
            return decision

    def instead(self, decision: Decision, lacking_bytes: int) -> Evict | None:
        """Decide again what to evict for a decision, so that ``lacking_bytes`` become free: others took the room.

        ``None`` if there is nothing to evict: this evicts no needed shard, which the next decision may. Raises
        ``DiskFailed``.
        """
        with disk_errors(self._store.root, "read from"):
            self.look(at_once=True)
        self._shared.listen(FRESH_SECONDS)
        with self._shared.locked() as needs:
            self._settle(decision.evict)
            needs.end(decision.recipe)
            evict = self._unneeded(needs, lacking_bytes)
            needs.commitments.add(decision._replace(evict=evict or (), forced=(), starving=()))
            if evict is not None:
                return self._contents.paths_of(evict)
        manifests = self._store.inventory.held(Kind.MANIFEST)  # left by a daemon: small, and evicted last
        chosen = choose_idle(manifests, lacking_bytes, lambda digest: None, self._store.inventory.now())
        return [(Kind.MANIFEST, file.digest) for file in chosen] if chosen is not None else None

    def paths_of(self, evict: Iterable[Digest]) -> Evict:
        """Return the files of the evicted shards, in the form that the store takes."""
        return self._contents.paths_of(evict)

    def reserved(self, decision: Decision) -> None:
        """Record that room was reserved for a decision: the shards that it evicts are gone."""
        with self._shared.locked() as needs:
            self._settle(self._evict_of(needs, decision))

    def end(self, decision: Decision, *, arrived: bool) -> None:
        """Record that a fill ended; ``arrived``: its shard is in the folder."""
        with self._shared.locked() as needs:
            self._settle(self._evict_of(needs, decision))
            if arrived:
                self._contents.added(decision.shard, int(decision.size_bytes))
                self._shared.arrived(decision.shard)
            else:
                self._contents.scan_soon()
            needs.end(decision.recipe)

    def _free_bytes(self, needs: Needs) -> float:
        """Return the room that is free and not promised to a shard that is coming; negative if there is too little.

        If a decision evicts more than its own shard takes, the rest counts as occupied until that is evicted: another
        decision may be carried out first, and must find its own room.
        """
        files, promised_bytes = self._contents.files, 0.0
        for digest, size_bytes in needs.commitments.promised():
            if digest not in files:
                evict = {each for decision in needs.commitments.decisions_of(digest) for each in decision.evict}
                freed_bytes = sum(files[each].size_bytes for each in evict if each in files)
                promised_bytes += max(size_bytes - freed_bytes, 0.0)
        return self._store.capacity_bytes - self._contents.occupied_bytes - promised_bytes

    def _unneeded(self, needs: Needs, lacking_bytes: float) -> tuple[Digest, ...] | None:
        if lacking_bytes <= 0:
            return ()
        shelf = self._contents.shelf(self._shared.needed_of)
        commitments = needs.commitments
        chosen = Candidates(shelf, without=[*commitments.evicting, *commitments.coming]).choose(lacking_bytes)
        return tuple(shelf.name(at) for at in chosen) if chosen is not None else None

    @staticmethod
    def _evict_of(needs: Needs, decision: Decision) -> set[Digest]:
        """Return the shards that are evicted for a decision, as it was last decided."""
        committed = needs.commitments.get(decision.recipe)
        return {*decision.evict, *(committed.evict if committed is not None else ())}

    def _settle(self, evict: Collection[Digest]) -> None:
        """Learn which of the shards that were to be evicted are gone."""
        for digest in evict:
            if not self._contents.exists(digest):
                self._contents.removed(digest)
                self._shared.gone(digest)

    def _commit_elsewhere(self, needs: Needs, digests: Collection[Digest]) -> None:
        """Count shards that other processes are filling as coming, so that no consumer here fetches or awaits them."""
        filling = {self._recipe(digest) for digest in digests if digest in needs.shards}
        for recipe in self._elsewhere - filling:
            needs.end(recipe)
        self._elsewhere &= filling
        for recipe in filling - self._elsewhere:
            if recipe not in needs.commitments:
                needs.commitments.add(Decision(*recipe, size_bytes=0.0), keeps_room=False)
                self._elsewhere.add(recipe)

    def _recipe(self, shard: Digest) -> Recipe:
        return Recipe(shard, self._manifest.digest)

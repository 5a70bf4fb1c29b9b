"""What this process fetches into the folder, and what is evicted for it: the decisions of ``quiver.residency``.

No daemon decides for all: each process decides for its own consumers, by the needs of everybody. Every fill of this
process, fetched ahead or for a reader, has a decision that names all that is evicted for it. From its commitment until
it ends the shard counts as coming and what is evicted as gone. A process that evicts what another one evicted before it
finds it gone; if the room does not suffice then, it decides again.
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

FRESH_SECONDS: Final = 0.5  # the age up to which other processes' reports are not read again for a reader's fill


class Decider:
    """The decisions of one process on one dataset. Safe from threads."""

    def __init__(self, manifest: Manifest, store: Store[FolderInventory], needs: SharedNeeds) -> None:
        self._manifest = manifest
        self._store = store
        self._shared = needs
        self._contents = FolderContents(store)
        self._elsewhere: set[Recipe] = set()  # shards that other processes are filling

    def look(self, *, at_once: bool = False) -> None:
        """Scan the folder if it is time to, or ``at_once``. Raises ``OSError``; then what was known stays."""
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
        """Return what to fetch now for a consumer of this process, committed: each has to be ended.

        ``avoid``: shards that failed a moment ago. ``elsewhere``: what other processes are filling.
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

    def for_reader(self, shard: int) -> Decision:
        """Return the decision to fill a shard that a reader misses, committed. It never evicts what somebody needs.

        Where no room can be made it evicts nothing, and the store refuses it. Raises ``DiskFailed``.
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
        """Decide again what to evict for a decision, so that so many bytes become free: others were faster.

        ``None`` if that cannot be. What is needed is not evicted then: the next decision may. Raises ``DiskFailed``.
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
        """Return the files of what is evicted, as the store is told."""
        return self._contents.paths_of(evict)

    def reserved(self, decision: Decision) -> None:
        """Room was reserved for a decision: what it evicts is gone."""
        with self._shared.locked() as needs:
            self._settle(self._evict_of(needs, decision))

    def end(self, decision: Decision, *, arrived: bool) -> None:
        """A fill ended; ``arrived``: its shard is in the folder."""
        with self._shared.locked() as needs:
            self._settle(self._evict_of(needs, decision))
            if arrived:
                self._contents.added(decision.shard, int(decision.size_bytes))
                self._shared.arrived(decision.shard)
            else:
                self._contents.scan_soon()
            needs.end(decision.recipe)

    def _free_bytes(self, needs: Needs) -> float:
        """Return the room that is free, and promised to nothing that is coming; negative if there is too little.

        A decision that evicts more than its own shard takes has the rest to itself until it has done so: another one
        may be carried out first, and has to find its room without.
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
        """Return what is evicted for a decision, also if that was decided again."""
        committed = needs.commitments.get(decision.recipe)
        return {*decision.evict, *(committed.evict if committed is not None else ())}

    def _settle(self, evict: Collection[Digest]) -> None:
        """Learn which of the shards that were to be evicted are gone."""
        for digest in evict:
            if not self._contents.exists(digest):
                self._contents.removed(digest)
                self._shared.gone(digest)

    def _commit_elsewhere(self, needs: Needs, digests: Collection[Digest]) -> None:
        """Have what other processes are filling count as coming, so that nobody here fetches it or starves for it."""
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

"""The decisions that are not carried out yet: the one record of what is coming, and of what is evicted for it.

A decision says which shard to fetch and everything to evict for it. From the moment it is committed until it ends,
every later decision counts its shard as coming and its evictions as gone. If the fetch succeeds, the store's events
have already said so. If it fails, ending the commitment suffices: only the commitment marked its evictions as gone, so
those that did not happen count as held again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quiver.digest import Digest


class Recipe(NamedTuple):
    """A shard, and the digest of the manifest (the dataset) that locates its samples."""

    shard: Digest
    dataset: Digest


class Decision(NamedTuple):
    """Fetch a shard by a dataset's manifest, and evict ``evict`` for it: all of it, in this order.

    ``forced``: those of ``evict`` that some consumer needs. ``starving``: the consumers on whose behalf these are
    evicted. ``ordered``: the shard is the next one of a consumer that reads in a fixed order.
    """

    shard: Digest
    dataset: Digest
    size_bytes: float
    evict: tuple[Digest, ...] = ()
    forced: tuple[Digest, ...] = ()
    starving: tuple[bytes, ...] = ()
    ordered: bool = False

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.shard, self.dataset)


class _Open(NamedTuple):
    decision: Decision
    keeps_room: bool


class Commitments:
    """The open decisions, by recipe. One thread changes them; others may call ``evicting`` and ``decisions_of``."""

    def __init__(self) -> None:
        self._open: dict[Recipe, _Open] = {}
        self._evicting: dict[Digest, Recipe] = {}
        self._of: dict[Digest, dict[Digest, Recipe]] = {}  # by shard, then dataset

    def __repr__(self) -> str:
        return f"Commitments({len(self._open)} coming, {len(self._evicting)} to evict)"

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, recipe: Recipe) -> bool:
        return recipe in self._open

    def __iter__(self) -> Iterator[Recipe]:
        return iter(list(self._open))

    def add(self, decision: Decision, *, keeps_room: bool = True) -> None:
        """Commit to a decision. It replaces an earlier one on the same recipe.

        ``keeps_room``: keep room for the whole shard; otherwise, since it may never arrive, only what it evicts.
        """
        self.end(decision.recipe)
        self._open[decision.recipe] = _Open(decision, keeps_room)
        self._of.setdefault(decision.shard, {})[decision.dataset] = decision.recipe
        for digest in decision.evict:
            self._evicting[digest] = decision.recipe

    def end(self, recipe: Recipe) -> Decision | None:
        """End a commitment, successful or not. What it should have evicted and did not counts as held again."""
        ended = self._open.pop(recipe, None)
        if ended is None:
            return None
        datasets = self._of[recipe.shard]
        del datasets[recipe.dataset]
        if not datasets:
            del self._of[recipe.shard]
        for digest in ended.decision.evict:
            if self._evicting.get(digest) == recipe:
                del self._evicting[digest]
        return ended.decision

    def get(self, recipe: Recipe) -> Decision | None:
        found = self._open.get(recipe)
        return found.decision if found is not None else None

    def of(self, shard: Digest) -> list[Recipe]:
        """Return the recipes by which a shard is coming."""
        return list(self._of.get(shard, {}).values())

    @property
    def coming(self) -> list[Digest]:
        """The shards that are coming, each once."""
        return list(self._of)

    @property
    def evicting(self) -> list[Digest]:
        """What is evicted for the shards that are coming: it counts as gone for every other decision."""
        return list(self._evicting)

    def decisions_of(self, shard: Digest) -> list[Decision]:
        """Return the decisions by which a shard is coming."""
        return [it for it in map(self.get, self.of(shard)) if it is not None]

    def promised(self) -> list[tuple[Digest, float]]:
        """Return the shards for which room is kept, each once, and their bytes."""
        sizes = {it.decision.shard: it.decision.size_bytes for it in list(self._open.values()) if it.keeps_room}
        return list(sizes.items())

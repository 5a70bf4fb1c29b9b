"""What was decided and is not carried out yet: the one place that knows what is coming, and what is evicted for it.

A decision says which shard to fetch and everything to evict for it. From the moment it is committed until it ends, its
shard counts as coming and what it evicts as gone, for every later decision. When the fetch succeeds the store's own
events have said so already; when it fails, ending the commitment is all there is to do: what was to be evicted and was
not is held again, because nothing but the commitment said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quiver.digest import Digest


class Recipe(NamedTuple):
    """A shard, and the digest of the manifest (the dataset) that says where its samples lie."""

    shard: Digest
    dataset: Digest


class Decision(NamedTuple):
    """Fetch a shard, by a dataset's manifest, in place of ``evict``: all of it, and in this order.

    ``forced``: those of ``evict`` that somebody needs. ``starving``: the consumers on whose behalf these are evicted.
    ``ordered``: it is the next of a consumer that reads in a fixed order.
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
    """The decisions under way, by recipe. Changed by one thread; others may ask for ``evicting``, ``decisions_of``."""

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
        """Commit to a decision, in place of an earlier one on the same recipe.

        ``keeps_room``: room is kept for all of the shard; else, since it may never come, for what it evicts alone.
        """
        self.end(decision.recipe)
        self._open[decision.recipe] = _Open(decision, keeps_room)
        self._of.setdefault(decision.shard, {})[decision.dataset] = decision.recipe
        for digest in decision.evict:
            self._evicting[digest] = decision.recipe

    def end(self, recipe: Recipe) -> Decision | None:
        """End a commitment, whatever came of it. What it was to evict and did not is held as before."""
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
        """Return by which recipes a shard is coming."""
        return list(self._of.get(shard, {}).values())

    @property
    def coming(self) -> list[Digest]:
        """The shards that are coming, each once."""
        return list(self._of)

    @property
    def evicting(self) -> list[Digest]:
        """What is evicted for what is coming: gone, as far as anybody else is concerned."""
        return list(self._evicting)

    def decisions_of(self, shard: Digest) -> list[Decision]:
        """Return the decisions by which a shard is coming."""
        return [it for it in map(self.get, self.of(shard)) if it is not None]

    def promised(self) -> list[tuple[Digest, float]]:
        """Return the shards that room is kept for, each once, and their bytes."""
        sizes = {it.decision.shard: it.decision.size_bytes for it in list(self._open.values()) if it.keeps_room}
        return list(sizes.items())

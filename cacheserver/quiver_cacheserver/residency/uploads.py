"""Shards that clients upload because the daemon may not read their origin: which are wanted, and who was chosen.

A shard is *wanted* once the policy decided to fetch it. It is *awaited* from the moment that a client was chosen to
read and upload it, until it arrives, the client forgoes it, or ``UPLOAD_SECONDS`` have passed. Only the command
``choose`` changes who is chosen; queries do not.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from quiver.digest import Digest
from quiver.expiring import Expiring
from quiver.residency import Commitments, Decision, Recipe

UPLOADS_PER_READER: Final = 4  # shards that one reader is asked to upload at a time, so that others get a turn
UPLOADS_PER_ADDRESS: Final = 16  # a machine's readers together
UPLOAD_SECONDS: Final = 60.0  # how long one client may take to read a shard and upload it
LAPSED_SECONDS: Final = 10.0  # for which others are chosen before an address that timed out: readers ask often
WANTED_SECONDS: Final = 30.0  # for which a shard is wanted without an uploader; then the policy decides again
AWAITED_MAX: Final = 65536


class _Upload:
    """The upload of a shard by a chosen client; ``arrival`` is done when it has arrived or is no longer awaited."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.since = time.monotonic()
        self.arrival: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.arrival.done():
            self.arrival.set_result(None)


class Uploads:
    """Which client was chosen to upload which shard, and which recently failed to. Belongs to the event loop."""

    def __init__(self, commitments: Commitments) -> None:
        self._commitments = commitments
        self._wanted: dict[Recipe, float] = {}  # since when
        self._awaited: OrderedDict[Recipe, _Upload] = OrderedDict()
        self._of: dict[Digest, dict[Digest, None]] = {}  # manifests by shard, of what is awaited
        self._owed: dict[str, dict[Recipe, None]] = {}  # by address
        self._lapsed: Expiring[tuple[Digest, str], None] = Expiring(AWAITED_MAX, clock=_now)

    # -- wanted -------------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> list[Recipe]:
        """What is wanted, whether or not a client was chosen, the longest wanted first."""
        return list(self._wanted)

    def want(self, decision: Decision) -> None:
        """Want a shard that the policy decided on. No room is kept for it until a client is chosen."""
        self._wanted[decision.recipe] = time.monotonic()
        self._commitments.add(decision, keeps_room=False)

    def unwant(self, recipe: Recipe) -> None:
        """Stop wanting a shard. If it is awaited, it stays awaited."""
        if self._wanted.pop(recipe, None) is not None and recipe not in self._awaited:
            self._commitments.end(recipe)

    def is_stale(self, recipe: Recipe) -> bool:
        """Whether a shard was wanted without an uploader for so long that the policy decides again."""
        return not self.awaits(recipe) and time.monotonic() >= self._wanted[recipe] + WANTED_SECONDS

    # -- awaited ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Recipe]:
        """Yield what is awaited."""
        return (recipe for recipe in list(self._awaited) if self.awaits(recipe))

    def awaits(self, recipe: Recipe) -> bool:
        """Whether a client was chosen to upload the shard, and may still do so."""
        upload = self._awaited.get(recipe)
        return upload is not None and time.monotonic() < upload.since + UPLOAD_SECONDS

    def awaits_shard(self, shard: Digest) -> bool:
        """Whether a shard is awaited by any manifest."""
        return any(self.awaits(Recipe(shard, manifest)) for manifest in self._of.get(shard, ()))

    def arrival(self, recipe: Recipe) -> asyncio.Future[object] | None:
        """Return a future, done when the shard has arrived or is no longer awaited; ``None`` if it is not now."""
        return self._awaited[recipe].arrival if self.awaits(recipe) else None

    def client_of(self, recipe: Recipe) -> str | None:
        """Return the client chosen to upload a shard; ``None`` if there is none."""
        return self._awaited[recipe].client if self.awaits(recipe) else None

    def choose(self, decision: Decision, client: str) -> bool:
        """Choose a client to upload a shard; return whether it may: not if it owes many or recently timed out."""
        recipe = decision.recipe
        self.expire(recipe)
        if (recipe.shard, client) in self._lapsed:
            return False
        for each in list(self._owed.get(client, ())):
            self.expire(each)
        if len(self._owed.get(client, ())) >= UPLOADS_PER_ADDRESS:
            return False
        self._awaited[recipe] = _Upload(client)
        self._of.setdefault(recipe.shard, {})[recipe.dataset] = None
        self._owed.setdefault(client, {})[recipe] = None
        self._commitments.add(decision)
        while len(self._awaited) > AWAITED_MAX:
            self.end(next(iter(self._awaited)))
        return True

    def arrived(self, shard: Digest) -> None:
        """Record that the shard is here: no upload of it is needed, by whatever manifest."""
        for recipe in [Recipe(shard, manifest) for manifest in self._of.get(shard, ())]:
            self.end(recipe)
        for recipe in [it for it in self._wanted if it.shard == shard]:
            self.unwant(recipe)

    def expire(self, recipe: Recipe) -> None:
        """Stop awaiting an upload if its client took too long."""
        upload = self._awaited.get(recipe)
        if upload is not None and not self.awaits(recipe):
            self.end(recipe, lapsed=True)

    def expire_all(self) -> None:
        """Stop awaiting every upload whose client took too long."""
        for recipe in list(self._awaited):  # the one chosen longest ago first
            if self.awaits(recipe):
                break
            self.end(recipe, lapsed=True)

    def dismiss(self, recipe: Recipe) -> None:
        """Record that the chosen client has left, so that the next client can be chosen."""
        upload = self._awaited.get(recipe)
        if upload is not None:
            self.end(recipe, lapsed=time.monotonic() >= upload.since + LAPSED_SECONDS)

    def end(self, recipe: Recipe, *, lapsed: bool = False) -> None:
        """Stop awaiting an upload, if it is awaited. ``lapsed``: it timed out, and other clients are chosen first."""
        upload = self._awaited.pop(recipe, None)
        if upload is None:
            return
        del self._of[recipe.shard][recipe.dataset], self._owed[upload.client][recipe]
        if not self._of[recipe.shard]:
            del self._of[recipe.shard]
        if not self._owed[upload.client]:
            del self._owed[upload.client]
        if lapsed:
            late_seconds = max(time.monotonic() - (upload.since + UPLOAD_SECONDS), 0.0)
            if late_seconds < LAPSED_SECONDS:
                self._lapsed.set((recipe.shard, upload.client), None, LAPSED_SECONDS - late_seconds)
        decision = self._commitments.get(recipe)
        if decision is not None and recipe in self._wanted:
            self._commitments.add(decision._replace(evict=decision.forced), keeps_room=False)
        else:
            self._commitments.end(recipe)
        upload.end()


def _now() -> float:
    return time.monotonic()

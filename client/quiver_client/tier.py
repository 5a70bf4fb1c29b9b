"""The two interfaces between a session and the places that it reads from, one after the other."""

from __future__ import annotations

from typing import Protocol

from quiver.errors import QuiverError
from quiver_client.batch import Batch, Positions


class Tier(Protocol):
    """A place that samples come from: this host, the rack, the origin."""

    name: str

    def fetch(self, batch: Batch) -> None:
        """Put into the batch those unverified samples that this tier has. Having none is no error."""
        ...

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Record that these samples were wrong, so that the next ``fetch`` can deliver correct ones."""
        ...

    def close(self) -> None: ...


class Cache(Tier, Protocol):
    """A tier that fills the shards that it lacks."""

    def why(self, shard: int) -> QuiverError | None:
        """Return why a shard was not filled, or only in part, when last requested; ``None`` if it was filled."""
        ...

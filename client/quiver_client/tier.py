"""The two interfaces between a session and the places that it reads from, which it asks in turn."""

from __future__ import annotations

from typing import Protocol

from quiver.errors import QuiverError
from quiver_client.batch import Batch, Positions


class Tier(Protocol):
    """A place that samples come from: this host, the rack, the origin."""

    name: str

    def fetch(self, batch: Batch) -> None:
        """Put into the batch what this tier has of the samples that are not verified. To have none is no error."""
        ...

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Take note that these samples were wrong, so that another ``fetch`` can deliver others."""
        ...

    def close(self) -> None: ...


class Cache(Tier, Protocol):
    """A tier that fills shards which it does not have."""

    def why(self, shard: int) -> QuiverError | None:
        """Return why a shard was not filled, or only in part, when last requested; ``None`` if it was filled."""
        ...

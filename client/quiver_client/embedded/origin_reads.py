"""Reads shards from the origin for fills: verified, and timed, so that decisions know how fast the origin is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from quiver import forks
from quiver.digest import Bytes, Digest
from quiver.errors import Unavailable
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.residency.origin_estimate import OriginEstimate, OriginEstimator
from quiver.shard import verified
from quiver.source import first_verified
from quiver_client.origin_patience import OriginPatience


class OriginReads:
    """The shards of one dataset, as its origin has them. Safe from threads."""

    def __init__(self, manifest: Manifest, origin: Callable[[], SampleOrigin], patience: OriginPatience) -> None:
        """``origin`` opens the origin when it is first used."""
        self._manifest = manifest
        self._origin = origin
        self._patience = patience
        self._lock = forks.lock()
        self._estimator = OriginEstimator()

    @property
    def estimate(self) -> OriginEstimate:
        return self._estimator.estimate

    def reported(self, pause_seconds: float) -> None:
        """Record the time between two reports of a consumer, which decisions take into account."""
        with self._lock:
            self._estimator.reported(pause_seconds)

    def shard(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return a whole shard, verified. Raises ``Changed``, ``Unavailable``, ``Forbidden`` or ``Corrupt``."""
        with self._measured(size_bytes):
            shard, _ = first_verified([self._shards()], digest, size_bytes)
        self._patience.answered()
        return shard.data

    def partial(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return a shard without the samples that the origin lost. Raises ``Changed`` if too many are lost."""
        data = self._shards().salvage(digest, size_bytes)
        self._patience.answered()
        return data

    def mended(self, digest: Digest, partial: Bytes) -> Bytes:
        """Complete a partial shard: read only the samples that were lost. Raises ``Changed`` if they still are."""
        source = self._shards()
        return verified(digest, source.mend(digest, partial), source.name).data

    def say_unavailable(self, error: Unavailable) -> None:
        """Log, once per outage, that the origin does not answer and that this process waits for it."""
        self._patience.say(error, "some shards")

    def _shards(self) -> OriginShards:
        return OriginShards(self._manifest, self._origin())

    @contextlib.contextmanager
    def _measured(self, size_bytes: int) -> Iterator[None]:
        """Measure one read, perhaps of several at once. A read that fails does not count."""
        begun = time.monotonic()
        with self._lock:
            self._estimator.began(begun)
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            now = time.monotonic()
            with self._lock:
                self._estimator.ended(now, now - begun if succeeded else None, size_bytes if succeeded else 0.0)

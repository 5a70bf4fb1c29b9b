"""The manifests that a daemon has open, and when each was last used: which datasets are read. Safe from threads.

By name (``names``): a manifest that two sharing domains use is open once for each.

A stock loader reports no needs, so its reads are all that says what it uses. They are its lease: it expires once the
dataset was not read for some times as long as between its last reads, since a process that is suspended, or a loop that
validates for minutes, must not cost others more of the cache than a consumer with a lease does (ADR 0035).
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.manifest import Manifest
from quiver.residency.eviction import IDLE_SECONDS
from quiver_cacheserver.names import name_in

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

READ_LEASE_SECONDS: Final = (5.0, IDLE_SECONDS)  # bounds: a consumer's lease, and how long an idle file is kept
READ_LEASE_PAUSES: Final = 5.0  # and between them, so many times the longest of the last pauses between two reads,
PAUSES_KEPT: Final = 16  # of which there are so many: workers that start together read in bursts
SHARDS_LOOKED_UP: Final = 8  # of those that a reader has mapped and uses: they are of one dataset
OPEN_MAX: Final = 256
OPEN_BYTES_MAX: Final = 1 << 30  # of manifests in memory at once, four of 1.3 million samples; a larger one alone


class OpenManifests:
    """The most recently used manifests by name, bounded in number and size."""

    def __init__(self) -> None:
        self._open: OrderedDict[Digest, Manifest] = OrderedDict()
        self._used: dict[Digest, float] = {}
        self._pauses: dict[Digest, deque[float]] = {}  # the last ones between two uses

    def get(self, name: Digest) -> Manifest | None:
        """Return the manifest if it is open. That counts as a use."""
        manifest = self._open.get(name)
        if manifest is not None:
            self._use(name)
            self._open.move_to_end(name)
        return manifest

    def peek(self, name: Digest) -> Manifest | None:
        """Return the manifest if it is open, without counting that as a use."""
        return self._open.get(name)

    def use_of(self, shards: Sequence[Digest], domain: Domain = SINGLE) -> None:
        """Record that a reader uses shards of one dataset of its domain, without naming the dataset."""
        for name, manifest in list(self._open.items()):
            is_of_domain = name == name_in(domain, manifest.digest)
            if is_of_domain and any(shard in manifest.shard_numbers for shard in shards[:SHARDS_LOOKED_UP]):
                self._use(name)

    def manifest_of(self, shard: Digest, domain: Domain = SINGLE) -> Digest | None:
        """Return the digest of the last used manifest of the domain that has a shard; ``None`` if none is open."""
        for name, manifest in reversed(list(self._open.items())):
            if shard in manifest.shard_numbers and name == name_in(domain, manifest.digest):
                return manifest.digest
        return None

    def add(self, name: Digest, manifest: Manifest) -> None:
        self._open[name] = manifest
        self._used[name] = time.monotonic()
        while len(self._open) > 1 and (len(self._open) > OPEN_MAX or self._open_bytes() > OPEN_BYTES_MAX):
            old, _ = self._open.popitem(last=False)
            self._used.pop(old, None)
            self._pauses.pop(old, None)

    def in_use_of(self, shards: U8) -> Mask:
        """Return which of these ``(n, 32)`` are shards of datasets that were read recently."""
        used = np.zeros(len(shards), bool)
        for _, manifest in self._recent() if len(shards) else ():
            used |= manifest.shard_numbers.rows_of(shards) >= 0
        return used

    def lapsed_of(self, shards: U8) -> Mask:
        """Return which of these ``(n, 32)`` are of open datasets alone whose readers' leases have expired."""
        lapsed = np.zeros(len(shards), bool)
        now = time.monotonic()
        is_live = {name: now < self._lease_ends(name) for name in list(self._open)} if len(shards) else {}
        if all(is_live.values()):
            return lapsed
        for name, manifest in list(self._open.items()):
            if not is_live.get(name, True):
                lapsed |= manifest.shard_numbers.rows_of(shards) >= 0
        for name, manifest in list(self._open.items()) if lapsed.any() else ():
            if is_live.get(name, True):
                lapsed &= manifest.shard_numbers.rows_of(shards) < 0
        return lapsed

    def recently_used(self) -> set[Digest]:
        """Return the digests of the manifests of datasets that were read recently."""
        return {manifest.digest for _, manifest in self._recent()}

    def _use(self, name: Digest) -> None:
        now = time.monotonic()
        self._pauses.setdefault(name, deque(maxlen=PAUSES_KEPT)).append(now - self._used.get(name, now))
        self._used[name] = now

    def _lease_ends(self, name: Digest) -> float:
        least, most = READ_LEASE_SECONDS
        longest = max(list(self._pauses.get(name, ())), default=0.0)
        return self._used.get(name, 0.0) + min(max(READ_LEASE_PAUSES * longest, least), most)

    def _recent(self) -> list[tuple[Digest, Manifest]]:
        since = time.monotonic() - IDLE_SECONDS
        return [(name, it) for name, it in list(self._open.items()) if self._used.get(name, 0.0) > since]

    def _open_bytes(self) -> int:
        return sum(map(bytes_of, self._open.values()))


def bytes_of(manifest: Manifest) -> int:
    """Return what an open manifest takes of memory: its file, and the table that finds shards."""
    return len(manifest.content) + 12 * manifest.shard_count

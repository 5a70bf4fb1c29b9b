"""The manifests that a daemon has open, and when each was last used: which datasets are read. Safe from threads.

By name (``names``): a manifest that two sharing domains use is open once for each.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.manifest import Manifest
from quiver.residency.eviction import IDLE_SECONDS

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

OPEN_MAX: Final = 256
OPEN_BYTES_MAX: Final = 1 << 30  # of manifests in memory at once, four of 1.3 million samples; a larger one alone


class OpenManifests:
    """The most recently used manifests by name, bounded in number and size."""

    def __init__(self) -> None:
        self._open: OrderedDict[Digest, Manifest] = OrderedDict()
        self._used: dict[Digest, float] = {}

    def get(self, name: Digest) -> Manifest | None:
        """Return the manifest if it is open. That counts as a use."""
        manifest = self._open.get(name)
        if manifest is not None:
            self._used[name] = time.monotonic()
            self._open.move_to_end(name)
        return manifest

    def add(self, name: Digest, manifest: Manifest) -> None:
        self._open[name] = manifest
        self._used[name] = time.monotonic()
        while len(self._open) > 1 and (len(self._open) > OPEN_MAX or self._open_bytes() > OPEN_BYTES_MAX):
            old, _ = self._open.popitem(last=False)
            self._used.pop(old, None)

    def in_use_of(self, shards: U8) -> Mask:
        """Return which of these ``(n, 32)`` are shards of datasets that were read recently."""
        used = np.zeros(len(shards), bool)
        for _, manifest in self._recent() if len(shards) else ():
            used |= manifest.shard_numbers.rows_of(shards) >= 0
        return used

    def recently_used(self) -> set[Digest]:
        """Return the digests of the manifests of datasets that were read recently."""
        return {manifest.digest for _, manifest in self._recent()}

    def _recent(self) -> list[tuple[Digest, Manifest]]:
        since = time.monotonic() - IDLE_SECONDS
        return [(name, it) for name, it in list(self._open.items()) if self._used.get(name, 0.0) > since]

    def _open_bytes(self) -> int:
        return sum(map(bytes_of, self._open.values()))


def bytes_of(manifest: Manifest) -> int:
    """Return what an open manifest takes of memory: its file, and the table that finds shards."""
    return len(manifest.content) + 12 * manifest.shard_count

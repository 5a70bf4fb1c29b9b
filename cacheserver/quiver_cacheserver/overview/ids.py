"""Ids of datasets and of ranks: the same at every daemon of a rack, and no capability.

They are derived one way, so that an id opens nothing: neither a manifest, whose digest is a capability, nor the report
of a consumer, whose name lets one report in its place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import blake3

import quiver.overview
from quiver.overview import ID_HEX

_RANK: Final = b"quiver-rank-id-v1\0"


dataset_id = lru_cache(4096)(quiver.overview.dataset_id)


def rank_id(consumer: bytes) -> str:
    """Return the id of a consumer, by the name that it reports under."""
    return blake3.blake3(_RANK + consumer).hexdigest()[:ID_HEX]

"""What a manifest or shard is called within a sharing domain, where domains must not meet.

Reports of needs, fills, uploads, and what is remembered of them, are kept by *name*: the digest XOR the domain's key.
So domains that name the same digest have nothing in common there: whatever one asks, the answer is as if the others
did not exist. In ``SINGLE``, the only domain of a daemon without tokens, names are digests.

Keys are derived from a secret that is drawn at each start and never leaves the process: a tenant that knew two of them
could choose a digest whose name in its own domain is that of a shard in the other one.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Final

import blake3
import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.domain import Domain
from quiver.residency import CONSUMER_BYTES

KEYS_REMEMBERED_MAX: Final = 1024
_SECRET: Final = os.urandom(32)


@lru_cache(KEYS_REMEMBERED_MAX)
def _key(domain: Domain) -> bytes:
    return blake3.blake3(domain, key=_SECRET).digest()


def name_in(domain: Domain, digest: Digest) -> Digest:
    """Return a digest's name in a domain; or, of a name, the digest."""
    return Digest(_xor(digest, _key(domain)[:DIGEST_BYTES])) if domain else digest


def consumer_in(domain: Domain, consumer: bytes) -> bytes:
    """Return a consumer's name: that of another domain's consumer is never the same."""
    return _xor(consumer, _key(domain)[:CONSUMER_BYTES]) if domain else consumer


def key_of(domain: Domain) -> npt.NDArray[np.uint8] | None:
    """Return the key ``(32,)`` of a domain for ``Needs.add_dataset``."""
    return np.frombuffer(_key(domain), np.uint8) if domain else None


def _xor(data: bytes, key: bytes) -> bytes:
    return (int.from_bytes(data) ^ int.from_bytes(key)).to_bytes(len(data))

"""The noun ``ShardSource``: whoever may have a shard. And the one door by which its bytes become data.

A disk, a peer, an origin and a memory fake all implement it and pass one conformance suite (tests/contract). A source
may lie, stop midway or hand out garbage; ``first_verified`` is what everything goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from quiver.digest import Bytes, Digest
from quiver.errors import Corrupt, NotFound, QuiverError
from quiver.shard import Shard, verified


class ShardSource(Protocol):
    """Somebody who may have shards."""

    name: str

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return the bytes of the shard, unverified, at most ``size_bytes`` of them.

        Raises ``NotFound`` if it is not there, ``Unavailable`` if the source does not answer, ``Corrupt`` if the answer
        makes no sense, ``Changed`` or ``Forbidden`` for an origin.
        """
        ...

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        """Return what it means that this source's bytes did not verify: an origin knows which samples are lost."""
        ...


class MemorySource:
    """Shards in a dictionary: the fake that tests use, and the reference for the conformance suite."""

    def __init__(self, shards: dict[Digest, bytes], name: str = "memory") -> None:
        self.name = name
        self._shards = shards

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        data = self._shards.get(digest)
        if data is None:
            raise NotFound(f"{self.name} does not hold the shard")
        if len(data) > size_bytes:
            raise Corrupt(f"shard of {len(data)} bytes where {size_bytes} were expected", self.name)
        return data

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        return error


def first_verified(
    sources: Iterable[ShardSource],
    digest: Digest,
    size_bytes: int,
    blame: Callable[[ShardSource, QuiverError], None] = lambda source, error: None,
) -> tuple[Shard, ShardSource]:
    """Ask one source after another; return the first shard that verifies, and who had it.

    ``blame`` hears of every source that failed otherwise than by not having it. If none delivers, the last error that
    says most is raised: what the origin said, if it was asked.
    """
    failure: QuiverError = NotFound("nobody holds the shard")
    for source in sources:
        try:
            return verified(digest, source.load(digest, size_bytes), source.name), source
        except NotFound:
            continue
        except Corrupt as error:
            failure = source.fault(digest, error)
        except QuiverError as error:  # whatever a peer calls it, the next one may have the shard
            failure = error
        blame(source, failure)
    raise failure

"""The interface ``ShardSource``, and ``first_verified``, the only function that turns a source's bytes into data.

A disk, a peer, an origin and a memory fake implement the interface and pass one conformance suite (tests/contract). A
source may lie, stop midway or return garbage: everything is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from quiver.digest import Bytes, Digest
from quiver.errors import Corrupt, NotFound, QuiverError
from quiver.shard import Shard, verified


class ShardSource(Protocol):
    """A place that may have shards."""

    name: str

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return the bytes of the shard, unverified, at most ``size_bytes``.

        Raises ``NotFound`` if it is not there, ``Unavailable`` if the source does not answer, ``Corrupt`` if the
        answer is malformed, ``Changed`` or ``Forbidden`` for an origin.
        """
        ...

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        """Return the error to raise if this source's bytes did not verify: an origin names the lost samples."""
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
    """Try the sources in order; return the first shard that verifies, and its source.

    ``blame`` is called for every source that failed with an error other than ``NotFound``. If no source has the shard,
    the last such error is raised: the origin's, if it was tried.
    """
    failure: QuiverError = NotFound("no source has the shard")
    for source in sources:
        try:
            return verified(digest, source.load(digest, size_bytes), source.name), source
        except NotFound:
            continue
        except Corrupt as error:
            failure = source.fault(digest, error)
        except QuiverError as error:  # after any failure the next source may have the shard
            failure = error
        blame(source, failure)
    raise failure

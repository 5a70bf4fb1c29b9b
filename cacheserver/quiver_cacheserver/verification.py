"""Which of the shards on disk were verified since the daemon started, or since a reader got wrong bytes of them.

An unverified shard is verified once, before it is first served. A wrong one is quarantined.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Final

from quiver.digest import Digest
from quiver.domain import Domain
from quiver.errors import Corrupt, NotFound
from quiver.expiring import Expiring
from quiver.store import Kind, MemoryInventory, Store
from quiver_cacheserver.budget import Budgets, Cost
from quiver_cacheserver.counters import Counters

log = logging.getLogger(__name__)

RECHECK_SECONDS: Final = 10.0  # what a reader may make a daemon read again from disk is bounded
SUSPECTED_MAX: Final = 65536


class Verification:
    """The shards on disk, verified or not. ``begin`` belongs to the event loop, the rest is safe from threads."""

    def __init__(self, store: Store[MemoryInventory], executor: Executor, counters: Counters, budgets: Budgets) -> None:
        self._store = store
        self._inventory = store.inventory
        self._executor = executor
        self._counters = counters
        self._budgets = budgets
        self._unverified = {held.digest for held in store.inventory.held(Kind.SHARD)}
        self._verifying: dict[Digest, asyncio.Future[bool]] = {}
        self._suspected: Expiring[Digest, None] = Expiring(SUSPECTED_MAX)

    def is_pending(self, digest: Digest) -> bool:
        """Whether the shard has to be verified before it is served."""
        return digest in self._unverified

    def is_running(self, digest: Digest) -> bool:
        return digest in self._verifying

    def is_held(self, digest: Digest, domain: Domain | None = None) -> bool:
        """Whether the shard is here, verified or not: in a sharing domain, or in any."""
        return self._inventory.has(Kind.SHARD, digest, domain)

    def is_resident(self, digest: Digest, domain: Domain | None = None) -> bool:
        """Whether the shard is here and verified: in a sharing domain, or in any."""
        return digest not in self._unverified and self._inventory.has(Kind.SHARD, digest, domain)

    def begin(self, digest: Digest) -> asyncio.Future[bool]:
        """Return the verification of a shard on disk that is under way, or begin it."""
        future = self._verifying.get(digest)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._verifying[digest] = loop.run_in_executor(self._executor, self.verify, digest)
            future.add_done_callback(lambda done: self._ended(digest, done))
        return future

    def _ended(self, digest: Digest, done: asyncio.Future[bool]) -> None:
        self._verifying.pop(digest, None)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log.warning("a shard could not be verified: %s", error)

    def verify(self, digest: Digest) -> bool:
        """In a thread: return whether the shard is here and right, verifying it if need be."""
        try:
            if digest in self._unverified:
                self._store.check(digest)
                self._unverified.discard(digest)
            elif self.is_resident(digest):  # not merely on disk: a file that could not be quarantined is not read again
                self._store.open_file(Kind.SHARD, digest)
            else:
                return False
        except NotFound:
            self._unverified.discard(digest)
            return False
        except Corrupt as error:
            self._unverified.discard(digest)
            self._counters.count("corruptions", "disk")
            log.warning("quarantined: %s", error)
            return False
        return True

    def written(self, digest: Digest) -> None:
        """Record that a shard was written, and verified during the write."""
        self._unverified.discard(digest)

    def suspect(self, digests: Iterable[Digest], client: str = "") -> None:
        """A reader got wrong bytes: verify these shards before serving them, at most once per ``RECHECK_SECONDS``.

        A client's reports are charged to its budget; ``""``: this daemon found the error itself.
        """
        now = time.monotonic()
        for digest in digests:
            if self._inventory.has(Kind.SHARD, digest) and digest not in self._suspected:
                size_bytes = self._inventory.size(Kind.SHARD, digest)
                if client and not self._budgets.spend(client, Cost.RECHECK_BYTES, size_bytes, now):
                    return  # served unverified: readers verify what they get
                self._suspected.set(digest, None, RECHECK_SECONDS)
                self._unverified.add(digest)

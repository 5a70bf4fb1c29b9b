"""Room in a store for one more file: decide what to evict, reserve the room, and decide again if the store changed.

``Store.reserve`` evicts exactly what it is given. Between a decision and its reservation another process may have taken
the room or evicted the same files. Then the reservation fails, having evicted nothing, and the next decision is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from quiver.digest import Bytes, Digest
from quiver.errors import OverCapacity
from quiver.residency.eviction import choose_idle
from quiver.store.disk import Evict, Store, Writing
from quiver.store.inventory import Kind

ATTEMPTS_MAX: Final = 4  # each lost to a process that took the room in the milliseconds between

Decide = Callable[[int], "Evict | None"]  # what to evict to free so many bytes; None: that is impossible


@contextlib.contextmanager
def reserve_with_room(
    store: Store[Any], kind: Kind, digest: Digest, size_bytes: int, decide: Decide
) -> Iterator[Writing]:
    """Reserve room, evicting what ``decide`` returns. Raises what ``Store.reserve`` raises."""
    with contextlib.ExitStack() as stack:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            lacking_bytes = store.lacking(size_bytes)
            evict = decide(lacking_bytes) if lacking_bytes else ()
            if evict is None:
                raise store.full()
            try:
                writing = stack.enter_context(store.reserve(kind, digest, size_bytes, evict))
                break
            except OverCapacity:
                if attempt == ATTEMPTS_MAX:
                    raise
        yield writing


def put_with_room(store: Store[Any], kind: Kind, digest: Digest, data: Bytes, decide: Decide) -> None:
    """Write verified content, evicting what ``decide`` returns. Raises what ``reserve_with_room`` raises."""
    with reserve_with_room(store, kind, digest, len(data), decide) as writing:
        writing.write(data)
        writing.commit()


def idle_of(store: Store[Any], needed: Callable[[Digest], bool | None] = lambda digest: None) -> Decide:
    """Return how to decide for a folder: evict what nobody needs, the longest idle first, and manifests last."""

    def decide(free_bytes: int) -> Evict | None:
        for kinds in ((Kind.PARTIAL, Kind.SHARD), (Kind.MANIFEST,)):  # manifests are small, and every fill needs one
            files = [(kind, file) for kind in kinds for file in store.inventory.held(kind)]
            chosen = choose_idle([file for _, file in files], free_bytes, needed, store.inventory.now())
            if chosen is not None:
                wanted = set(map(id, chosen))
                return [(kind, file.digest) for kind, file in files if id(file) in wanted]
        return None

    return decide

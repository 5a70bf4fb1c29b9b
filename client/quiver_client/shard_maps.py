"""The shards that a process has mapped: bounded, the least recently used unmapped first, none inherited by a fork.

An evicted file occupies the disk as long as any process maps it. So the owner of the maps regularly finds out which of
them to release (``mapped``, ``drop``). A view that was handed out keeps its own mapping alive.

A batch of small samples looks up hundreds of shards at once. So a map is found by one look-up in one dictionary, and
what is rarely needed (notes, which maps were used) is kept in others.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

from quiver_client.buffers import Buffer

N = TypeVar("N")

MAPS_MAX: Final = 4096  # the kernel allows a process 65,530 of them; they hold no descriptors
TIDY_SECONDS: Final = 2.0  # an evicted file occupies the disk while it is mapped: for how long, at most


class ShardMaps(Generic[N]):
    """Mapped shards by number, each with a note whose meaning the owner defines. Safe from threads."""

    _lock: threading.Lock
    _buffers: OrderedDict[int, Buffer]  # the least recently used first
    _notes: dict[int, N]
    _used: set[int]  # since ``mapped`` was last called

    def __init__(self, at_most: int | None = None) -> None:
        self._at_most = MAPS_MAX if at_most is None else at_most
        self._forget()
        _all.add(self)

    def __len__(self) -> int:
        return len(self._buffers)

    def __contains__(self, shard: int) -> bool:
        return shard in self._buffers

    def get(self, shard: int) -> Buffer | None:
        return self.get_all([shard]).get(shard)

    def get_all(self, shards: Iterable[int]) -> dict[int, Buffer]:
        """Return those that are mapped, for ``Batch.put_mapped``."""
        with self._lock:
            look, used = self._buffers.get, self._buffers.move_to_end
            found = {shard: buffer for shard in shards if (buffer := look(shard)) is not None}
            for shard in found:
                used(shard)
            self._used.update(found)
        return found

    def put(self, shard: int, view: memoryview, note: N) -> Buffer:
        """Keep a map, in place of an older one of the shard; return it as ``get`` does."""
        buffer = Buffer.of(view, mapped=True)
        gone: list[Buffer | None] = []  # unmapped outside the lock: it takes the kernel a while
        with self._lock:
            gone.append(self._buffers.pop(shard, None))
            self._buffers[shard] = buffer
            self._notes[shard] = note
            self._used.add(shard)
            while len(self._buffers) > self._at_most:
                gone.append(self._removed(next(iter(self._buffers))))
        return buffer

    def drop(self, shard: int, note: N | None = None) -> None:
        """Release a map; given a note, only if the map has this note: there may be a newer one."""
        gone = None
        with self._lock:
            if shard in self._buffers and (note is None or self._notes[shard] == note):
                gone = self._removed(shard)
        del gone

    def note(self, shard: int) -> N | None:
        return self._notes.get(shard)

    def mapped(self) -> list[tuple[int, N, bool]]:
        """Return the mapped shards, each with its note and whether it was used since the last call."""
        with self._lock:
            found = [(shard, self._notes[shard], shard in self._used) for shard in self._buffers]
            self._used.clear()
        return found

    def clear(self) -> None:
        with self._lock:
            gone, self._buffers = self._buffers, OrderedDict()
            self._notes.clear()
            self._used.clear()
        gone.clear()

    def _removed(self, shard: int) -> Buffer:
        del self._notes[shard]
        self._used.discard(shard)
        return self._buffers.pop(shard)

    def _forget(self) -> None:
        """Start without maps. A forked child must not keep its parent's maps, which occupy the disk."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._buffers = OrderedDict()
        self._notes = {}
        self._used = set()


_all: weakref.WeakSet[ShardMaps[Any]] = weakref.WeakSet()


def _forget_parents() -> None:
    for maps in list(_all):
        maps._forget()


os.register_at_fork(after_in_child=_forget_parents)

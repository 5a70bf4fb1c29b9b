"""The shards that a process has mapped: bounded, the least recently used let go first, and none of them in a child.

A file that made way keeps its room on disk for as long as somebody maps it, so who keeps maps also looks now and then
which of them to let go of (``mapped``, ``drop``). A view that was given out keeps its own map for as long as it lives.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from quiver_client.gather import Buffer

N = TypeVar("N")

MAPS_MAX: Final = 4096  # the kernel allows a process 65,530 of them; they hold no descriptors
TIDY_SECONDS: Final = 2.0  # a file that made way keeps its room while it is mapped: how long it may


@dataclass(slots=True)
class _Map(Generic[N]):
    buffer: Buffer
    note: N
    used: bool


class Maps(Generic[N]):
    """Views of whole shards by number, each with a note of its keeper's. Safe from threads."""

    def __init__(self, at_most: int = MAPS_MAX) -> None:
        self._at_most = at_most
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, _Map[N]] = OrderedDict()
        _all.add(self)

    def __len__(self) -> int:
        return len(self._maps)

    def get(self, shard: int) -> Buffer | None:
        return self.get_all([shard]).get(shard)

    def get_all(self, shards: Iterable[int]) -> dict[int, Buffer]:
        """Return those that are mapped, for ``Delivery.put_mapped``."""
        found = {}
        with self._lock:
            for shard in shards:
                mapped = self._maps.get(shard)
                if mapped is not None:
                    self._maps.move_to_end(shard)
                    mapped.used = True
                    found[shard] = mapped.buffer
        return found

    def put(self, shard: int, view: memoryview, note: N) -> Buffer:
        """Keep a map, in place of an older one of the shard; return it as ``get`` does."""
        buffer = Buffer.of(view)
        gone: list[_Map[N] | None] = []  # ends outside the lock: to unmap takes the kernel a while
        with self._lock:
            gone.append(self._maps.pop(shard, None))
            self._maps[shard] = _Map(buffer, note, used=True)
            while len(self._maps) > self._at_most:
                gone.append(self._maps.popitem(last=False)[1])
        return buffer

    def drop(self, shard: int, note: N | None = None) -> None:
        """Let go of a map; given a note, only if it is the map with this note: there may be a newer one."""
        gone = None
        with self._lock:
            mapped = self._maps.get(shard)
            if mapped is not None and (note is None or mapped.note == note):
                gone = self._maps.pop(shard)
        del gone

    def note(self, shard: int) -> N | None:
        mapped = self._maps.get(shard)
        return mapped.note if mapped is not None else None

    def mapped(self) -> list[tuple[int, N, bool]]:
        """Return what is mapped, with the notes, and whether it was used since this was last asked."""
        with self._lock:
            found = [(shard, mapped.note, mapped.used) for shard, mapped in self._maps.items()]
            for mapped in self._maps.values():
                mapped.used = False
        return found

    def clear(self) -> None:
        with self._lock:
            gone, self._maps = self._maps, OrderedDict()
        gone.clear()

    def _forget_parents(self) -> None:
        """In a child that was forked: let go of the parent's maps, which would keep room that the parent gave up."""
        self._lock = threading.Lock()  # a thread of the parent's may have held it
        self._maps = OrderedDict()


_all: weakref.WeakSet[Maps[Any]] = weakref.WeakSet()


def _forget_parents() -> None:
    for maps in list(_all):
        maps._forget_parents()


os.register_at_fork(after_in_child=_forget_parents)

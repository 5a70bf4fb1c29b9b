"""A bounded mapping whose entries expire: what is remembered for a while, such as a failure that is not retried yet.

The one helper for "not again before" and "counts until". Safe from threads; never larger than ``entries_max``: the
entry that was set longest ago is forgotten first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar, overload

from quiver import forks

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

ENTRIES_MAX: Final = 65536


class Expiring(Generic[K, V]):
    """Values by key, each until its own time on ``clock`` (seconds). A value that has expired is as if never set."""

    def __init__(self, entries_max: int = ENTRIES_MAX, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries_max = entries_max
        self._clock = clock
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._lock = forks.lock()

    def __repr__(self) -> str:
        return f"Expiring({len(self)} of {self._entries_max})"

    def __len__(self) -> int:
        """Return the number of entries, of which some may have expired since ``expire`` was called."""
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and self._clock() < entry[0]

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys that have not expired, the one set longest ago first."""
        return iter([key for key, _ in self.items()])

    def set(self, key: K, value: V, seconds: float) -> None:
        """Remember a value for so long, in place of any other under this key."""
        with self._lock:
            self._entries[key] = self._clock() + seconds, value
            self._entries.move_to_end(key)
            while len(self._entries) > self._entries_max:
                self._entries.popitem(last=False)

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: D | None = None) -> V | D | None:
        """Return the value, ``default`` if there is none or it has expired."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return default
            if self._clock() < entry[0]:
                return entry[1]
            del self._entries[key]
            return default

    def pop(self, key: K) -> V | None:
        """Forget a key; return its value unless it had expired."""
        with self._lock:
            entry = self._entries.pop(key, None)
            return entry[1] if entry is not None and self._clock() < entry[0] else None

    def items(self) -> list[tuple[K, V]]:
        """Return what has not expired."""
        with self._lock:
            now = self._clock()
            return [(key, value) for key, (until, value) in self._entries.items() if now < until]

    def expire(self) -> list[tuple[K, V]]:
        """Forget what has expired, and return it."""
        with self._lock:
            now = self._clock()
            expired = [(key, value) for key, (until, value) in self._entries.items() if now >= until]
            for key, _ in expired:
                del self._entries[key]
            return expired

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

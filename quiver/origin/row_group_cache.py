"""The last few decoded row groups of Parquet files, kept between fills: one bounded cache for all origins of a process.

Without it, each shard of a row group would read and decode all of it. The cache is useful while shards are filled; a
daemon empties it afterwards, since serving does not need it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import Any, Final

KEPT_BYTES_MAX: Final = 256 << 20  # concurrent fills of adjacent shards need a few large row groups

Columns = list[Any]  # arrays of pyarrow's, one for each field of blobs
Key = tuple[object, int, int]  # its owner (compared by identity), the number of the file, the number of the row group


class RowGroupCache:
    """An LRU cache of row groups. Safe from threads; empty in a forked child."""

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self.group_bytes_max: int | None = None  # refuse to decode a larger row group in this process
        self.forget()

    def __repr__(self) -> str:
        return f"RowGroupCache({len(self._groups)} row groups, {self.size_bytes} bytes)"

    def forget(self) -> None:
        """Start empty, with a lock that nobody holds."""
        self._lock = threading.RLock()  # garbage collection may close an origin during any call
        self._groups: OrderedDict[Key, tuple[Columns, int]] = OrderedDict()
        self._used = time.monotonic()

    @property
    def size_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in list(self._groups.values()))

    def get(self, key: Key) -> Columns | None:
        with self._lock:
            columns, size_bytes = self._groups.pop(key, (None, 0))
            if columns is not None:
                self._groups[key] = columns, size_bytes
                self._used = time.monotonic()
            return columns

    def put(self, key: Key, columns: Columns) -> None:
        """Keep a row group; past ``bytes_max`` drop the least recently used ones, but never the one just put."""
        with self._lock:
            self._groups[key] = columns, sum(column.nbytes for column in columns)
            self._used = time.monotonic()
            while len(self._groups) > 1 and self.size_bytes > self._bytes_max:
                self._groups.popitem(last=False)

    def drop(self, owner: object) -> None:
        """Drop the row groups of one owner."""
        with self._lock:
            for key in list(self._groups):
                if key[0] is owner:
                    self._groups.pop(key, None)

    def drop_if_idle(self, seconds: float) -> None:
        """Drop everything if nothing was used for so long."""
        with self._lock:
            if time.monotonic() - self._used >= seconds:
                self._groups.clear()


row_groups: Final = RowGroupCache()
os.register_at_fork(after_in_child=row_groups.forget)

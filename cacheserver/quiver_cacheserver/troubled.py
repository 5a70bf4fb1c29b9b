"""Origins that do not answer, and how many fills may wait for them: few, so that the others' shards are still filled.

A fill of an origin that hangs holds one of a daemon's few fill threads until its read's deadline. So once an origin did
not answer, one fill at a time finds out whether it does again, and all others fail at once; and of all such origins
together, half of the threads may wait. The worst is one deadline, in which the origin held all threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from quiver.errors import Unavailable
from quiver.origin import SampleOrigin
from quiver_cacheserver.bounds import FILL_THREADS

WAITING_MAX: Final = FILL_THREADS // 2
TROUBLED_MAX: Final = 1024  # bases remembered


class Troubled:
    """Which origins did not answer when they were asked last. Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, int] = {}  # base -> fills that try it, of those that are in trouble

    def __contains__(self, base: str) -> bool:
        return base in self._waiting

    @contextlib.contextmanager
    def reading(self, base: str) -> Iterator[None]:
        """Read an origin inside. Raises ``Unavailable`` at once if others find out already whether it answers."""
        with self._lock:
            trying = base in self._waiting
            if trying:
                if self._waiting[base] or sum(self._waiting.values()) >= WAITING_MAX:
                    raise Unavailable(base, "did not answer the last time, and is being tried by another fill")
                self._waiting[base] = 1
        try:
            yield
        except Unavailable as error:
            if not error.lasting:
                with self._lock:
                    if base not in self._waiting and len(self._waiting) < TROUBLED_MAX:
                        self._waiting[base] = 0
            raise
        else:
            with self._lock:
                self._waiting.pop(base, None)
        finally:
            if trying:
                with self._lock:
                    if base in self._waiting:
                        self._waiting[base] = 0


class Guarded:
    """A ``SampleOrigin`` that few fills wait for while it does not answer."""

    def __init__(self, inner: SampleOrigin, troubled: Troubled) -> None:
        self.base = inner.base
        self._inner = inner
        self._troubled = troubled

    def read(self, blobs: Sequence[int], out: memoryview) -> int:
        with self._troubled.reading(self.base):
            return self._inner.read(blobs, out)

    def close(self) -> None:
        self._inner.close()

"""A limit on the fills that wait for an origin that does not answer, so that shards of other origins are still filled.

A fill from an origin that hangs occupies one of the daemon's few fill threads until its read times out. So after an
origin has not answered, one fill at a time tries it and all others fail at once; and at most half of the threads wait
for such origins together. The worst case is one timeout during which one origin occupied all threads.
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


class UnresponsiveOrigins:
    """The origins that did not answer the last read. Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, int] = {}  # base -> the number of fills that try it

    def __contains__(self, base: str) -> bool:
        return base in self._waiting

    @contextlib.contextmanager
    def reading(self, base: str) -> Iterator[None]:
        """Read an origin inside the block. Raises ``Unavailable`` at once if another fill is already trying it."""
        with self._lock:
            trying = base in self._waiting
            if trying:
                if self._waiting[base] or sum(self._waiting.values()) >= WAITING_MAX:
                    raise Unavailable(base, "did not answer the last read, and another fill is trying it")
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


class GuardedOrigin:
    """A ``SampleOrigin`` for which few fills wait while it does not answer."""

    def __init__(self, inner: SampleOrigin, troubled: UnresponsiveOrigins) -> None:
        self.base = inner.base
        self._inner = inner
        self._troubled = troubled

    def read(self, blobs: Sequence[int], out: memoryview) -> int:
        with self._troubled.reading(self.base):
            return self._inner.read(blobs, out)

    def close(self) -> None:
        self._inner.close()

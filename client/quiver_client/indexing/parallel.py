"""Runs the tasks of indexing in threads: results in the order of the tasks, few in flight, one way to stop.

Threads suffice: reading a file and hashing it both release the GIL. The order makes the manifest independent of timing;
the bound limits the memory of results that are not yet collected.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from quiver_client.indexing.errors import Stopped

T = TypeVar("T")
A = TypeVar("A")

THREADS_LOCAL_MAX: Final = 16
THREADS_REMOTE: Final = 32  # at 30 ms per request, a thousand small objects per second
IN_FLIGHT_PER_THREAD: Final = 2


class Progress(Protocol):
    """A consumer of progress. Both methods are called from several threads."""

    def start(self, total_bytes: int) -> None: ...

    def advance(self, read_bytes: int) -> None: ...


class NoProgress:
    """The null object: it ignores progress."""

    def start(self, total_bytes: int) -> None:
        pass

    def advance(self, read_bytes: int) -> None:
        pass


class Meter:
    """What every task is given: the task reports progress to it, and learns from it whether to stop."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._stopped = threading.Event()

    def advance(self, read_bytes: int) -> None:
        """Count bytes that were read; raise ``Stopped`` if the run was cancelled."""
        if self._stopped.is_set():
            raise Stopped
        self.progress.advance(read_bytes)

    def stop(self) -> None:
        self._stopped.set()


def local_threads() -> int:
    """Return the number of threads for work that keeps a core busy."""
    return min(len(os.sched_getaffinity(0)), THREADS_LOCAL_MAX)


def in_order(
    work: Callable[[A], T], items: Iterable[A], threads: int, stop: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """Yield ``work(item)`` for each item, in their order. ``stop`` is called when the run ends early."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="quiver-index")
    flight: deque[Future[T]] = deque()
    done = False
    try:
        for item in items:
            flight.append(pool.submit(work, item))
            if len(flight) >= threads * IN_FLIGHT_PER_THREAD:
                yield flight.popleft().result()
        while flight:
            yield flight.popleft().result()
        done = True
    finally:
        if not done:
            stop()
        pool.shutdown(wait=True, cancel_futures=True)

"""Batches fetched ahead by threads of this process: ``num_workers=0`` that still overlaps with the training loop.

One thread draws, a few fetch and collate, and the loop receives the results in the order in which they were drawn. At
most ``depth`` batches are ahead of the loop. The threads refer to the prefetcher and never to the iterator, so that
an iterator that is collected in the middle of an epoch ends them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from concurrent.futures import Future, wait
from typing import Any, Final

from quiver_client import process_exit
from quiver_client.loader.epoch import Drawn
from quiver_client.loader.order import BatchOrder, OrderPass
from quiver_client.loader.randomness import lent
from quiver_client.loader.source import ThreadedSource
from quiver_client.thread_pool import ThreadPool

FETCHERS: Final = 4


class ThreadedBatches:
    """Iterator over ``(number, batch)`` of one pass."""

    def __init__(
        self, sampler: BatchOrder, epoch: OrderPass, source: ThreadedSource, depth: int, timeout: float
    ) -> None:
        self._timeout = timeout or None
        self._sampler, self._epoch, self._source = sampler, epoch, source
        self._prefetcher = _Prefetcher(sampler, epoch, source, depth)
        # The garbage collector may call this in any thread, even in one of the prefetcher's, so it must not wait.
        weakref.finalize(self, self._prefetcher.stop).atexit = False
        self._prefetcher.start()

    def __iter__(self) -> ThreadedBatches:
        return self

    def __next__(self) -> tuple[int, Any]:
        self._source.asked()
        with lent():
            number, future = self._prefetcher.queue.get()
        if future is None:
            self.close()
            raise StopIteration
        if isinstance(future, BaseException):
            self.close()
            raise future
        self._prefetcher.slots.release()
        with lent():
            is_done = bool(wait([future], self._timeout).done)
        if not is_done:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        try:
            return number, self._source.received(future.result())
        except StopIteration as error:  # a batch that was made in this thread
            raise self._sampler.failure(error, self._epoch.rows(number)) from error
        finally:
            del future  # its exception refers to this frame

    def close(self, *, wait: bool = True) -> None:
        """Stop drawing and fetching, and ``wait`` for the batches in flight."""
        self._prefetcher.stop()
        if wait:
            with lent():
                self._prefetcher.join()


class _Prefetcher:
    def __init__(self, sampler: BatchOrder, epoch: OrderPass, source: ThreadedSource, depth: int) -> None:
        self.queue: queue.SimpleQueue[tuple[int, Future[Any] | BaseException | None]] = queue.SimpleQueue()
        self.slots = threading.Semaphore(depth)
        self._sampler, self._epoch, self._source = sampler, epoch, source
        self._pool = ThreadPool(min(depth, FETCHERS), "quiver-fetch")
        self._closed = False
        self._pid = os.getpid()
        process_exit.call_at_exit(self.stop, process_exit.Phase.LOOPS)

    def start(self) -> None:
        self._thread = process_exit.start(self._draw, "quiver-draw")

    def stop(self) -> None:
        if self._pid != os.getpid():  # a forked child has none of the threads, and copies of the locks that they held
            return
        if not self._closed:
            self._closed = True
            self._sampler.abandon(self._epoch)
            self.slots.release()
            self._forget()
        self._pool.stop()

    def join(self) -> None:
        self._thread.join()
        self._pool.shutdown()

    def _forget(self) -> None:
        """Release batches that are never received: the exception of a failed one refers to this object."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.queue.get_nowait()
        self.queue.put((0, None))

    def _draw(self) -> None:
        try:
            while True:
                self.slots.acquire()
                drawn = None if self._closed else self._sampler.draw(self._epoch)
                if drawn is None:
                    break
                self.queue.put((drawn.number, self._pool.submit(self._one, drawn)))
        except BaseException as error:  # noqa: BLE001 - a thread has no caller: the loop raises it
            if not self._closed:
                self.queue.put((0, error))
        if self._closed:
            self._forget()
        self.queue.put((0, None))

    def _one(self, drawn: Drawn) -> Any:
        try:
            return self._source.fetch(drawn)
        except StopIteration as error:  # the loop would take it for the end of the epoch
            raise self._sampler.failure(error, drawn.rows) from error
        finally:
            self._sampler.fetched(self._epoch, drawn.number)

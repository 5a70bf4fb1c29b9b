"""Fetches batches ahead in one thread, for clients that do not prefetch by themselves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Final

from bench.measure import Batch

BATCHES: Final = 2  # as many as a torch DataLoader prefetches


def ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches while a thread fetches the next ones."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(BATCHES)
    closed = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def fetch() -> None:
        try:
            for batch in batches:
                put(batch)
                if closed.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised where the batch was wanted
            put(error)

    thread = threading.Thread(target=fetch, name="bench-ahead")
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()

"""Whether the disk accepts files: learned from writes that fail, and probed periodically after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Executor
from typing import Final

from quiver.errors import DiskFailed
from quiver.store import MemoryInventory, Store
from quiver.wire import OK

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 2.0  # between two probes of a disk that accepts no files


class DiskHealth:
    """``state``: ``ok``, or why the disk accepts no files. Safe from threads."""

    def __init__(self, store: Store[MemoryInventory], executor: Executor) -> None:
        self.state = OK
        self._store = store
        self._executor = executor
        self._refused_bytes = 0

    def check(self) -> None:
        """Raise ``DiskFailed`` if the last write failed."""
        if self.state != OK:
            raise DiskFailed(self.state)

    def failed(self, error: DiskFailed, size_bytes: int) -> None:
        """Record that the disk refused a file of this size."""
        if self.state == OK:
            log.warning("nothing can be cached: %s", error)
        self.state, self._refused_bytes = str(error), size_bytes

    def wrote(self) -> None:
        """Record that the disk accepted a file."""
        self.state = OK

    async def watch(self) -> None:
        """Probe a disk that refused a file until it accepts one. There may be no other write: readers go elsewhere."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self.state != OK:
                with contextlib.suppress(DiskFailed):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._executor, self._store.rehearse, self._refused_bytes)
                    self.state = OK
                    log.info("the disk takes files again")

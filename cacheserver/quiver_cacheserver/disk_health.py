"""Whether the disk takes files: learned from writes that fail, and tried again from time to time."""

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

RETRY_SECONDS: Final = 2.0  # between two tries of a disk that takes no files


class DiskHealth:
    """``state``: ``ok``, or why the disk takes no files. Safe from threads."""

    def __init__(self, store: Store[MemoryInventory], executor: Executor) -> None:
        self.state = OK
        self._store = store
        self._executor = executor
        self._refused_bytes = 0

    def check(self) -> None:
        """Raise ``DiskFailed`` if the disk took no file the last time."""
        if self.state != OK:
            raise DiskFailed(self.state)

    def failed(self, error: DiskFailed, size_bytes: int) -> None:
        """The disk refused a file of this size."""
        if self.state == OK:
            log.warning("nothing can be cached: %s", error)
        self.state, self._refused_bytes = str(error), size_bytes

    def wrote(self) -> None:
        """The disk took a file."""
        self.state = OK

    async def watch(self) -> None:
        """Try a disk that refused a file until it takes one. Nobody else may ever write: readers go elsewhere."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self.state != OK:
                with contextlib.suppress(DiskFailed):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._executor, self._store.rehearse, self._refused_bytes)
                    self.state = OK
                    log.info("the disk takes files again")

"""Ends a DataLoader's worker process whose training process was killed.

torch's workers look for their parent between two batches only. One that waits for an origin or a daemon at that moment
would outlive its parent by as long as that wait lasts, which is minutes if the origin is down.
"""

from __future__ import annotations

import os
from typing import Final

from torch.utils.data import get_worker_info

from quiver import forks
from quiver_client import process_exit

LOOK_SECONDS: Final = 0.5
EXIT_STATUS: Final = 1

_watching: list[ParentWatch] = []  # that of this process, or of the one that it was forked from


class ParentWatch:
    """A thread that ends this process when its parent is gone."""

    def __init__(self) -> None:
        self.pid, self._parent = os.getpid(), os.getppid()
        self._closing = forks.event()
        process_exit.call_at_exit(self._closing.set, process_exit.Phase.LOOPS)
        process_exit.start(self._watch, "quiver-parent")

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            if os.getppid() != self._parent:
                os._exit(EXIT_STATUS)  # nobody is left to tell anything to


def watch_parent_of_worker() -> None:
    """Begin to watch, once, if this process is a DataLoader's worker."""
    if get_worker_info() is not None and (not _watching or _watching[-1].pid != os.getpid()):
        _watching[:] = [ParentWatch()]

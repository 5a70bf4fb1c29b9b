"""Ends a DataLoader's worker process whose training process was killed.

torch's workers look for their parent between two batches only. One that waits for an origin or a daemon at that moment
would outlive the training process by as long as that wait lasts, which is minutes if the origin is down. And where a
fork server started the workers, torch looks for that server, which lives as long as one of its workers does: for ever.
"""

from __future__ import annotations

import os
from multiprocessing import parent_process
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
        self.pid, self._forked_by = os.getpid(), os.getppid()
        self._trainer = parent_process()
        self._closing = forks.event()
        process_exit.call_at_exit(self._closing.set, process_exit.Phase.LOOPS)
        process_exit.start(self._watch, "quiver-parent")

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            # Forked siblings keep the pipe open by which the trainer's end is seen; a fork server is not the trainer.
            if os.getppid() != self._forked_by or not (self._trainer is None or self._trainer.is_alive()):
                os._exit(EXIT_STATUS)  # nobody is left to tell anything to


def watch_parent_of_worker() -> None:
    """Begin to watch, once, if this process is a DataLoader's worker."""
    if get_worker_info() is not None and (not _watching or _watching[-1].pid != os.getpid()):
        _watching[:] = [ParentWatch()]

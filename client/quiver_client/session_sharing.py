"""The session that a dataset and its selections share: one set of threads, sockets and maps, however many parts.

It belongs to the process that opened it, and is closed when the last dataset that uses it is closed or collected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from quiver import forks
from quiver_client.session import Session


class SharedSession:
    """At most one open session per process. Pickled, it is that of the other process: none yet."""

    def __init__(self) -> None:
        self._lock = forks.rlock()  # re-entrant: the garbage collector may release a dataset while another acquires
        self._session: Session | None = None
        self._owner = 0
        self._users = 0

    def acquire(self, make: Callable[[], Session]) -> Session:
        """Return the session of this process for one more user; ``make`` one if there is none."""
        with self._lock:
            if self._session is None or self._owner != os.getpid():
                self._session, self._owner, self._users = make(), os.getpid(), 0
            self._users += 1
            return self._session

    def release(self, session: Session, owner: int) -> None:
        """Count one user less, and close the session that no user is left of.

        In a forked child this does nothing to a session of its parent, as do its threads and sockets.
        """
        if owner != os.getpid():
            return
        with self._lock:
            if self._session is session:
                self._users -= 1
                if self._users:
                    return
                self._session = None
        session.close()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc] # nothing of another process's session is kept

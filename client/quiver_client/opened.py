"""What a dataset and its selections have in common in one process: the manifest as it was opened, and one session.

However many parts a dataset is divided into, there is one manifest in memory, and one set of threads, sockets and maps.
Parts that are pickled together stay together. The session belongs to the process that opened it, and is closed when the
last dataset that uses it is closed or collected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

from quiver import forks
from quiver.introduction import Introduction
from quiver.manifest import Manifest
from quiver_client.identity import introduction_of, name_of
from quiver_client.session import Session


class Opened:
    """A manifest, and at most one session per process."""

    _session: Session | None
    _owner: int
    _users: int

    def __init__(self, manifest: Manifest, introduction: Introduction | None = None) -> None:
        """``introduction``: how all processes that get this object introduce themselves to daemons."""
        self.introduction = introduction or introduction_of(name_of(manifest, manifest.path.name))
        self.path = manifest.path
        self.digest = manifest.digest  # pickled with this description: by then the path may name another manifest
        self._manifest: Manifest | None = manifest
        self._forget_session()

    @property
    def manifest(self) -> Manifest:
        """The manifest: the same in every process that receives this object by pickle or by fork.

        Raises ``Corrupt``, naming both digests, if the file at its path has become another manifest.
        """
        if self._manifest is None:
            self._manifest = Manifest.open(self.path, self.digest)
        return self._manifest

    def acquire(self, make: Callable[[], Session]) -> Session:
        """Return the session of this process for one more user; ``make`` one if there is none."""
        with self._lock:
            if self._session is None or self._owner != os.getpid():
                self._session, self._owner, self._users = make(), os.getpid(), 0
            self._users += 1
            return self._session

    def introduce_as_follower(self) -> None:
        """Say to daemons that another process reports what this one reads, and what it forks from now on."""
        with self._lock:
            self.introduction = replace(self.introduction, follows=True)
            if self._session is not None and self._owner == os.getpid():
                self._session.introduce_as(self.introduction)

    def release(self, session: Session, owner: int) -> None:
        """Count one user less, and close the session that no user is left of.

        In a forked child nothing is done to a session of its parent, as little as to its threads and sockets.
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
        # A spawned worker gets the manifest itself: another file may have its path by then.
        fd = self.manifest.share() if get_spawning_popen() is not None else None
        passed = None if fd is None else DupFd(fd)
        return {"path": self.path, "digest": self.digest, "passed": passed, "introduction": self.introduction}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.digest, passed = state["path"], state["digest"], state["passed"]
        self.introduction = state["introduction"]
        self._manifest = None if passed is None else Manifest.adopt(self.path, passed.detach(), self.digest)
        self._forget_session()

    def _forget_session(self) -> None:
        self._lock = forks.rlock()  # re-entrant: the garbage collector may release a dataset while another acquires
        self._session = None
        self._owner = 0
        self._users = 0

"""The locks of fills: of processes that share a folder, one reads a shard from the origin and the others wait for it.

    <root>/fills/<64 hex digits: the shard>   locked and touched several times a second while it is being filled

A lock saves work and nothing else, since what is written is verified and appears under its name complete or not at all.
So nobody waits for a process that is stopped: its lock stays, and is not touched any more. Then a shard is read twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quiver import forks
from quiver.digest import Digest
from quiver.errors import BadRequest, Unavailable
from quiver.forks import LockedFile
from quiver.store.locks import open_lock
from quiver_client import process_exit

BEAT_SECONDS: Final = 0.15
SILENT_SECONDS: Final = 0.6  # four beats: with the wait for the folder's lock it stays below a second
LIVE_SECONDS_MAX: Final = 20.0  # of waiting for one that lives: its origin may hang, and another's may not
POLL_SECONDS: Final = 0.02  # flock has no timeout
FILLING_MAX: Final = 1024


class FillLocks:
    """The locks of a folder's fills, as one process has them. Safe from threads."""

    def __init__(self, root: Path, closing: threading.Event) -> None:
        """``closing``: when it is set nobody waits any more."""
        self._folder = root / "fills"
        self._closing = closing
        self._lock = forks.lock()
        self._held: set[LockedFile] = set()
        self._beating = False
        with contextlib.suppress(OSError):  # then it is done without
            self._folder.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def held(self, digest: Digest) -> Iterator[None]:
        """Hold the lock of one fill, or go on without it if it is not had soon.

        Raises ``Unavailable`` when the tier is closed meanwhile.
        """
        path = self._folder / digest.hex()
        try:
            file = LockedFile(open_lock(path))
        except OSError:
            yield
            return
        locked = False
        try:
            locked = self._wait_for(file)
            if locked:
                self._begin(file)
            yield
        finally:
            if locked:  # else it is somebody's still
                with self._lock:
                    self._held.discard(file)
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            file.close()

    def under_way(self) -> list[Digest]:
        """Return the shards that some process is filling. The locks of those that died in it are removed in time."""
        found = []
        for path in itertools.islice(self._paths(), FILLING_MAX):
            with contextlib.suppress(BadRequest, OSError):
                digest = Digest.parse(path.name)
                is_silent = time.time() - path.lstat().st_mtime > SILENT_SECONDS
                if _is_locked(path):
                    if not is_silent:  # else its holder is stopped, and nobody waits for it
                        found.append(digest)
                elif is_silent:
                    path.unlink()
        return found

    def _paths(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from self._folder.iterdir()

    def _wait_for(self, file: LockedFile) -> bool:
        """Return whether the lock was had before its holder fell silent."""
        begun = time.monotonic()
        touched, heard = 0, 0.0
        while True:
            try:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            except OSError:  # a file system without locks
                return False
            now, found = time.monotonic(), os.fstat(file.fd).st_mtime_ns
            if found != touched:
                # What was touched long ago may be of a dead process, and its new holder about to touch it: look twice.
                age = time.time() - found / 1e9 if not touched else 0.0
                heard = now - min(max(age, 0.0), SILENT_SECONDS - 2 * POLL_SECONDS)
                touched = found
            if now - heard > SILENT_SECONDS or now - begun > LIVE_SECONDS_MAX:
                return False
            if self._closing.wait(POLL_SECONDS):
                raise Unavailable(f"{self._folder}", "the dataset is being closed")

    def _begin(self, file: LockedFile) -> None:
        """Have a thread touch the file for as long as it is held."""
        with contextlib.suppress(OSError):
            os.utime(file.fd)  # the file may be what a process left that died long ago
        with self._lock:
            self._held.add(file)
            if self._beating:
                return
            self._beating = True
        try:
            process_exit.start(self._beat, "quiver-alive")
        except RuntimeError:  # there are too many, or the interpreter ends: others read the shard as well
            self._beating = False

    def _beat(self) -> None:
        while True:
            closing = self._closing.wait(BEAT_SECONDS)
            with self._lock:
                if closing or not self._held:
                    self._beating = False
                    return
                for file in self._held:
                    with contextlib.suppress(OSError):
                        os.utime(file.fd)


def _is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)

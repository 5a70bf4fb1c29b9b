"""Fill locks: of the processes that share a folder, one reads a shard from the origin while the others wait for it.

    <root>/fills/<64 hex digits: the shard>   locked while the shard is filled, and touched several times a second

A fill lock only saves work: what is written is verified, and appears under its name complete or not at all. So a
suspended process does not delay others for long. It keeps its lock but no longer touches the file; the lock is then
stale, no process waits for it, and the shard is read twice.
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

HEARTBEAT_SECONDS: Final = 0.15
STALE_SECONDS: Final = 0.6  # four heartbeats: together with the wait for the folder's lock it stays below a second
WAIT_SECONDS_MAX: Final = 20.0  # for a holder that runs: its origin may hang where another process's does not
POLL_SECONDS: Final = 0.02  # flock has no timeout
LOCKS_MAX: Final = 1024  # that ``under_way`` looks at


class FillLocks:
    """The fill locks of a folder, as one process uses them. Safe from threads."""

    def __init__(self, root: Path, closing: threading.Event) -> None:
        """``closing``: once it is set, no thread waits for a lock any more."""
        self._folder = root / "fills"
        self._closing = closing
        self._lock = forks.lock()
        self._held: set[LockedFile] = set()
        self._heartbeat_runs = False
        self._make_folder()

    def _make_folder(self) -> None:
        with contextlib.suppress(OSError):  # then fills run without locks
            self._folder.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def held(self, digest: Digest) -> Iterator[None]:
        """Hold the lock of one fill; continue without it if it cannot be acquired soon.

        Raises ``Unavailable`` if the tier is closed meanwhile.
        """
        path = self._folder / digest.hex()
        try:
            file = LockedFile(open_lock(path))
        except OSError:
            self._make_folder()  # for the next fill, if somebody deleted it
            yield
            return
        locked = False
        try:
            locked = self._acquire(file)
            if locked:
                self._start_heartbeat(file)
            yield
        finally:
            if locked:  # else another process still holds it
                with self._lock:
                    self._held.discard(file)
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            file.close()

    def under_way(self) -> list[Digest]:
        """Return the shards that some process is filling now; remove the files of processes that died in a fill."""
        found = []
        for path in itertools.islice(self._paths(), LOCKS_MAX):
            with contextlib.suppress(BadRequest, OSError):
                digest = Digest.parse(path.name)
                is_stale = time.time() - path.lstat().st_mtime > STALE_SECONDS
                if _is_locked(path):
                    if not is_stale:  # else its holder is suspended, and no process waits for it
                        found.append(digest)
                elif is_stale:
                    path.unlink()
        return found

    def _paths(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from self._folder.iterdir()

    def _acquire(self, file: LockedFile) -> bool:
        """Wait for the lock; return whether it was acquired before it went stale."""
        begun = time.monotonic()
        last_touched, last_heartbeat = 0, 0.0
        while True:
            try:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                pass
            except OSError:  # a file system without locks
                return False
            now, touched = time.monotonic(), os.fstat(file.fd).st_mtime_ns
            if touched != last_touched:
                # The file may be a dead process's whose new holder is about to touch it: look twice.
                age = time.time() - touched / 1e9 if not last_touched else 0.0
                last_heartbeat = now - min(max(age, 0.0), STALE_SECONDS - 2 * POLL_SECONDS)
                last_touched = touched
            if now - last_heartbeat > STALE_SECONDS or now - begun > WAIT_SECONDS_MAX:
                return False
            if self._closing.wait(POLL_SECONDS):
                raise Unavailable(f"{self._folder}", "the dataset is being closed")

    def _start_heartbeat(self, file: LockedFile) -> None:
        """Have a thread touch the file for as long as its lock is held."""
        with contextlib.suppress(OSError):
            os.utime(file.fd)  # the file may have been left by a process that died long ago
        with self._lock:
            self._held.add(file)
            if self._heartbeat_runs:
                return
            self._heartbeat_runs = True
        try:
            process_exit.start(self._send_heartbeats, "quiver-alive")
        except RuntimeError:  # no more threads, or the interpreter ends: other processes read the shard as well
            self._heartbeat_runs = False

    def _send_heartbeats(self) -> None:
        while True:
            closing = self._closing.wait(HEARTBEAT_SECONDS)
            with self._lock:
                if closing or not self._held:
                    self._heartbeat_runs = False
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

"""Lease files: how processes that share a folder hear what the others need.

    <root>/needs/<32 hex digits: the consumer>  "QNL1", path_bytes u32, the manifest's path, a report (quiver.reporting)

A lease counts while its file is locked, which ends at once with the death of its writer, and for as long as the report
says, which frees what a suspended one pins. A file is written and locked under a temporary name and then renamed, so
whoever reads sees all of it or none. Whoever finds one that does not count removes it; its writer, if it ever wakes up,
writes another.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import struct
import time
from collections.abc import Container
from pathlib import Path
from typing import Final, NamedTuple

from quiver.errors import BadRequest
from quiver.need import CONSUMERS_MAX
from quiver.reporting import REPORT_BYTES_MAX, NeedsReport

LEASES_MAX: Final = CONSUMERS_MAX // 2  # the others': one's own always finds room on the board
ENTRIES_MAX: Final = 4 * LEASES_MAX  # of a folder that somebody may have filled with anything
PATH_BYTES_MAX: Final = 4096  # Linux has no longer ones
TEMPORARY_SECONDS: Final = 10.0  # older than any that is still to be locked and renamed
_HEAD: Final = struct.Struct("<4sI")
_MAGIC: Final = b"QNL1"
_BYTES_MAX: Final = _HEAD.size + PATH_BYTES_MAX + REPORT_BYTES_MAX
_NAME: Final = re.compile("[0-9a-f]{32}")
_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{32}\.\d{1,10}")


def leases_in(root: Path) -> Path:
    return root / "needs"


class Lease:
    """The lease file of a consumer of this process."""

    def __init__(self, folder: Path, consumer: bytes) -> None:
        self.consumer = consumer
        self._path = folder / consumer.hex()
        self._temporary = folder / f".{consumer.hex()}.{os.getpid()}"
        self._fd = -1

    def write(self, manifest: Path, told: NeedsReport) -> None:
        """Replace the lease by a new one. Raises ``OSError``; then the old one counts until it runs out."""
        path = os.fsencode(manifest)
        data = _HEAD.pack(_MAGIC, len(path)) + path + told.encode()
        self._path.parent.mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._temporary, flags, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.write(fd, data) != len(data):
                raise OSError("the disk took part of it alone")
            self._temporary.replace(self._path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            raise
        self._unlock()
        self._fd = fd

    def remove(self) -> None:
        """Take the lease back. Raises ``OSError``; then others find it unlocked, and remove it."""
        try:
            if self._fd >= 0:
                _unlink_if(self._path, os.fstat(self._fd).st_ino)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # not by closing alone: a child that was forked has a copy
            os.close(self._fd)
            self._fd = -1


class Heard(NamedTuple):
    """A lease of another consumer: where its manifest is, what it told, and when, on the monotonic clock."""

    manifest: Path
    told: NeedsReport
    at: float


class _Known(NamedTuple):
    """A file that was looked at: which version of it, and until when it counts; ``None`` for junk."""

    version: tuple[int, int]
    until: float | None


class Leases:
    """The leases of the others, read again when they change. Used under a lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, _Known] = {}

    def changes(self, now: float, own: Container[str]) -> tuple[list[Heard], list[bytes]]:
        """Return the leases that are new since the last call, and the consumers whose lease ended."""
        heard: list[Heard] = []
        before, self._known = self._known, {}
        for name in self._names(now):
            if name not in own and len(self._known) < LEASES_MAX:
                self._look(name, before.get(name), now, heard)
        ended = _counting(before) - _counting(self._known)
        return heard, [bytes.fromhex(name) for name in ended]

    def _names(self, now: float) -> list[str]:
        names: list[str] = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in itertools.islice(entries, ENTRIES_MAX):
                if _NAME.fullmatch(entry.name):
                    names.append(entry.name)
                elif _TEMPORARY.fullmatch(entry.name):
                    self._sweep_temporary(entry.name)
        return names

    def _look(self, name: str, before: _Known | None, now: float, heard: list[Heard]) -> None:
        path = self._folder / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return
            version = (info.st_ino, info.st_mtime_ns)
            known, lease = before, None
            if known is None or known.version != version:
                lease = _read(fd, info, now, name)
                known = _Known(version, lease.at + lease.told.report.lease_seconds if lease else None)
            if _unlocked(fd) or (known.until is not None and known.until < now):
                _unlink_if(path, info.st_ino)
                return
            self._known[name] = known
            if lease is not None:
                heard.append(lease)
        except OSError:
            return
        finally:
            os.close(fd)

    def _sweep_temporary(self, name: str) -> None:
        """Remove what a writer left that died between writing and renaming."""
        path = self._folder / name
        with contextlib.suppress(OSError):
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or time.time() - info.st_mtime < TEMPORARY_SECONDS:
                return
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if _unlocked(fd):
                    _unlink_if(path, info.st_ino)
            finally:
                os.close(fd)


def _counting(known: dict[str, _Known]) -> set[str]:
    return {name for name, it in known.items() if it.until is not None}


def _read(fd: int, info: os.stat_result, now: float, name: str) -> Heard | None:
    """Return the lease in a file, or ``None`` for junk."""
    if not _HEAD.size <= info.st_size <= _BYTES_MAX:
        return None
    data = os.pread(fd, info.st_size, 0)
    magic, path_bytes = _HEAD.unpack_from(data)
    if magic != _MAGIC or path_bytes > PATH_BYTES_MAX:
        return None
    path = data[_HEAD.size : _HEAD.size + path_bytes]
    try:
        told = NeedsReport.decode(data[_HEAD.size + path_bytes :])
    except BadRequest:
        return None
    if told.report.consumer.hex() != name or told.leaving or not path.startswith(b"/") or b"\0" in path:
        return None
    return Heard(Path(os.fsdecode(path)), told, now - max(time.time() - info.st_mtime, 0.0))


def _unlocked(fd: int) -> bool:
    """Whether nobody holds the file: its writer is dead. Where locks do not work, time alone tells."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _unlink_if(path: Path, inode: int) -> None:
    """Remove a file, unless there is another one under its name by now."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if path.lstat().st_ino == inode:
            path.unlink()

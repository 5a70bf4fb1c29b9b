"""Lease files: how the processes that share a folder tell each other what they need.

    <root>/needs/<32 hex digits: the consumer>   MessagePack: the path of the manifest, and the consumer's report

A lease is valid while its file is locked and the report has not expired. The lock ends at once if the writer dies; the
expiry frees the shards that a suspended process needs. A writer writes and locks the file under a temporary name and
then renames it, so a reader sees all of it or nothing. A reader removes the file of a lease that is not valid; a writer
that is resumed later writes another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import time
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from quiver.errors import BadRequest
from quiver.malformed import MALFORMED
from quiver.prepared import prepare
from quiver.residency import CONSUMERS_MAX
from quiver.residency.messages import REPORT_BYTES_MAX, NeedsReport

LEASES_MAX: Final = CONSUMERS_MAX // 2  # of others: a consumer of this process always finds room
ENTRIES_MAX: Final = 4 * LEASES_MAX  # any user may have put any files into the folder
PATH_BYTES_MAX: Final = 4096  # Linux allows no longer ones
TEMPORARY_SECONDS: Final = 10.0  # the age from which a temporary file will not be locked and renamed any more
FRAMING_BYTES_MAX: Final = 32  # what MessagePack adds to the two
LEASE_BYTES_MAX: Final = FRAMING_BYTES_MAX + PATH_BYTES_MAX + REPORT_BYTES_MAX
_NAME: Final = re.compile("[0-9a-f]{32}")
_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{32}\.\d{1,10}")


def leases_in(root: Path) -> Path:
    """Return the folder of the lease files of a cache."""
    return root / "needs"


class _Content(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="quiver-lease-1"):
    """What a lease file says."""

    manifest_path: Annotated[bytes, msgspec.Meta(max_length=PATH_BYTES_MAX)]
    report: Annotated[bytes, msgspec.Meta(max_length=REPORT_BYTES_MAX)]


class LeaseFile:
    """The lease file of a consumer of this process."""

    def __init__(self, folder: Path, consumer: bytes) -> None:
        self.consumer = consumer
        self._path = folder / consumer.hex()
        self._temporary = folder / f".{consumer.hex()}.{os.getpid()}"
        self._fd = -1

    def write(self, manifest: Path, report: NeedsReport) -> None:
        """Replace the lease by a new one. Raises ``OSError``; then the old one counts until it expires."""
        data = msgspec.msgpack.encode(_Content(os.fsencode(manifest), report.encode()))
        self._path.parent.mkdir(exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._temporary, flags, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.write(fd, data) != len(data):
                raise OSError("the disk accepted only a part of it")
            self._temporary.replace(self._path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            raise
        self._unlock()
        self._fd = fd

    def remove(self) -> None:
        """Withdraw the lease. Raises ``OSError``; then others find it unlocked, and remove it."""
        try:
            if self._fd >= 0:
                _unlink_if(self._path, os.fstat(self._fd).st_ino)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing alone is not enough: a forked child has a copy
            os.close(self._fd)
            self._fd = -1


class ForeignLease(NamedTuple):
    """A lease of another consumer: where its manifest is, its report, and when it was written (monotonic clock)."""

    manifest: Path
    report: NeedsReport
    written: float


class _Seen(NamedTuple):
    """A file that was read: which version of it, and when it expires; ``None`` for a malformed one."""

    version: tuple[int, int]
    expires: float | None


class LeaseFolder:
    """The lease files of other processes; each is read again only when it changed. Used under a lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, _Seen] = {}

    def changes(self, now: float, own: Container[str]) -> tuple[list[ForeignLease], list[bytes]]:
        """Return the leases that are new since the last call, and the consumers whose lease ended.

        ``own``: the names of this process's own files, which are skipped.
        """
        new: list[ForeignLease] = []
        before, self._seen = self._seen, {}
        for name in self._names():
            if name not in own and len(self._seen) < LEASES_MAX:
                self._look(name, before.get(name), now, new)
        ended = _valid(before) - _valid(self._seen)
        return new, [bytes.fromhex(name) for name in ended]

    def _names(self) -> list[str]:
        names: list[str] = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in itertools.islice(entries, ENTRIES_MAX):
                if _NAME.fullmatch(entry.name):
                    names.append(entry.name)
                elif _TEMPORARY.fullmatch(entry.name):
                    self._sweep_temporary(entry.name)
        return names

    def _look(self, name: str, before: _Seen | None, now: float, new: list[ForeignLease]) -> None:
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
            seen, lease = before, None
            if seen is None or seen.version != version:
                lease = _read(fd, info, now, name)
                seen = _Seen(version, lease.written + lease.report.report.lease_seconds if lease else None)
            if _is_unlocked(fd) or (seen.expires is not None and seen.expires < now):
                _unlink_if(path, info.st_ino)
                return
            self._seen[name] = seen
            if lease is not None:
                new.append(lease)
        except OSError:
            return
        finally:
            os.close(fd)

    def _sweep_temporary(self, name: str) -> None:
        """Remove the file of a writer that died between writing and renaming."""
        path = self._folder / name
        with contextlib.suppress(OSError):
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or time.time() - info.st_mtime < TEMPORARY_SECONDS:
                return
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if _is_unlocked(fd):
                    _unlink_if(path, info.st_ino)
            finally:
                os.close(fd)


def _valid(seen: dict[str, _Seen]) -> set[str]:
    return {name for name, it in seen.items() if it.expires is not None}


def _read(fd: int, info: os.stat_result, now: float, name: str) -> ForeignLease | None:
    """Return the lease in a file, ``None`` if it is malformed."""
    if not 0 < info.st_size <= LEASE_BYTES_MAX:
        return None
    try:
        content = msgspec.msgpack.decode(os.pread(fd, info.st_size, 0), type=_Content)
        report = NeedsReport.decode(content.report)
    except (*MALFORMED, BadRequest):
        return None
    path = content.manifest_path
    if report.report.consumer.hex() != name or report.leaving or not path.startswith(b"/") or b"\0" in path:
        return None
    return ForeignLease(Path(os.fsdecode(path)), report, now - max(time.time() - info.st_mtime, 0.0))


def _is_unlocked(fd: int) -> bool:
    """Return whether no process holds the lock: the writer is dead. Where locks do not work, only expiry counts."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _unlink_if(path: Path, inode: int) -> None:
    """Remove a file, unless its name is another file's by now."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if path.lstat().st_ino == inode:
            path.unlink()


prepare(_Content)

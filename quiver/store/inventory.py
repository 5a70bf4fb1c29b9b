"""What a store holds. The files are the truth; a daemon that owns its folder alone may keep a copy in memory.

    <root>/shards/<2 hex>/<64 hex>      <root>/manifests/<2 hex>/<64 hex>      <root>/tmp      <root>/quarantine
    <root>/partial/<2 hex>/<64 hex>     in an embedded cache: shards some of whose samples the origin lost

A file in ``tmp`` is locked by its writer and has its final size before room is made for it: so a reservation counts,
and the file of a dead writer is one whose lock is free. This alone keeps processes that share a folder within the
capacity. Each reserves first and then counts what all have reserved, so that of two concurrent reservations at least
one sees the other. The lock of the folder (``locks``) prevents both from giving up then.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.digest import Digest
from quiver.domain import Domain
from quiver.errors import BadRequest, DiskFailed, Misconfigured
from quiver.forks import LockedFile
from quiver.residency.eviction import StoredFile
from quiver.store.domains import NOBODY, UNRECORDED, Domains, domains_recorded
from quiver.store.locks import FILE_MODE, BriefLock, own, share
from quiver.store.table import FileListing, FileTable

Listener = Callable[[Digest, bool], None]
_NOTHING: Final[frozenset[Digest]] = frozenset()


class Kind(enum.StrEnum):
    """What a digest can name; also the name of the folder."""

    SHARD = "shards"
    MANIFEST = "manifests"
    PARTIAL = "partial"  # shards some of whose samples the origin lost: bytes that do not hash to their digests


TOUCH_SECONDS: Final = 20.0  # precision of "last read" where the file's mtime stores it
HIDDEN_SECONDS: Final = 10.0  # longer than it takes to lock and rename a new file


class Inventory(Protocol):
    """What is held, and the lock under which room is reserved."""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock under which room is reserved: briefly, and never while data is moved.

        In a shared folder the lock's holder may be suspended; then the block runs without the lock.
        """
        ...

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock that makes changing a file and recording it one step. May be entered under ``locked``."""
        ...

    def held(self, kind: Kind) -> list[StoredFile]: ...

    def size(self, kind: Kind, digest: Digest) -> int:
        """Return the size of the file held under a digest, 0 if there is none."""
        ...

    def resident_bytes(self) -> int:
        """Return the bytes of all files that are held or reserved."""
        ...

    def bytes_with(self, size_bytes: int) -> int:
        """Return ``resident_bytes`` including ``size_bytes`` more, whose file is in ``tmp`` already."""
        ...

    def reserved(self, size_bytes: int) -> None: ...

    def released(self, size_bytes: int) -> None: ...

    def added(self, kind: Kind, digest: Digest, size_bytes: int, domains: Domains = UNRECORDED) -> None: ...

    def domains_of(self, kind: Kind, digest: Digest) -> Domains:
        """Return the sharing domains that hold a file; none if it is not held."""
        ...

    def shared(self, kind: Kind, digest: Digest, domains: Domains) -> None:
        """Record that these domains hold a file that is held already."""
        ...

    def removed(self, kind: Kind, digest: Digest) -> None: ...

    def missed(self, kind: Kind, digest: Digest) -> None:
        """Record that the file was not found: another process removed it, or it was never there."""
        ...

    def touched(self, kind: Kind, digest: Digest) -> None: ...

    def folders_remade(self) -> None:
        """Claim the folder again, and forget what is not there any more: somebody deleted folders of the store.

        Raises ``DiskFailed`` if another process owns the folder by now.
        """
        ...

    def now(self) -> float:
        """Return the time in seconds, by the clock of ``StoredFile.used``."""
        ...

    def close(self) -> None: ...


def file_of(root: Path, kind: Kind, digest: Digest) -> Path:
    name = digest.hex()
    return root / kind / name[:2] / name


def is_regular(path: Path) -> bool:
    """Whether a regular file has this name. A link to one was not put there by a store."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def scan(root: Path, kind: Kind) -> Iterator[tuple[Digest, os.stat_result]]:
    """Yield what is on disk. Stray files, folders, links and fifos are skipped: no store wrote them."""
    with contextlib.suppress(FileNotFoundError):
        for folder in os.scandir(root / kind):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                try:
                    digest = Digest.parse(entry.name)
                    if entry.is_file(follow_symlinks=False) and entry.name[:2] == folder.name:
                        yield digest, entry.stat(follow_symlinks=False)
                except (BadRequest, FileNotFoundError):
                    continue


def reserve_file(path: Path, size_bytes: int, mode: int = FILE_MODE) -> LockedFile:
    """Create the file of a reservation: locked, and of its final size, with no blocks allocated yet.

    The file gets its name once it is locked, since any process removes a named one that is not locked.
    """
    hidden = path.with_name(f".{path.name}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = LockedFile(os.open(hidden, flags, mode))
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(hidden, path)
        os.ftruncate(file.fd, size_bytes)
    except OSError:
        for name in (hidden, path):
            with contextlib.suppress(OSError):
                name.unlink(missing_ok=True)
        file.close()
        raise
    return file


def sweep(root: Path, *, hidden_seconds: float = HIDDEN_SECONDS) -> dict[int, int]:
    """Remove what dead writers left in ``tmp``; return the bytes that live ones have reserved, by file (inode).

    ``hidden_seconds``: the age at which a hidden file (not locked and named yet) is taken to have a dead writer.
    """
    reserved = {}
    for entry in os.scandir(root / "tmp"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if not entry.is_file(follow_symlinks=False):
                continue
            info = entry.stat(follow_symlinks=False)
            if entry.name.startswith(".") and time.time() - info.st_mtime < hidden_seconds:
                continue
            reserved[info.st_ino] = info.st_size  # also another user's, which this process cannot read or remove
            fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
                del reserved[info.st_ino]
            except BlockingIOError:
                reserved[info.st_ino] = os.fstat(fd).st_size
            finally:
                os.close(fd)
    return reserved


class MemoryInventory:
    """The inventory of a folder that one process owns, from its start to its end."""

    def __init__(self, root: Path, url: str = "") -> None:
        """Claim the folder for the daemon at ``url``. Raises ``Misconfigured`` if it is in use, ``DiskFailed``."""
        self._root = root
        self._url = url
        self._owner = own(root, url)
        self._lock = forks.rlock()
        sweep(root, hidden_seconds=0.0)
        # The file's own time preserves its age across a restart; from then on the clock is the monotonic one.
        age = time.time() - time.monotonic()
        self._files = {kind: FileTable() for kind in Kind}
        # Of files that domains other than ``SINGLE`` hold: a daemon without tokens has none.
        self._domains: dict[Kind, dict[Digest, Domains]] = {kind: {} for kind in Kind}
        self._held_in: dict[Kind, dict[Domain, set[Digest]]] = {kind: {} for kind in Kind}  # the same, by those domains
        for kind, table in self._files.items():
            for digest, info in scan(root, kind):
                table.set(digest, info.st_size, info.st_mtime - age)
                self._record(kind, digest, domains_recorded(file_of(root, kind, digest)))
        shards = self._files[Kind.SHARD]
        self._shard_bytes = sum(map(shards.size, shards.digests()))
        self._bytes = sum(table.size(digest) for table in self._files.values() for digest in table.digests())
        self._reserved_bytes = 0
        self._next_edition = itertools.count(time.time_ns())  # never repeated, not even after a restart
        self._editions = dict.fromkeys(shards.digests(), next(self._next_edition))
        self._listeners: tuple[Listener, ...] = ()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` for every shard that arrives (True) or goes (False), in order; return how to unsubscribe.

        It is called under the lock and must not block.
        """
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners = tuple(it for it in self._listeners if it is not listener)

        return unsubscribe

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return _entered(self._lock)

    changing = locked

    def held(self, kind: Kind) -> list[StoredFile]:
        with self._lock:
            return self._files[kind].files()

    def listing(self, kind: Kind) -> FileListing:
        """Return what is held as arrays, without the lock: an entry that is changing at this moment may be wrong."""
        return self._files[kind].listing()

    def digests(self, kind: Kind, domain: Domain | None = None) -> npt.NDArray[np.uint8]:
        """Return the digests of what is held, in a domain or in any, as rows ``(n, 32)``."""
        with self._lock:
            held = self._files[kind].listing()
            if domain is None or (domain in UNRECORDED and not self._domains[kind]):
                return held.digests
            return held.digests[[self.has(kind, digest, domain) for digest in held.names]]

    def count(self, kind: Kind) -> int:
        return len(self._files[kind])

    def size(self, kind: Kind, digest: Digest) -> int:
        return self._files[kind].size(digest)

    def has(self, kind: Kind, digest: Digest, domain: Domain | None = None) -> bool:
        """Whether a file is held: in this domain, or in any."""
        if domain:  # the same work whether others hold it or nobody does
            return digest in self._held_in[kind].get(domain, _NOTHING)
        is_held = digest in self._files[kind].rows
        return is_held and (domain is None or domain in self._domains[kind].get(digest, UNRECORDED))

    def domains_of(self, kind: Kind, digest: Digest) -> Domains:
        if digest not in self._files[kind].rows:
            return NOBODY
        return self._domains[kind].get(digest, UNRECORDED)

    def shared(self, kind: Kind, digest: Digest, domains: Domains) -> None:
        with self._lock:
            if digest in self._files[kind].rows:
                self._record(kind, digest, domains)
                self._tell(kind, digest, True)

    def _record(self, kind: Kind, digest: Digest, domains: Domains) -> None:
        before, held_in = self._domains[kind].get(digest, UNRECORDED), self._held_in[kind]
        if domains == UNRECORDED:
            self._domains[kind].pop(digest, None)
        else:
            self._domains[kind][digest] = domains
        for domain in filter(None, domains):
            held_in.setdefault(domain, set()).add(digest)
        for domain in filter(None, set(before).difference(domains)):
            held_in[domain].discard(digest)
            if not held_in[domain]:
                del held_in[domain]

    def edition(self, digest: Digest) -> int:
        """Return the edition of the file that has this shard's name now; 0 if the shard is not held."""
        return self._editions.get(digest, 0)

    def resident_bytes(self) -> int:
        return self._bytes

    def bytes_with(self, size_bytes: int) -> int:
        return self._bytes + size_bytes

    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    def shard_bytes(self) -> int:
        """Return the bytes of the shards that are held, without reservations."""
        return self._shard_bytes

    def reserved(self, size_bytes: int) -> None:
        with self._lock:
            self._bytes += size_bytes
            self._reserved_bytes += size_bytes

    def released(self, size_bytes: int) -> None:
        self.reserved(-size_bytes)

    def added(self, kind: Kind, digest: Digest, size_bytes: int, domains: Domains = UNRECORDED) -> None:
        with self._lock:
            before = self._files[kind].size(digest)
            self._record(kind, digest, domains)  # first: other threads look without the lock
            self._files[kind].set(digest, size_bytes, time.monotonic())
            self._changed(kind, digest, size_bytes - before, True)

    def removed(self, kind: Kind, digest: Digest) -> None:
        with self._lock:
            if digest in self._files[kind].rows:
                size_bytes = self._files[kind].remove(digest)
                self._record(kind, digest, UNRECORDED)  # last, for the same reason
                self._changed(kind, digest, -size_bytes, False)

    def _changed(self, kind: Kind, digest: Digest, size_bytes: int, held: bool) -> None:
        self._bytes += size_bytes
        if kind is Kind.SHARD:
            self._shard_bytes += size_bytes
            if held:
                self._editions[digest] = next(self._next_edition)
            else:
                del self._editions[digest]
        self._tell(kind, digest, held)

    def _tell(self, kind: Kind, digest: Digest, held: bool) -> None:
        for listener in self._listeners if kind is Kind.SHARD else ():
            listener(digest, held)

    def missed(self, kind: Kind, digest: Digest) -> None:
        with self._lock:  # files appear under this lock: this one may have appeared since
            if not is_regular(file_of(self._root, kind, digest)):
                self.removed(kind, digest)

    def touched(self, kind: Kind, digest: Digest) -> None:
        with self._lock:
            self._files[kind].touch(digest, time.monotonic())

    def folders_remade(self) -> None:
        with self._lock:
            if not self._owner.is_at(self._root / "owner"):
                try:
                    before, self._owner = self._owner, own(self._root, self._url)
                except Misconfigured as error:
                    raise DiskFailed(str(error)) from error
                before.close()
            for kind, table in self._files.items():
                for digest in table.digests():
                    if not is_regular(file_of(self._root, kind, digest)):
                        self.removed(kind, digest)

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self._owner.close()


class FolderInventory:
    """The inventory of a folder that several processes share: it scans every time. A file's mtime is its last use."""

    def __init__(self, root: Path) -> None:
        """Share the folder. Raises ``Misconfigured`` if a daemon runs on it."""
        self._root = root
        self._shared = share(root)
        self._lock = BriefLock(root)
        self._touched: dict[Digest, float] = {}

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return self._lock.held()

    def changing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # nothing is recorded beside the files, and a rename is atomic

    def held(self, kind: Kind) -> list[StoredFile]:
        return [StoredFile(digest, info.st_size, info.st_mtime) for digest, info in scan(self._root, kind)]

    def resident_bytes(self) -> int:
        files = sweep(self._root)  # first: a file renamed meanwhile is then counted twice, and never missed
        for kind in Kind:
            files.update((info.st_ino, info.st_size) for _, info in scan(self._root, kind))
        return sum(files.values())

    def size(self, kind: Kind, digest: Digest) -> int:
        try:
            info = file_of(self._root, kind, digest).lstat()
        except OSError:
            return 0
        return info.st_size if stat.S_ISREG(info.st_mode) else 0

    def bytes_with(self, size_bytes: int) -> int:
        return self.resident_bytes()

    def reserved(self, size_bytes: int) -> None:
        pass  # the file in tmp is the record

    released = reserved

    def added(self, kind: Kind, digest: Digest, size_bytes: int, domains: Domains = UNRECORDED) -> None:
        self._touched[digest] = time.time()

    def domains_of(self, kind: Kind, digest: Digest) -> Domains:
        return UNRECORDED  # whoever may read the folder shares all of it

    def shared(self, kind: Kind, digest: Digest, domains: Domains) -> None:
        pass

    def removed(self, kind: Kind, digest: Digest) -> None:
        self._touched.pop(digest, None)

    missed = removed

    def touched(self, kind: Kind, digest: Digest) -> None:
        now = time.time()
        if now - self._touched.get(digest, 0.0) > TOUCH_SECONDS:
            self._touched[digest] = now
            with contextlib.suppress(OSError):
                os.utime(file_of(self._root, kind, digest))

    def folders_remade(self) -> None:
        self._touched.clear()
        if self._shared is not None and not self._shared.is_at(self._root / "owner"):
            try:
                before, self._shared = self._shared, share(self._root)
            except Misconfigured as error:
                raise DiskFailed(str(error)) from error
            before.close()

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()


@contextlib.contextmanager
def _entered(lock: threading.RLock) -> Iterator[None]:
    with lock:
        yield

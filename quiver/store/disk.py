"""A content-addressed store on local disk that never holds more than its capacity.

Invariant: a file under its final name is complete, and hashed to that name when it was put there. Of a partial shard
the table hashed to the name, and each sample that it has to its own digest. One recipe ensures this: reserve room (a
locked file of the final size in ``tmp``) → write → compare with the name → fsync → rename → fsync of the folder →
index. A step that fails leaves nothing behind; what a killed process leaves is swept at the next start.

Files are immutable and only ever unlinked, so a file that was opened or mapped stays whole, whatever is evicted.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, overload

from quiver import forks
from quiver.digest import Bytes, Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import Corrupt, DiskFailed, NotFound, OverCapacity, QuiverError
from quiver.forks import LockedFile
from quiver.shard import verified
from quiver.sizes import format_size
from quiver.store.domains import record_domains, with_domain
from quiver.store.files import OpenFile, disk_errors, sync_folder
from quiver.store.folders import Folders
from quiver.store.inventory import FolderInventory, Inventory, Kind, MemoryInventory, file_of, is_regular, reserve_file
from quiver.store.locks import FILE_MODE

OPEN_FILES_MAX: Final = 512
PRIVATE_FILE_MODE: Final = 0o600
QUARANTINE_FILES_MAX: Final = 16  # for an operator to look at; they are evicted before anything that is read
RETRY_AFTER_SECONDS: Final = 5.0
# At a time. A write of 2 MiB or more is given huge pages in the page cache where the kernel has them. Measured on one
# virtual machine with free page reporting, such writes took 2.5 CPU seconds per GB, and writes of 1 MiB 0.4; most
# likely because free huge pages are what its host takes back first.
WRITE_BYTES: Final = 1 << 20
REHEARSE_BYTES_MAX: Final = 64 << 20  # two shards of the default size: a disk with room for them is usable again
MADV_POPULATE_READ: Final = 22  # reads mapped pages in, and fails where touching them would be SIGBUS
_READ_ONLY: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


Evict = Sequence[tuple[Kind, Digest]]  # what to evict: exactly these files, in this order
I_co = TypeVar("I_co", bound=Inventory, covariant=True)


class Store(Generic[I_co]):
    """Shards and manifests on disk. Blocking: a daemon calls it from threads. Safe to use from several threads."""

    def __init__(
        self, root: Path, capacity_bytes: int, inventory: I_co, *, writable: bool = True, private: bool = False
    ) -> None:
        self.name = f"disk {root}"
        self.root = root
        self.capacity_bytes = capacity_bytes
        self.inventory = inventory
        self.writable = writable
        self._folders = Folders(root, private=private)
        self._file_mode = PRIVATE_FILE_MODE if private else FILE_MODE
        self._open: OrderedDict[tuple[Kind, Digest], OpenFile] = OrderedDict()
        self._lock = forks.lock()

    @overload
    @classmethod
    def open(
        cls, root: Path, capacity_bytes: int, *, shared: Literal[False], url: str = "", private: bool = False
    ) -> Store[MemoryInventory]: ...
    @overload
    @classmethod
    def open(cls, root: Path, capacity_bytes: int, *, shared: Literal[True]) -> Store[FolderInventory]: ...
    @overload
    @classmethod
    def open(cls, root: Path, capacity_bytes: int, *, shared: bool, url: str = "") -> Store[Any]: ...
    @classmethod
    def open(cls, root: Path, capacity_bytes: int, *, shared: bool, url: str = "", private: bool = False) -> Store[Any]:
        """Open the store at ``root``, creating it if it does not exist. ``shared``: other processes may use it as well.

        ``url``: the address of the daemon that opens the store for itself alone. ``private``: no other user may read
        its files, nor whom they belong to. A shared store that this process may only read is not ``writable``. Raises
        ``Misconfigured`` if another process uses the store without sharing it, ``DiskFailed`` if it cannot be created.
        """
        writable = True
        try:
            Folders(root, private=private).make()
        except OSError as error:
            writable = False
            if not shared or error.errno not in _READ_ONLY or not (root / Kind.SHARD).is_dir():
                raise DiskFailed(
                    f"cannot make a store at {root}: {error.strerror}; choose another folder"
                    " (cache='file:///FOLDER', $QUIVER_CACHE, or a daemon's --data-dir)"
                ) from error
        if not shared:
            return Store(root, capacity_bytes, MemoryInventory(root, url), private=private)
        writable = writable and all(
            os.access(root / folder, os.W_OK | os.X_OK, effective_ids=True) for folder in (Kind.SHARD, "tmp")
        )
        return Store(root, capacity_bytes, FolderInventory(root), writable=writable)

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r}, {format_size(self.capacity_bytes)})"

    def close(self) -> None:
        with self._lock:
            self._open.clear()
        self.inventory.close()

    def resident_bytes(self) -> int:
        """Return the bytes of all files that are held or being written."""
        with self.inventory.locked():
            return self.inventory.resident_bytes()

    # -- reading ------------------------------------------------------------------------------------------------------

    def open_file(self, kind: Kind, digest: Digest) -> OpenFile:
        """Open the file and return it. Raises ``NotFound`` if it is not resident."""
        with self._lock:
            file = self._open.get((kind, digest))
            if file is not None:
                self._open.move_to_end((kind, digest))
        if file is None:
            file = self._opened(kind, digest)
            with self._lock:
                self._open[kind, digest] = file
                while len(self._open) > OPEN_FILES_MAX:
                    self._open.popitem(last=False)
                if not file.linked:  # dropped just now: keeping it open would occupy its room
                    self._open.pop((kind, digest), None)
        self.inventory.touched(kind, digest)
        return file

    def map_file(self, kind: Kind, digest: Digest) -> memoryview:
        """Map the file and return the mapping; no descriptor stays open. Raises ``NotFound``, ``DiskFailed``."""
        mapped = self._opened(kind, digest).map()
        self.inventory.touched(kind, digest)
        return mapped

    def _opened(self, kind: Kind, digest: Digest) -> OpenFile:
        try:
            return OpenFile(file_of(self.root, kind, digest))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # ENXIO: a socket
                self.inventory.missed(kind, digest)
                raise NotFound("the disk does not hold it") from None
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise OverCapacity(
                    f"{self.root}: too many open files; allow the process more (ulimit -n, LimitNOFILE=)", 1.0
                ) from error
            raise DiskFailed(f"cannot read from {self.root}: {error.strerror}") from error

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return a shard as a mapping of its file: ``ShardSource``."""
        mapped = self.map_file(Kind.SHARD, digest)
        if not 0 < len(mapped) <= size_bytes:
            raise Corrupt(f"shard of {len(mapped)} bytes where {size_bytes} were expected", self.name)
        return mapped

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        """Quarantine the file, so that a failing disk is not read for it again."""
        self.quarantine(Kind.SHARD, digest)
        return error

    def check(self, digest: Digest) -> None:
        """Read and verify a shard. Raises ``Corrupt``, having quarantined it, ``NotFound`` or ``DiskFailed``."""
        file = self._opened(Kind.SHARD, digest)  # opened again: the name may belong to another file by now
        try:
            with disk_errors(self.root, "read from"):
                data = file.read()
            verified(digest, data, self.name)
        except Corrupt:
            self.quarantine(Kind.SHARD, digest)
            raise

    # -- writing ------------------------------------------------------------------------------------------------------

    def put(self, kind: Kind, digest: Digest, data: Bytes, evict: Evict = ()) -> None:
        """Write verified content. Raises ``OverCapacity`` or ``DiskFailed``, having left nothing behind."""
        with self.reserve(kind, digest, len(data), evict) as writing:
            writing.write(data)
            writing.commit()

    def rehearse(self, size_bytes: int) -> None:
        """Write a file of this size, up to ``REHEARSE_BYTES_MAX``, and remove it. Raises ``DiskFailed``."""
        temporary = self.root / "tmp" / f"{os.getpid()}.{os.urandom(8).hex()}"
        size_bytes = max(min(size_bytes, REHEARSE_BYTES_MAX), 1)
        with disk_errors(self.root):
            self._remake_folders()
            file = reserve_file(temporary, size_bytes, self._file_mode)
            try:
                os.posix_fallocate(file.fd, 0, size_bytes)
                os.pwrite(file.fd, b"\0", 0)
                os.fsync(file.fd)
            finally:
                temporary.unlink(missing_ok=True)
                file.close()

    @contextlib.contextmanager
    def reserve(
        self, kind: Kind, digest: Digest, size_bytes: int, evict: Evict = (), domain: Domain = SINGLE
    ) -> Iterator[Writing]:
        """Reserve room, evicting exactly ``evict``. Without a ``commit`` inside the block nothing is kept.

        ``domain``: the sharing domain that will hold the file, beside those that hold one of this name already.

        Raises ``OverCapacity``, having evicted nothing, if there would still be too little room.
        """
        if not self.writable:
            raise self._read_only()
        # A process in another container may have the same id.
        temporary = self.root / "tmp" / f"{os.getpid()}.{os.urandom(8).hex()}"
        with disk_errors(self.root), self.inventory.locked():
            self._remake_folders()
            file = reserve_file(temporary, size_bytes, self._file_mode)
            try:
                self._evict(evict, size_bytes)
                if size_bytes:
                    os.posix_fallocate(file.fd, 0, size_bytes)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                file.close()
                raise
            self.inventory.reserved(size_bytes)
        writing = Writing(self, kind, digest, size_bytes, temporary, file)
        writing.domain = domain
        try:
            yield writing
        finally:
            self._settle(writing)

    def _remake_folders(self) -> None:
        """Make folders again that somebody deleted, and forget what was in them: the origin has it."""
        if self._folders.remake():
            with self._lock:
                self._open.clear()
            self.inventory.folders_remade()

    def _settle(self, writing: Writing) -> None:
        """Release the room of a file that was not committed. A file that cannot be removed now is swept later."""
        try:
            if not writing.committed:
                with disk_errors(self.root), self.inventory.changing():
                    self.inventory.released(writing.size_bytes)
                    writing.path.unlink(missing_ok=True)
        finally:
            writing.close()

    def admit(self, writing: Writing, *, shares: bool = False) -> bool:
        """Make a written file visible and count it, in one step: it must not be dropped in between.

        ``shares``: if other sharing domains hold a file of this name, it is theirs and the writer's from now on, and
        the written one is removed. Returns whether the written one was made visible.
        """
        final = file_of(self.root, writing.kind, writing.digest)
        with self.inventory.changing():
            before = self.inventory.domains_of(writing.kind, writing.digest)
            domains = with_domain(before, writing.domain)
            self._put_strays_aside(final)
            is_new_folder = not final.parent.is_dir()
            final.parent.mkdir(parents=True, exist_ok=True)
            is_new = not (shares and before and writing.domain not in before and is_regular(final))
            if domains != ((writing.domain,) if is_new else before):
                record_domains(writing.path if is_new else final, domains)
            if is_new:
                writing.path.replace(final)
                writing.committed = True
                self.inventory.released(writing.size_bytes)
                self.inventory.added(writing.kind, writing.digest, writing.size_bytes, domains)
                self.forget_open(writing.kind, writing.digest)
            else:
                self.inventory.shared(writing.kind, writing.digest, domains)
        try:
            if is_new_folder:
                sync_folder(final.parent.parent)
            sync_folder(final.parent)
        except OSError:
            if is_new:
                self.drop(writing.kind, writing.digest)  # the rename may not survive a crash
            raise
        return is_new

    def drop(self, kind: Kind, digest: Digest) -> None:
        """Remove a file. A process that has it open or mapped keeps it."""
        with self.inventory.changing():
            place = file_of(self.root, kind, digest)
            self._put_strays_aside(place)
            place.unlink(missing_ok=True)
            self._forget(kind, digest)

    def leave(self, kind: Kind, digest: Digest, domain: Domain) -> int:
        """Have a sharing domain no longer hold a file, which is removed if no other one does; return its bytes.

        0: the domain does not hold it.
        """
        with self.inventory.changing():
            before = self.inventory.domains_of(kind, digest)
            if domain not in before:
                return 0
            size_bytes = self.inventory.size(kind, digest)
            others = tuple(it for it in before if it != domain)
            if others:
                record_domains(file_of(self.root, kind, digest), others)
                self.inventory.shared(kind, digest, others)
            else:
                self.drop(kind, digest)
            return size_bytes

    def quarantine(self, kind: Kind, digest: Digest) -> None:
        """Move a wrong file to the quarantine: it is no longer read, and an operator can inspect it.

        If the disk refuses even that, the file no longer counts as held, so that it is not read again.
        """
        folder = self.root / "quarantine"
        with self.inventory.changing():
            with contextlib.suppress(OSError):
                file_of(self.root, kind, digest).replace(folder / digest.hex())
            self._forget(kind, digest)
        with contextlib.suppress(OSError):
            for _, path, _ in _oldest_first(folder)[:-QUARANTINE_FILES_MAX]:
                path.unlink(missing_ok=True)

    def _put_strays_aside(self, place: Path) -> None:
        """Quarantine an entry that has a store file's name but was not written by a store: it must not block a fill.

        A folder stays in the quarantine: the store did not write its contents and must not delete them.
        """
        for path, is_ours in ((place.parent, Path.is_dir), (place, is_regular)):
            if os.path.lexists(path) and not is_ours(path):
                with contextlib.suppress(FileNotFoundError):  # another process moved it first
                    path.rename(self.root / "quarantine" / f"stray.{time.time_ns()}.{os.urandom(4).hex()}")

    def forget_open(self, kind: Kind, digest: Digest) -> None:
        """Open the file again next time: another file has taken its name."""
        with self._lock:
            self._open.pop((kind, digest), None)

    def _forget(self, kind: Kind, digest: Digest) -> None:
        self.forget_open(kind, digest)
        self.inventory.removed(kind, digest)

    def trim(self) -> None:
        """Evict down to the capacity, which may have been reduced. A read-only command must not call this."""
        if not self.writable:
            return
        with disk_errors(self.root), self.inventory.locked():
            excess = self.inventory.resident_bytes() - self.capacity_bytes
            for kind in (Kind.PARTIAL, Kind.SHARD, Kind.MANIFEST):
                for held in sorted(self.inventory.held(kind), key=lambda held: held.used) if excess > 0 else ():
                    if excess <= 0:
                        return
                    self.drop(kind, held.digest)
                    excess -= held.size_bytes

    def _quarantined_bytes(self, at_most: int) -> int:
        """Remove the quarantine's oldest files until ``at_most`` bytes are left; return how many it occupies."""
        kept = _oldest_first(self.root / "quarantine")
        total = sum(size for _, _, size in kept)
        for _, path, size in kept:
            if total <= max(at_most, 0):
                break
            path.unlink(missing_ok=True)
            total -= size
        return total

    def lacking(self, size_bytes: int) -> int:
        """Return how many bytes to evict before ``size_bytes`` more fit. Raises ``OverCapacity``, ``DiskFailed``.

        ``OverCapacity``: they would not fit into an empty store.
        """
        if not self.writable:
            raise self._read_only()
        self._check_size(size_bytes)
        with disk_errors(self.root), self.inventory.locked():
            self._remake_folders()
            return max(self.inventory.resident_bytes() + size_bytes - self.capacity_bytes, 0)

    def _evict(self, evict: Evict, size_bytes: int) -> None:
        """Evict exactly ``evict`` for a file of ``size_bytes`` that is already in ``tmp``.

        Quarantined files are removed first: nobody reads them. Raises ``OverCapacity``, having evicted nothing.
        """
        self._check_size(size_bytes)
        lacking_bytes = self.inventory.bytes_with(size_bytes) - self.capacity_bytes
        if lacking_bytes > sum(self.inventory.size(kind, digest) for kind, digest in dict.fromkeys(evict)):
            raise self.full()
        self._quarantined_bytes(at_most=-lacking_bytes)
        for kind, digest in evict:
            self.drop(kind, digest)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.capacity_bytes:
            raise OverCapacity(
                f"{self.root}: {format_size(size_bytes)} do not fit into a capacity of"
                f" {format_size(self.capacity_bytes)}; give it more, or index with a smaller --shard-size",
                RETRY_AFTER_SECONDS,
            )

    def _read_only(self) -> DiskFailed:
        return DiskFailed(f"{self.root} is not writable by this process; let its user write to it")

    def full(self) -> OverCapacity:
        """Return the error to raise when there is no room."""
        return OverCapacity(f"{self.root}: {format_size(self.capacity_bytes)} are all in use", RETRY_AFTER_SECONDS)


class Writing:
    """A file being written: its room is reserved, and it is not visible yet."""

    def __init__(
        self, store: Store[Any], kind: Kind, digest: Digest, size_bytes: int, temporary: Path, file: LockedFile
    ) -> None:
        self.size_bytes = size_bytes
        self.committed = False
        self.domain = SINGLE
        self._store = store
        self.kind = kind
        self.digest = digest
        self.path = temporary
        self._file = file
        self._at = 0

    def write(self, data: Bytes) -> None:
        """Append. Raises ``Corrupt`` past the reserved size, ``DiskFailed`` if the disk refuses."""
        view = memoryview(data)
        if self._at + len(view) > self.size_bytes:
            raise Corrupt(f"more than the {self.size_bytes} bytes announced", "upload")
        with disk_errors(self._store.root):
            while view:
                written = os.pwrite(self._file.fd, view[:WRITE_BYTES], self._at)
                self._at += written
                view = view[written:]

    def content(self) -> mmap.mmap:
        """Map what was written, to compare it with its name. Raises ``Corrupt``, ``DiskFailed``."""
        if self._at != self.size_bytes or not self.size_bytes:
            raise Corrupt(f"{self._at} bytes where {self.size_bytes} were announced", "upload")
        try:
            mapped = mmap.mmap(self._file.fd, self.size_bytes, access=mmap.ACCESS_READ)
            mapped.madvise(MADV_POPULATE_READ)
        except ValueError as error:
            raise DiskFailed(f"{self._store.root}: a file cannot be read back: it was truncated") from error
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14
                raise DiskFailed(f"{self._store.root}: a file cannot be read back: {error.strerror}") from error
        return mapped

    def commit(self, *, shares: bool = False) -> bool:
        """Make the file visible under its name. The caller has compared the content with the name.

        ``shares``: a file of this name that only other sharing domains hold is known to be right. Then it is shared
        with the writer's domain, after the same work: nobody learns from the time it takes that it was there. Returns
        whether this file is the one that is held now.
        """
        if self._at != self.size_bytes:
            raise Corrupt(f"{self._at} bytes where {self.size_bytes} were announced", "upload")
        with disk_errors(self._store.root):
            if self.domain != SINGLE:
                record_domains(self._file.fd, (self.domain,))  # so that it is synced with the file
            os.fsync(self._file.fd)
            return self._store.admit(self, shares=shares)

    def close(self) -> None:
        """Unlock and close the temporary file."""
        self._file.close()


def _oldest_first(folder: Path) -> list[tuple[float, Path, int]]:
    """Return time, path and size of the files in a folder. Another process may be removing some meanwhile."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode):
                continue
            found.append((info.st_mtime, path, info.st_size))
    return sorted(found)

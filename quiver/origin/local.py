"""Local and network-mounted files, read with ``preadv`` straight into the caller's buffer.

Adjacent pieces of a file, such as the members of a tar, are read by one call; the gaps between them, such as the tar's
headers, are read into memory that is discarded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Final

from quiver.errors import Changed, Forbidden, NotAllowed, Unavailable
from quiver.location import Location, object_path, shown
from quiver.origin.base import READ_SECONDS, Extent
from quiver.origin.beneath import Beneath

Piece = tuple[int, memoryview]  # an offset in the file, and where the bytes from there on go
Job = tuple[str, list[Piece]]  # an object, and which pieces of it to read

# A network file system answers a stat and a read in about a millisecond, so 300 small files need parallel reads.
THREADS: Final = 4
PARALLEL_FROM_FILES: Final = 8
GAP_BYTES_MAX: Final = 4096  # between pieces: a tar's header and padding, also if a member has extended headers
PIECES_MAX: Final = 500  # per call: the kernel takes 1,024 buffers (IOV_MAX), and each gap needs one
OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # non-blocking: a fifo must not hang us
# Errors of a network mount while its server restarts, which pass; any other error of a file lasts.
PASSING: Final = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH})


class LocalStore:
    """Files under a folder. Safe to use from several threads and after a fork."""

    def __init__(self, folder: Location, *, within: str | None = None) -> None:
        """``within``: ``folder`` or a folder above it, out of which no symbolic link may lead."""
        self.root = folder.path
        self.base = f"file://{self.root.rstrip('/')}/"
        self._within = within
        self._below = os.path.relpath(self.root, within) if within is not None else ""

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def read(self, extents: Sequence[Extent], out: memoryview, within_seconds: float = READ_SECONDS) -> int:
        jobs: list[Job] = []
        at = 0
        for path, run in groupby(extents, key=lambda extent: extent.path):
            pieces = []
            for extent in run:
                pieces.append((extent.offset, out[at : at + extent.length]))
                at += extent.length
            jobs.append((path, pieces))
        with self._opener() as opened:
            if len(jobs) < PARALLEL_FROM_FILES:
                return self._read_files(jobs, opened)
            shares = [jobs[i::THREADS] for i in range(THREADS)]
            with ThreadPoolExecutor(THREADS, thread_name_prefix="quiver-local") as pool:
                return sum(pool.map(lambda share: self._read_files(share, opened), shares))

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _opener(self) -> Iterator[Callable[[str], int]]:
        """Yield a function that opens an object by its path, for one read: a mount may change between reads."""
        if self._within is None:
            yield lambda path: os.open(os.path.join(self.root, path), OPEN)
            return
        try:
            beneath = Beneath(self._within)
        except OSError as error:
            raise Unavailable(
                self._within, f"this folder, given as --origin, cannot be opened: {error.strerror}"
            ) from error
        with beneath:
            yield lambda path: beneath.open(os.path.join(self._below, path))

    def _read_files(self, jobs: list[Job], opened: Callable[[str], int]) -> int:
        return sum(self._read_file(path, pieces, opened) for path, pieces in jobs)

    def _read_file(self, path: str, pieces: list[Piece], opened: Callable[[str], int]) -> int:
        """Read the pieces; return how many bytes were read, gaps included."""
        full = os.path.join(self.root, object_path(path, "file"))
        try:
            fd = opened(path)
        except (FileNotFoundError, NotADirectoryError):
            raise Changed(full, "vanished") from None
        except PermissionError:
            raise Forbidden(
                f"cannot read {shown(full)}: permission denied; let the user that Quiver runs as read it"
            ) from None
        except OSError as error:
            if error.errno == errno.EXDEV and self._within is not None:
                raise NotAllowed(
                    f"{shown(full)} leads outside {self._within} through a symbolic link;"
                    " serve its target's folder instead"
                ) from error
            raise Unavailable(
                full, f"cannot be opened: {error.strerror}", lasting=error.errno not in PASSING
            ) from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Changed(full, "is no regular file any more")
            return sum(_read_run(fd, run, full) for run in _runs(pieces))
        finally:
            os.close(fd)


def _runs(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces grouped into runs, in which the gap between two pieces is small."""
    begin, end = 0, -1  # of the run: where it begins in ``pieces``, and ends in the file
    for at, (offset, piece) in enumerate(pieces):
        if at > begin and (not 0 <= offset - end <= GAP_BYTES_MAX or at - begin == PIECES_MAX):
            yield pieces[begin:at]
            begin = at
        end = offset + len(piece)
    yield pieces[begin:]


def _read_run(fd: int, run: list[Piece], full: str) -> int:
    """Read a run by one call; piece by piece if that fails or falls short. Return how many bytes were read."""
    begin = end = run[0][0]
    buffers: list[memoryview] = []
    unused = memoryview(bytearray(GAP_BYTES_MAX)) if len(run) > 1 else memoryview(b"")
    for offset, piece in run:
        if offset > end:
            buffers.append(unused[: offset - end])
        buffers.append(piece)
        end = offset + len(piece)
    if len(run) > 1:
        with contextlib.suppress(OSError):  # the loop below finds out which piece cannot be read
            if os.preadv(fd, buffers, begin) == end - begin:
                return end - begin
    for offset, piece in run:
        _read_exactly(fd, piece, offset, full)
    return sum(len(piece) for _, piece in run)


def _read_exactly(fd: int, piece: memoryview, offset: int, full: str) -> None:
    done = 0
    while done < len(piece):
        try:
            count = os.preadv(fd, [piece[done:]], offset + done)
        except OSError as error:
            lasting = error.errno not in PASSING
            raise Unavailable(full, f"cannot be read: {error.strerror}", lasting=lasting) from error
        if count == 0:
            raise Changed(full, "became shorter")
        done += count

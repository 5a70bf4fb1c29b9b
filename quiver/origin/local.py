"""Local and network-mounted files, read with ``preadv`` straight into the caller's buffer."""

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

# A network file system answers a stat and a read in about a millisecond: 300 small files want several at once.
THREADS: Final = 4
PARALLEL_FROM_FILES: Final = 8
OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # non-blocking: a fifo must not hang us
# A network mount whose server restarts says one of these, and waiting helps; any other error of a file lasts.
PASSING: Final = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH})


class LocalStore:
    """Files under a folder. Safe to use from several threads and after a fork."""

    def __init__(self, folder: Location, *, within: str | None = None) -> None:
        """``within``: a local folder above it, or it itself, out of which no symbolic link may lead."""
        self.root = folder.path
        self.base = f"file://{self.root.rstrip('/')}/"
        self._within = within
        self._below = os.path.relpath(self.root, within) if within is not None else ""

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def read(self, extents: Sequence[Extent], out: memoryview, within_seconds: float = READ_SECONDS) -> int:
        jobs: list[tuple[str, list[tuple[int, memoryview]]]] = []
        at = 0
        for path, run in groupby(extents, key=lambda extent: extent.path):
            pieces = []
            for extent in run:
                pieces.append((extent.offset, out[at : at + extent.length]))
                at += extent.length
            jobs.append((path, pieces))
        with self._opener() as opened:
            if len(jobs) < PARALLEL_FROM_FILES:
                self._read_files(jobs, opened)
            else:
                shares = [jobs[i::THREADS] for i in range(THREADS)]
                with ThreadPoolExecutor(THREADS, thread_name_prefix="quiver-local") as pool:
                    for _ in pool.map(lambda share: self._read_files(share, opened), shares):
                        pass
        return at

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _opener(self) -> Iterator[Callable[[str], int]]:
        """Give what opens an object by its path, for the time of one read: a mount may come and go in between."""
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

    def _read_files(self, jobs: list[tuple[str, list[tuple[int, memoryview]]]], opened: Callable[[str], int]) -> None:
        for path, pieces in jobs:
            self._read_file(path, pieces, opened)

    def _read_file(self, path: str, pieces: list[tuple[int, memoryview]], opened: Callable[[str], int]) -> None:
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
            for offset, piece in pieces:
                _read_exactly(fd, piece, offset, full)
        finally:
            os.close(fd)


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

"""Local and network-mounted files, read with ``preadv`` straight into the caller's buffer."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Final

from quiver.errors import Changed, Forbidden, Unavailable
from quiver.origin.base import READ_SECONDS, Extent, check_path

# A network file system answers a stat and a read in about a millisecond: 300 small files want several at once.
THREADS: Final = 4
PARALLEL_FROM_FILES: Final = 8
# A network mount whose server restarts says one of these, and waiting helps; any other error of a file lasts.
PASSING: Final = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH})


class LocalStore:
    """Files under a folder. Safe to use from several threads and after a fork."""

    def __init__(self, root: str, *, contain: bool = False) -> None:
        self.root = root.rstrip("/") or "/"
        self.base = f"file://{self.root}/"
        self._within = os.path.join(os.path.realpath(self.root), "") if contain else None

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
        if len(jobs) < PARALLEL_FROM_FILES:
            for path, pieces in jobs:
                self._read_file(path, pieces)
        else:
            shares = [jobs[i::THREADS] for i in range(THREADS)]
            with ThreadPoolExecutor(THREADS, thread_name_prefix="quiver-local") as pool:
                for _ in pool.map(self._read_files, shares):
                    pass
        return at

    def close(self) -> None:
        pass

    def _read_files(self, jobs: list[tuple[str, list[tuple[int, memoryview]]]]) -> None:
        for path, pieces in jobs:
            self._read_file(path, pieces)

    def _read_file(self, path: str, pieces: list[tuple[int, memoryview]]) -> None:
        full = os.path.join(self.root, check_path(path))
        try:
            fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # non-blocking: a fifo must not hang us
        except (FileNotFoundError, NotADirectoryError):
            raise Changed(full, "vanished") from None
        except PermissionError:
            raise Forbidden(
                f"cannot read {full}: permission denied; let the user that Quiver runs as read it"
            ) from None
        except OSError as error:
            raise Unavailable(
                full, f"cannot be opened: {error.strerror}", lasting=error.errno not in PASSING
            ) from error
        try:
            self._check(fd, full)
            for offset, piece in pieces:
                _read_exactly(fd, piece, offset, full)
        finally:
            os.close(fd)

    def _check(self, fd: int, full: str) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Changed(full, "is no regular file any more")
        if self._within is not None and not os.readlink(f"/proc/self/fd/{fd}").startswith(self._within):
            raise Forbidden(
                f"{full} leads outside {self.root} through a symbolic link; serve its target's folder instead"
            )


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

"""A real disk with bad blocks: a loop device whose backing file is cut short, so that reads of its blocks fail by EIO.

What Linux has cached in memory can still be read. ``forget`` removes the files of a folder from memory, also where
processes have them mapped, so that their next touch of a page is a read from the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

IMAGE_BYTES: Final = 64 << 20
GOOD_BYTES: Final = 8 << 20  # what is left: the metadata; ``pad`` keeps the blocks of files out of it
PROCESS_MADVISE: Final = 440  # the number of the system call
MADV_PAGEOUT: Final = 21


class BadBlocks:
    """A file system in ``folder``, on a device that ``fail`` breaks."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder = folder
        self._image = image

    def fail(self) -> None:
        """Have reads of every file fail from now on."""
        os.sync()
        os.truncate(self._image, GOOD_BYTES)

    def heal(self) -> None:
        """Have reads succeed again. What was in the blocks is lost: they are zeros."""
        os.truncate(self._image, IMAGE_BYTES)

    def fails(self, file: Path) -> bool:
        """Whether the file cannot be read from the disk."""
        with file.open("rb") as opened:
            try:
                os.pread(opened.fileno(), 1, 0)
            except OSError:
                return True
        return False


@contextlib.contextmanager
def bad_blocks(where: Path) -> Iterator[BadBlocks]:
    """Make and mount a file system; skips where that is not allowed."""
    if os.geteuid() != 0 or not shutil.which("losetup") or not shutil.which("mkfs.ext4"):
        pytest.skip("a loop device takes root, losetup and mkfs.ext4")
    image, folder = where / "image", where / "mounted"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    folder.mkdir()
    made = _run("losetup", "--find", "--direct-io=on", "--show", str(image))
    if made.returncode:
        pytest.skip(f"there is no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        done = _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0", device)
        done = done if done.returncode else _run("mount", "-o", "errors=continue", device, str(folder))
        if done.returncode:
            pytest.skip(f"no file system can be made or mounted: {done.stderr.strip()}")
        try:
            with (folder / "pad").open("wb") as pad:
                os.posix_fallocate(pad.fileno(), 0, 2 * GOOD_BYTES)
            yield BadBlocks(folder, image)
        finally:
            _run("umount", "-l", str(folder))
    finally:
        _run("losetup", "--detach", device)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True)


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def forget(folder: Path, *pids: int) -> None:
    """Remove the content of a folder's files from memory. Skips the test where the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in pids:
        fd = os.pidfd_open(pid)
        try:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if not (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) .* (/.*)", line)) or str(folder) not in found[3]:
                    continue
                start, end = int(found[1], 16), int(found[2], 16)
                vector = _Vector(start, end - start)
                if libc.syscall(PROCESS_MADVISE, fd, ctypes.byref(vector), 1, MADV_PAGEOUT, 0) < 0:
                    pytest.skip(f"pages of another process cannot be removed: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(fd)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

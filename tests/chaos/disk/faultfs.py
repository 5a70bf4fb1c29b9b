"""Counts, records, fails and crashes a process's file-system calls below one folder.

A process is started with a library (``faultfs.c``, by ``LD_PRELOAD``). ``Control`` is the page of memory that both
share: a test can change its mind while a daemon runs, and sees in ``hits`` that the fault really fired. Invariant: only
calls below ``root`` are counted, recorded or failed.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import pytest

SOURCE: Final = Path(__file__).with_name("faultfs.c")
_HEAD: Final = struct.Struct("<IIIIQqq")


class Op(enum.IntEnum):
    """A call, as in ``faultfs.c``. Those before ``READ`` change the folder and are counted."""

    CREATE = 0
    WRITE = 1
    FSYNC = 2
    RENAME = 3
    LINK = 4
    UNLINK = 5
    TRUNCATE = 6
    ALLOCATE = 7
    MKDIR = 8
    RMDIR = 9
    READ = 10
    OPEN = 11
    MAP = 12
    MARK = 13


WRITING: Final = (Op.CREATE, Op.WRITE, Op.RENAME, Op.TRUNCATE, Op.ALLOCATE, Op.MKDIR)


class Recorded(NamedTuple):
    """A call that succeeded. ``inode`` is that of the file; ``other``: where a rename moved it; a mark has its text."""

    op: Op
    inode: int
    path: str
    other: str
    data: bytes
    offset: int
    extra: int


class _Page(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("count", "crash_at", "torn", "fail_mask", "fail_errno", "fail_after")),
        *((name, ctypes.c_uint64) for name in ("hits", "recording")),
        ("fail_path", ctypes.c_char * 512),
        ("root", ctypes.c_char * 1024),
        ("record", ctypes.c_char * 1024),
    ]


class Control:
    """The shared page, in ``folder``. A process started with ``environment`` obeys it."""

    def __init__(self, folder: Path, root: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._path = folder / "control"
        if not self._path.exists():
            self._path.write_bytes(bytes(ctypes.sizeof(_Page)))
        with self._path.open("r+b") as file:
            self.page = _Page.from_buffer(mmap.mmap(file.fileno(), 0))
        if root is not None:
            self.root = root

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(library(self.folder)), "FAULTFS_CONTROL": str(self._path)}

    @property
    def root(self) -> Path:
        return Path(self.page.root.decode())

    @root.setter
    def root(self, root: Path) -> None:
        self.page.root = str(root).encode()

    @property
    def hits(self) -> int:
        """How many calls were made to fail."""
        return int(self.page.hits)

    @property
    def count(self) -> int:
        """How many changes were seen."""
        return int(self.page.count)

    def fail(self, ops: Iterable[Op], number: int, *, path: str = "", after: int = 0) -> None:
        """Have these calls fail with an error number from now on, on paths that contain ``path``."""
        self.page.fail_errno, self.page.fail_path, self.page.fail_after = number, path.encode(), after
        self.page.fail_mask = sum(1 << op for op in set(ops))

    def heal(self) -> None:
        self.page.fail_mask = 0

    def crash_at(self, number: int, *, torn: bool = False) -> None:
        """End the process before its change ``number``, counted from now; a torn write is made by half first."""
        self.page.count, self.page.crash_at, self.page.torn = 0, number, torn

    def record_to(self, path: Path) -> None:
        self.page.record, self.page.recording = str(path).encode(), 1


def library(folder: Path) -> Path:
    """Compile the library into ``folder``; return its path. Skips the test where there is no C compiler."""
    target = folder / "faultfs.so"
    if not target.exists():
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no C compiler: faultfs.c cannot be built")
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"]
        built = subprocess.run(command, check=False, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
    return target


def mark(text: str) -> None:
    """Write a mark between the recorded calls of this process, if they are recorded."""
    faultfs_mark = getattr(ctypes.CDLL(None), "faultfs_mark", None)
    if faultfs_mark is not None:
        faultfs_mark(text.encode())


def recorded(path: Path) -> list[Recorded]:
    """Return what was recorded, in order."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        op, *sizes, inode, offset, extra = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        parts = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        path_, other, content = parts
        found.append(Recorded(Op(op), inode, path_.decode(), other.decode(), content, offset, extra))
    return found

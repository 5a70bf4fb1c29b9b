"""Asks the kernel whether mapped memory can be read: for Python, which cannot catch SIGBUS as native code does.

A read of mapped memory whose file was truncated, or whose disk fails, raises SIGBUS, which ends the process.
``MADV_POPULATE_READ`` maps the pages as such a read would, and returns an error instead. It costs as much as copying
the pages, so it is skipped if ``mincore`` reports them in memory. For a file that the process neither owns nor may
write, ``mincore`` reports every page in memory; so truncation is detected by populating the last page.

The answer holds only at that moment: if a file is truncated between the check and the read, the process still ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Final

MADV_POPULATE_READ: Final = 22  # Linux 5.14; on older kernels everything is assumed to be readable

_libc: Final = ctypes.PyDLL(None, use_errno=True)  # with the GIL: a call takes about a microsecond
_madvise, _mincore = _libc.madvise, _libc.mincore
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def is_readable(address: int, size: int) -> bool:
    """Whether ``size`` bytes at an address in a mapping can be read, if its last page can (``reaches``)."""
    first = address - address % mmap.PAGESIZE
    length = address + size - first
    pages = -(-length // mmap.PAGESIZE)
    seen = ctypes.create_string_buffer(pages)
    if not _mincore(first, length, seen) and seen.raw.count(1) == pages:
        return True
    return not _madvise(first, length, MADV_POPULATE_READ) or ctypes.get_errno() == errno.EINVAL


def reaches(end: int) -> bool:
    """Whether a mapping can be read up to an address: its file was not truncated by a page or more."""
    first = (end - 1) - (end - 1) % mmap.PAGESIZE
    return not _madvise(first, end - first, MADV_POPULATE_READ) or ctypes.get_errno() == errno.EINVAL

"""Whether mapped memory can be read, asked of the kernel: where there is no native code that can be guarded.

A read of mapped memory whose file became shorter, or whose disk fails, is answered with SIGBUS, which ends the process.
``MADV_POPULATE_READ`` maps the pages as such a read would, and fails instead. It tells what is so now: a file that is
shortened between this and the read still ends the process, within microseconds where Python copies or hashes a sample.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Final

MADV_POPULATE_READ: Final = 22  # Linux 5.14; before, nothing is found and everything is taken to be readable

_madvise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, use_errno=True)(
    ("madvise", ctypes.CDLL(None, use_errno=True))
)


def is_readable(address: int, size: int) -> bool:
    """Whether ``size`` bytes at an address in a mapping can be read."""
    first = address - address % mmap.PAGESIZE
    if not size or not _madvise(first, address + size - first, MADV_POPULATE_READ):
        return True
    return ctypes.get_errno() == errno.EINVAL

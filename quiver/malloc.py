"""How much freed memory glibc's malloc keeps.

Its default suits neither client nor daemon: large freed pieces are returned to the system and faulted in again page by
page for the next batch, or stay forever in the arena of a thread that once filled a shard. If malloc is not glibc's, or
the user tuned it, nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

# <malloc.h>
M_TRIM_THRESHOLD: Final = -1  # free bytes at the top of an arena; more are returned to the system
M_MMAP_THRESHOLD: Final = -3  # a piece of this size or more is a mapping of its own, unmapped when it is freed
MMAP_THRESHOLD_BYTES_MAX: Final = 32 << 20  # glibc accepts no more: half a heap of a thread's arena


def tune(options: Mapping[int, int]) -> bool:
    """Set options of this process's malloc, in bytes; return whether they were set. A forked child inherits them."""
    glibc = _glibc()
    if glibc is None or _tuned_by_user():
        return False
    return all(glibc.mallopt(option, size_bytes) for option, size_bytes in options.items())


def _glibc() -> ctypes.CDLL | None:
    """Return glibc, if the process's malloc is glibc's and not that of a library loaded before it, as jemalloc is."""
    try:
        glibc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
        glibc.gnu_get_libc_version  # noqa: B018 - other C libraries do not have it
        # A library that replaces malloc replaces this too; the address of malloc itself may be the interpreter's.
        of_both = [ctypes.cast(library.malloc_usable_size, ctypes.c_void_p).value for library in (glibc, process)]
        return glibc if of_both[0] == of_both[1] else None
    except (OSError, AttributeError):
        return None


def _tuned_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )

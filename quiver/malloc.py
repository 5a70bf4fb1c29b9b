"""How much freed memory glibc's malloc keeps, where that is ours to say.

Its own rule suits neither end here: what is freed in large pieces goes back to the system and is taken again page by
page for the next batch, or lies for ever in the arena of a thread that once filled a shard. Where malloc is not that of
glibc, or the user tuned it himself, nothing is done.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Final

# <malloc.h>
M_TRIM_THRESHOLD: Final = -1  # bytes free at the top of an arena, past which they go back to the system
M_MMAP_THRESHOLD: Final = -3  # from this size on a piece is a mapping of its own, which is gone when it is freed
MMAP_THRESHOLD_BYTES_MAX: Final = 32 << 20  # glibc refuses more: half a heap of a thread's arena


def tune(options: Mapping[int, int]) -> bool:
    """Set options of this process's malloc, in bytes; return whether that was done. Inherited by a fork."""
    glibc = _glibc()
    if glibc is None or _tuned_by_user():
        return False
    return all(glibc.mallopt(option, size_bytes) for option, size_bytes in options.items())


def _glibc() -> ctypes.CDLL | None:
    """Return glibc, if the process's malloc is its and not that of a library loaded before it, as jemalloc is."""
    try:
        glibc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
        glibc.gnu_get_libc_version  # noqa: B018 - another C library has none
        # Whoever replaces malloc replaces this too. An interpreter may have an address of its own for malloc itself.
        of_both = [ctypes.cast(library.malloc_usable_size, ctypes.c_void_p).value for library in (glibc, process)]
        return glibc if of_both[0] == of_both[1] else None
    except (OSError, AttributeError):
        return None


def _tuned_by_user() -> bool:
    return "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )

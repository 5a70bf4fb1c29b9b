"""Has malloc reuse the memory of one batch for the next, in a process whose loader's threads make batches.

A batch of 256 images is 28 MB in pieces, which glibc returns to the system as they are freed. When the next batch
allocates them again, they are new pages, each of which the kernel clears and maps at the first touch: 2,400 page faults
per batch, and most of the time of a warm batch. If malloc keeps the memory of three such batches, the two that are
prefetched and the one in use, there are few page faults. docs/adr/0010 has the figures.
"""

from __future__ import annotations

import os
from typing import Final

from quiver.malloc import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, MMAP_THRESHOLD_BYTES_MAX, tune

# In the main thread's arena; the heap of another thread has 64 MiB in all, and a loader has at most four of those.
KEPT_BYTES: Final = 96 << 20
KEEP_VARIABLE: Final = "QUIVER_KEEP_MEMORY"

_asked: list[bool] = []


def keep_what_is_freed() -> None:
    """Have malloc keep what one batch frees for the next one. Once per process; forked children inherit it.

    Does nothing with ``QUIVER_KEEP_MEMORY=0``, if malloc is not that of glibc, or if the user tuned it (``MALLOC_…``,
    ``GLIBC_TUNABLES``).
    """
    if _asked:
        return
    _asked.append(True)
    if os.environ.get(KEEP_VARIABLE) != "0":
        tune({M_MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES_MAX, M_TRIM_THRESHOLD: KEPT_BYTES})

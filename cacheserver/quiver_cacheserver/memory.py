"""The memory of a daemon: the memory of a fill is returned to the system when the fill is done.

Serving needs none: bytes go from the page cache to the socket. A fill needs memory for its shard, and for Parquet for a
row group, encoded and decoded. So the maximum is ``FILL_THREADS`` times that, plus the decoded row groups that
``quiver.origin.kept`` keeps for adjacent shards while fills run. See docs/adr/0010.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import pyarrow as pa

from quiver.malloc import M_MMAP_THRESHOLD, tune
from quiver.origin.kept import kept
from quiver_cacheserver.bounds import ROW_GROUP_BYTES_MAX
from quiver_cacheserver.node import Node

LARGE_BYTES: Final = 128 << 10  # glibc's initial value, which it otherwise raises up to 32 MiB
KEPT_SECONDS: Final = 10.0  # without a fill that reads a row group: no adjacent shard follows


def return_freed_memory() -> None:
    """Have malloc map each large allocation, so that freeing it returns it to the system. Call once, at the start.

    Arrow uses malloc too, since its own allocator keeps each thread's peak; variables that the user set take
    precedence. Row groups are bounded from here on, since untrusted manifests determine which are decoded.
    """
    kept.group_bytes_max = ROW_GROUP_BYTES_MAX
    tune({M_MMAP_THRESHOLD: LARGE_BYTES})
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())


async def release_row_groups(node: Node) -> None:
    """Release decoded row groups whenever fills have been idle, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(KEPT_SECONDS / 4)
        await loop.run_in_executor(node.disk_threads, kept.let_go_if_idle, KEPT_SECONDS)

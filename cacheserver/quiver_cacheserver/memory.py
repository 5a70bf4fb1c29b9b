"""The memory of a daemon: the memory of fills is returned to the system soon after the last fill.

Serving needs none: bytes go from the page cache to the socket. A fill needs memory for its shard, and for Parquet for a
row group, encoded and decoded; so ``FILL_THREADS`` times that is the most. While fills run, the memory of shards
(``quiver.shard_memory``) is kept for the next ones, and decoded row groups (``quiver.origin.row_group_cache``) for
adjacent shards. See docs/adr/0010.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import pyarrow as pa

from quiver.malloc import M_MMAP_THRESHOLD, tune
from quiver.origin.row_group_cache import row_groups
from quiver_cacheserver.bounds import ROW_GROUP_BYTES_MAX
from quiver_cacheserver.node import Node

LARGE_BYTES: Final = 128 << 10  # glibc's initial value, which it otherwise raises up to 32 MiB
KEPT_SECONDS: Final = 10.0  # without a fill: no adjacent shard follows soon
SHARD_MEMORY_KEPT_SECONDS: Final = 1.0  # without a fill: 132 MiB at most, which a daemon that only serves must not hold


def return_freed_memory() -> None:
    """Have malloc map each large allocation, so that freeing it returns it to the system. Call once, at the start.

    Arrow uses malloc too, since its own allocator keeps each thread's peak; variables that the user set take
    precedence. Row groups are bounded from here on, since untrusted manifests determine which are decoded.
    """
    row_groups.group_bytes_max = ROW_GROUP_BYTES_MAX
    tune({M_MMAP_THRESHOLD: LARGE_BYTES})
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())


async def release_fill_memory(node: Node) -> None:
    """Release decoded row groups, and the memory of shards, whenever fills have been idle, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SHARD_MEMORY_KEPT_SECONDS)
        await loop.run_in_executor(node.disk_threads, row_groups.drop_if_idle, KEPT_SECONDS)
        await loop.run_in_executor(node.disk_threads, node.shard_memory.drop_if_idle, SHARD_MEMORY_KEPT_SECONDS)

"""The memory of a daemon: what fills took goes back to the system soon after the last one.

Serving takes none: bytes go from the page cache to the socket. A fill takes its shard, and for Parquet a row group as
it lies in the file and as it is decoded; so ``FILL_THREADS`` times that is the most, and what is kept as long as fills
go on: the memory of shards (``quiver.shard_memory``) for the next fills, and row groups
(``quiver.origin.row_group_cache``) for neighbouring shards. See docs/adr/0010.
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

LARGE_BYTES: Final = 128 << 10  # where glibc begins; by itself it goes up to 32 MiB with what it sees freed
KEPT_SECONDS: Final = 10.0  # without a fill that read a row group: then no neighbour follows


def give_back_what_is_freed() -> None:
    """Have large pieces of memory mapped one by one, so that each is gone when it is freed. Once, as a process begins.

    For Arrow as well, whose own allocator keeps what it had at its most, for each thread. What the user set holds.
    Row groups have a bound from here on, since a manifest of anybody's says which are decoded.
    """
    row_groups.group_bytes_max = ROW_GROUP_BYTES_MAX
    tune({M_MMAP_THRESHOLD: LARGE_BYTES})
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())


async def let_go_of_row_groups(node: Node) -> None:
    """Drop decoded row groups, and the memory of shards, once there were no fills for a while; runs forever."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(KEPT_SECONDS / 4)
        await loop.run_in_executor(node.disk_threads, row_groups.drop_if_idle, KEPT_SECONDS)
        await loop.run_in_executor(node.disk_threads, node.shard_memory.drop_if_idle, KEPT_SECONDS)

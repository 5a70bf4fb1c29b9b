"""How much of the cache, and of its origin's bandwidth, each dataset gets: solved from the reports that a daemon hears.

    reports ──► Needs ──► allocator ──► decider: what may be evicted, and what fetches may take
                             │
                             └────────► bandwidth: when a fill may begin to read the origin

``solved`` is what an allocator last solved, for whoever shows it. ``allocator`` keeps it up to date.
"""

from quiver_cacheserver.allocation.allocator import Allocator
from quiver_cacheserver.allocation.solved import Solved

__all__ = ["Allocator", "Solved"]

"""How much of the cache, and of its origin's bandwidth, each dataset gets: solved from the reports that a daemon hears.

    reports ──► Needs ──► allocator ──► decider: what may be evicted, and what fetches may take
                             │
                             └────────► bandwidth: when a fill may begin to read the origin

``settings`` are the operator's. ``gathering`` makes readers of reports, and ``steady`` keeps their speeds from
flapping.
``allocator`` solves, and says what follows for this daemon; ``solved`` is what it last solved, for whoever shows it.
``bandwidth`` measures origins, and has the token buckets that stand before reading them.
"""

from quiver_cacheserver.allocation.allocator import Allocator, Facts
from quiver_cacheserver.allocation.settings import AllocationSettings
from quiver_cacheserver.allocation.solved import Solved

__all__ = ["AllocationSettings", "Allocator", "Facts", "Solved"]

"""The kernel of Quiver: formats, placement, wire and storage, without torch and without a server.

Arrows inside the kernel run one way, from the formats outward:

    errors, digest, sizes -> shard -> layout -> ring -> manifest, residency, membership -> plan, source, wire
        -> store, origin, peer -> fill

``quiver_client`` and ``quiver_cacheserver`` both import this package and never one another.
"""

__version__ = "0.1.0"

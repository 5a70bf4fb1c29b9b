"""What consumers need of one daemon, turned into fetches, uploads and evictions.

    reports ──► Needs (kernel) ──► decider ──► fills, uploads ──► rooms ──► store
                                     ▲                              │
                                     └── datasets: what the store holds by now

``reports`` takes consumers' reports, ``datasets`` learns the datasets that they are about; ``decider`` has the kernel's
policy decide and carries it out; ``fills`` runs the fetches, one per shard, and ``filler`` makes one shard resident;
``uploads`` knows what clients were asked to put here; ``rooms`` decides what is evicted for each file, and ``holders``
on whose account. Each knows those to its right alone.
"""

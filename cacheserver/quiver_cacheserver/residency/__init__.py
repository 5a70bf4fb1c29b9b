"""What consumers need of one daemon, turned into fetches, uploads and evictions.

    reports ──► Needs (kernel) ──► decider ──► fills, uploads ──► rooms ──► store
                                     ▲                              │
                                     └── datasets: what the store holds

``reports`` takes consumers' reports, ``datasets`` loads the datasets that they are about; ``decider`` calls the
kernel's policy and carries out its decisions; ``fills`` runs the fetches, one per shard, and ``filler`` makes one shard
resident; ``uploads`` knows which shards clients were asked to upload; ``rooms`` decides what to evict for each file,
and ``holders`` records for which client each file was filled. Each module knows only those to its right. ``readers``
counts what is read by those that report nothing; ``probes`` has what an operator asks of jobs.
"""

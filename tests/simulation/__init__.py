"""The pure core under virtual time: racks, jobs and everything that goes wrong, by the thousand, each from one seed.

Real are the ring, membership, needs, decisions, leases and evictions, substitution and plan; the batch sampler with its
state, consumer and ledger; and both doors of verification. Modelled, without threads, sockets or disks, are processes,
the network, etcd, the origin, and what carries decisions out. So a seed is one thread and a few tens of milliseconds.

In each seed these hold: no wrong byte reaches a loop, however many are flipped (promise 1); each epoch's multiset is
exact, through kills and resumes with other ranks (promise 2); any ring costs speed only (promise 5); every epoch ends
within a bound; no daemon holds more than its capacity, fills a shard twice at once, or evicts a needed shard but for a
consumer that starves; leases expire; afterwards nothing is left over, and the rings of all daemons agree.

    python -m tests.simulation --seeds 10000 --jobs 2          prints "10,000 of 10,000 exact"
    python -m tests.simulation --seed 17 --trace               replays a seed, and shows what happens in it

- ``clock``: virtual time, and processes that sleep and die; ``network``: messages that are late, lost or doubled
- ``etcd``, ``origin``, ``daemon``, ``rank``, ``job``: what runs; ``dataset``: small datasets of real shards
- ``scenario``: what a seed draws; ``faults``: what each fault does; ``oracle``: what must hold; ``world``: one seed
- ``test_simulation``: seeds as tests; ``test_mutations``: rules broken on purpose, each of which a seed must notice
"""

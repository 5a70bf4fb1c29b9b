"""The embedded cache: a folder that the processes of this machine share, with no daemon.

``tier`` reads mapped shards and fills those that are missing; ``fill_locks`` keeps two processes from filling the same
shard; ``lease_files`` carries what each process needs to the others, ``shared_needs`` is what all of them need, and
``fetching`` fills ahead what this process needs.
"""

"""The embedded cache: a folder that the processes of this machine share, with no daemon.

``tier`` reads mapped shards (``mapped_shards``); ``filling`` fills missing shards: under ``fill_locks``, from the
origin (``origin_reads``), in place of what ``deciding`` evicts; ``fill_failures`` says when to retry.
``fetching`` reports what a consumer needs and prefetches it. ``lease_files`` carry the reports from process to
process; ``shared_needs`` is what all consumers need, ``folder_contents`` what the folder holds.

    fetching ─► tier ─► filling ─► deciding ─► shared_needs ─► lease_files
                                      └──────► folder_contents
"""

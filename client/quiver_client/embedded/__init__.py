"""The embedded cache: a folder that the processes of this machine share, with no daemon.

``tier`` reads mapped shards (``mapped_shards``); ``filling`` fills what is missing: under ``fill_locks``, from the
origin (``origin_reads``), in place of what ``deciding`` names; ``fill_failures`` says when to try again.
``fetching`` reports what a consumer needs and fetches it ahead. ``lease_files`` carry the reports from process to
process, ``shared_needs`` is what all of them need, ``folder_contents`` what the folder holds.

    fetching ─► tier ─► filling ─► deciding ─► shared_needs ─► lease_files
                                      └──────► folder_contents
"""

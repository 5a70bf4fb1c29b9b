"""The cache daemon: keeps shards of a rack's datasets on local SSD and serves them to clients and peers.

    cli ─► command ─► serve ─► serving ─► node ─► residency, manifests, verification, … ─► quiver (the kernel)

``cli`` is the entry point, ``command`` the flags, ``config`` their validated values, and ``serve`` the daemon's life
from start to drain. ``serving`` has everything that knows connections. ``node`` is the daemon without a network; it
composes

- ``residency``, which turns what consumers need into fetches and evictions; ``sources``, where shards come from;
  ``verification``, which shards were verified since the start; ``disk_health``, whether the disk takes files
- ``allocation``, how much of the cache and of the origin's bandwidth each dataset gets
- ``draining``, which hands over what only this daemon holds before it goes
- ``manifests``, found by digest, and those that are ``opened``; ``bounds`` on what they may cost
- ``rack``, who is in it and how to reach them; ``origins``, what the daemon may read
- ``names``, what a digest is called in a sharing domain; ``dataset_names``, what people call a dataset
- ``access``, who sends a request; ``budget``, what one client may hold and cause; ``slices``, turns of large requests
- ``overview``, what operators are told and have done; ``pins``, what they want kept
- ``counters``, ``usage`` (bytes by dataset and tenant) and ``metrics``; ``logs`` and ``log_limits``; ``memory``, which
  returns what fills used
"""

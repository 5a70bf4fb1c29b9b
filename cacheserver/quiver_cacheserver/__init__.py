"""The cache daemon: keeps shards of a rack's datasets on local SSD and serves them to its neighbours.

    cli -> config -> serve -> serving (app, reads, streams, ...) -> node -> fills, manifests, neighbours, counters
        -> registry -> quiver (the kernel)

``node`` is the daemon without a network; ``serving`` puts routes in front of it; ``serve`` gives it a socket, a place
in the ring and an end.
"""

"""How bytes travel between clients and daemons: connections, and what is spoken on them.

``sockets`` is the one place that gives bytes to a socket and takes them from one, plain or TLS; ``tls`` does the
handshakes, and says who the other side is. ``connection`` has the one connection class, with its deadlines, its errors
and its one retry; ``liveness`` says how long it waits, ``attempt`` when a request is late or overtaken, ``idle`` which
connections are kept. Three carriers use it: ``stream`` for batched reads, ``http`` for all other verbs, and ``handoff``
for open files over the Unix socket.
"""

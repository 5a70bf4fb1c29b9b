"""How bytes travel between clients and daemons: connections, and what is spoken on them.

``sockets`` is the one place that gives bytes to a socket and takes them from one, plain or TLS.
"""

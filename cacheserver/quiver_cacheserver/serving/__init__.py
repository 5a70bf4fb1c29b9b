"""What the daemon serves, and on which connections: all modules that know HTTP, streams and sockets.

``app``           the table of routes, and the one place where errors become answers
``listening``     accepts connections; their deadlines until they are streams
``heads``         what a connection may send of request heads
``requests``      what a route needs of its connection: the client, the deadline, the body
``reads``         answering a batched read, and ``POST /v1/read``
``absence``       the statuses of shards that are not resident
``streams``       ``GET /v1/stream``: the same reads on connections of their own
``verbs``         ``POST /v1/fill``, ``/v1/forgo``, ``/v1/recheck``
``operator``      ``/v1/jobs``, ``/v1/datasets``, ``/v1/allocation``; pins and evictions
``draining``      ``/v1/handover`` and ``/v1/drain``
``transfers``     whole shards and manifests: ``PUT``, ``GET``, ``HEAD``
``tls``           handshakes, and HTTP on connections that speak TLS
``turns``         which reads may be answered now
``poller``        connections that wait, and the threads that serve those that are ready
``sender``        answers on their way to readers, by stream or HTTP
``payload``       the ranges of files that are sent, plain or through TLS
``unix_socket``   the socket of ``--socket``: open files for readers on this host

Below stand ``node`` (the daemon without a network), ``budget`` (what a client may hold and cause) and ``slices``.
"""

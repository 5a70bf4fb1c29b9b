"""The kernel of Quiver: formats, placement, wire and storage, without torch and without a server.

Imports run one way, from the formats outward:

- ``errors``, ``digest``, ``domain`` (who shares what), ``sizes``, ``location`` (URLs parsed once), ``extras`` (messages
  for missing packages)
- ``claims``: what a token says of its bearer; ``token_source``: the token that this process sends; ``identity``: job,
  group and tenant of who reads; ``introduction``: what a process says of itself to daemons
- helpers: ``malformed`` (what decoders raise for hostile bytes), ``prepared`` (types that threads decode),
  ``expiring``, ``backoff``, ``rate``; ``forks`` and ``cached``, which make locks and properties safe to fork;
  ``malloc`` and ``shard_memory``, which tune and reuse memory
- formats: ``shard``, ``layout``, ``lookup`` (digest to row), ``manifest``
- decisions, pure: ``ring``, ``membership``, ``plan``, ``residency`` (what is fetched and evicted), ``allocation`` (how
  much of the cache each dataset gets), ``substitution``, ``shuffles`` (the order of a block shuffle), ``health`` (whom
  to avoid), ``matching`` (which job goes where, at the least cost)
- input and output: ``store``, ``origin``; ``source`` and ``fill``, which obtain a verified shard
- the protocol: ``wire``, ``overview`` (what operators are told), ``handover`` (what a drain says), ``transport``,
  ``peer``

``quiver_client`` and ``quiver_cacheserver`` both import this package and never one another.
"""

__version__ = "0.1.0"

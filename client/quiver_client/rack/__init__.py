"""Reading through the daemons of a rack.

``tier`` reads samples from them, by requests that ``peer_read`` describes; ``members`` knows which daemons there are,
``health`` which of them to avoid, and ``hedging`` sends late requests once more. ``handoff_tier`` maps files that
daemons of this host pass over a Unix socket; ``local_daemons`` finds those daemons. ``needs`` reports to all daemons
what this process still needs. ``uploads`` sends them shards whose origin only this process may read.
"""

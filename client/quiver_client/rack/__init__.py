"""Reading through the daemons of a rack.

``tier`` asks them for samples, ``members`` knows who they are and which of them answer, ``handoff_tier`` maps the files
that the daemons of this host pass (``local_daemons`` finds those), and ``needs`` tells all of them what this process
still needs.
"""

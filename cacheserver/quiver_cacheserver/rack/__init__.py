"""The rack as a daemon sees it: who is in it, and how to reach them.

``registry`` is where the daemon learns of the members (``--peers``, or itself alone), ``etcd_registry`` keeps its place
in etcd, ``etcd`` is the edge to aetcd, ``addresses`` parses where etcd is and finds this machine's address, and
``peers`` are the clients of the other daemons.
"""

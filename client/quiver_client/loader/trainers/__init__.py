"""What trainers read of a loader, wrap it in and rebuild it from.

``wrappers`` knows who iterates an order, and refuses wrappers that would deal or skip its batches a second time;
``loops`` recognises wrappers that read ahead or count passes; ``rebuilding`` and ``injected`` let Lightning make an
order again; ``own_methods`` are those that a wrapper of Fabric's or Ray's must not lose.
"""

"""What this daemon tells operators, and does for them: jobs, datasets and the allocation, by name; pins and evictions.

``facts`` is what stays the same of a manifest, ``held`` what is held of each dataset, and what that saves; ``known``
looks for both in a thread, seldom. ``jobs`` and ``shares`` make messages of the consumers' reports and of the
allocation, ``series`` what Prometheus is told by name; ``ids`` names datasets and ranks without their digests;
``removal`` evicts a dataset. ``overview`` joins them to the node, and shows each caller the names of its own sharing
domain alone.
"""

"""Who gets the cache, for real: daemons, jobs and a throttled, counting origin, each in a process of its own.

    python -m bench.allocation [--case NAME ...] [--policy none --policy max-min ...] [--rounds 1] [--pace 1]
                               [--quick] [--out bench/results]

A job is a loop over ``quiver_client.DataLoader`` with an accelerator that takes a fixed step per batch; each of its
ranks is a process. After a warm-up, samples per second and the share of the time that the accelerator idled are
measured over a window, and compared with what ``quiver.allocation.allocate`` predicts from the true rates, sizes and
bandwidth, and with an optimum by brute force. ``none``: no policy, the rule that counts consumers.

``cases`` what is run, values; ``model`` what is predicted for it; ``sources`` datasets and their origin; ``fleet``
daemons; ``jobs`` loops; ``steady`` one run, and its windows; ``stories`` runs in which jobs or daemons come and go;
``report`` tables and JSON; ``plots``.
"""

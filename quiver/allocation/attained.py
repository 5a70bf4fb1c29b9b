"""Least attained service first: who has been served least reads first, without knowing how long anybody will run.

Service is what a reader has read, in seconds of its full rate: the time that it has been computing. As in Tiresias
(NSDI 2019), it is discretised: readers stand in a few queues, by thresholds that are passed once, so that two equals
do not take turns and nothing is moved back and forth. Tiresias has two queues and an hour between them; here
thresholds grow geometrically, as in Aalo (SIGCOMM 2015), since trials last seconds in one place and days in another,
and within a queue readers share by max-min rather than first come, first served, since reading, unlike a GPU, is
divisible.

Priority decides on bandwidth alone. The cache goes to the bytes that save most: a cached byte is worth something when
it is read again, so a new trial would gain nothing from a place that others lose. And a reader that has come far
keeps a part of its equal split, where Tiresias promotes it after a wait (PROMOTEKNOB).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quiver.allocation.equal_split import equal_rates
from quiver.allocation.fair import raise_within
from quiver.allocation.instance import Floats, Indices, Instance

FIRST_SECONDS: Final = 1.0  # of service: the first threshold
FACTOR: Final = 4.0  # between thresholds: eleven of them until two weeks
QUEUES_MAX: Final = 12
KEPT: Final = 0.25  # of the equal split of bandwidth, whatever the queue


def queues(instance: Instance) -> Indices:
    """Return the queue of each reader, 0 first. One of unknown rate is new, or has attained nothing that counts."""
    attained = np.array([reader.attained_bytes for reader in instance.readers], dtype=np.float64)
    attained = np.where(np.isfinite(attained) & (attained > 0), attained, 0.0)
    seconds = np.divide(attained, instance.rate, out=np.zeros_like(attained), where=instance.rate > 0)
    late = np.maximum(seconds / FIRST_SECONDS, 1 / FACTOR)
    place: Floats = np.minimum(np.floor(np.log(late) / np.log(FACTOR)) + 1, QUEUES_MAX - 1)
    return place.astype(np.intp)


def serve_least_attained(instance: Instance, cached: Floats, full: Floats) -> Floats:
    """Return the rates where ``cached`` bytes are held: queue by queue, each from what those before it leave."""
    x = equal_rates(instance, cached, full, part=KEPT)
    queue = queues(instance)
    for turn in np.unique(queue):
        x = raise_within(instance, cached, x, np.where(queue <= turn, full, x))
    return x

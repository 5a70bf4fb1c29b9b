"""What an allocation gives to what is held for a job that will resume: the share of a job that is not known yet."""

from __future__ import annotations

import numpy as np

from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency import ConsumerReport, Needs
from quiver.ring import Member, Ring
from quiver_cacheserver.allocation.allocator import Allocator, Facts

HELD, READ = Digest(b"H" * 32), Digest(b"R" * 32)
SHARDS = 10


def test_what_is_held_has_a_share_beside_a_job_that_could_use_all_of_the_cache() -> None:
    needs = Needs()
    for at, name in enumerate((HELD, READ)):
        digests = as_rows(Digest(bytes([at, number]) * 16) for number in range(SHARDS))
        needs.add_dataset(name, digests, np.full(SHARDS, 10.0), np.zeros(SHARDS, bool), np.ones(SHARDS, bool))
    left = np.full(SHARDS, 255, np.uint8)
    needs.report(HELD, ConsumerReport(b"h" * 16, left, 0.0, 0.0, 600.0, hold=True), 0.0)
    needs.report(READ, ConsumerReport(b"r" * 16, left, 50.0, 0.0, 5.0), 0.0)
    ring = Ring.of("rack", [Member("a", "http://a:1")], 1)
    allocator = Allocator(needs, lambda name: Facts(chr(name[0]), 100.0, "s3://b/"), lambda: 100.0, lambda: (ring, "a"))
    problem, names = allocator.problem(1.0)
    allocator.take(allocator.solve(problem, names, 1.0))
    assert allocator.division()[HELD] > 30
    needs.leave(b"h" * 16)
    problem, names = allocator.problem(2.0)
    allocator.take(allocator.solve(problem, names, 2.0))
    assert allocator.division()[READ] == 100

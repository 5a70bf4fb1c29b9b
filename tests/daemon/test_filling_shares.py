"""A share that is not filled yet has bandwidth to fill it, though it will need none when it is full."""

from __future__ import annotations

from dataclasses import replace

from quiver.allocation import DatasetDemand, Policy, Reader, allocate
from quiver.ring import Member, Ring
from quiver_cacheserver.allocation import Allocator, Facts
from quiver_cacheserver.allocation.gathering import resident_bytes
from tests.kernel.test_needs_policy import A, board, report


def test_what_is_resident_of_the_rack_is_judged_by_what_hashes_to_this_daemon() -> None:
    needs = board(8, held=[0, 1, 2, 6], mine=[0, 1, 2, 3], size=5.0)
    assert resident_bytes(needs, {A: 40.0}) == {A: 30.0}
    assert resident_bytes(board(2, mine=[]), {A: 2.0}) == {}


def test_a_cold_dataset_is_given_bandwidth_where_its_full_share_would_need_none() -> None:
    ring = Ring("rack", (Member("a", "http://a"),))
    for held, resident in (([], 0.0), ([0, 1], 2.0), ([0, 1, 2, 3], 4.0)):
        needs = board(4, held=held)
        needs.report(A, report(1, [255] * 4, rate=2.0), 0.0)
        allocator = Allocator(needs, lambda _: Facts("d", 4.0, "http://o/"), lambda: 4.0, lambda: (ring, "a"))
        problem, names = allocator.problem(0.0)
        assert problem.datasets[0].resident_bytes == resident
        busy = DatasetDemand(name="busy", size_bytes=40.0, origin="http://o", readers=(Reader(name="b", rate=9.0),))
        problem = replace(problem, datasets=(*problem.datasets, busy), origin_rates={"http://o": 4.0})
        share = allocate(problem, Policy.COST).shares[names[A]]
        assert share.cache_bytes == 4.0
        assert (share.origin_rate > 0.1) == (resident < 4.0)

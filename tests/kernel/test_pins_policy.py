"""What an operator pinned stays, also where a consumer starves or a later use is worth more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quiver.lookup import DigestRows
from quiver.residency import Needs
from quiver.residency.needs import named
from tests.kernel.test_needs_policy import A, B, board, decided, numbers, report, shard, shards

Pinned = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.bool_]]


def pinning(*several: int) -> Pinned:
    rows = DigestRows(shards(several))
    return lambda files: rows.rows_of(files) >= 0


def evicted(decisions: list[Any]) -> list[list[int]]:
    return [[int.from_bytes(victim, "big") for victim in it.evict] for it in decisions]


def test_a_starving_consumer_evicts_a_needed_shard_but_none_that_is_pinned() -> None:
    for pinned, victims in (((), [[0]]), ((0,), [[1]]), ((0, 1), [])):
        needs = board(3, held=[0, 1])
        # One consumer still needs all; what is left of shard 0 is most, so that it is what is evicted without a pin.
        needs.report(A, report(1, [255, 100, 255]), 0.0)
        found = decided(needs, free=0.0, at_most=1, pinned=pinning(*pinned))
        assert evicted(found) == victims, pinned
        assert numbers(found) == [2] * len(victims)


def test_a_shard_whose_known_next_use_is_far_off_stays_if_it_is_pinned() -> None:
    def needs_of() -> Needs:
        needs = board(4, held=[0, 1])
        uses = np.array([2, 2, 3, 2, 2, 3, 0, 1], np.int32)
        order = report(1, [255] * 4, ordered=True, order=b"o" * 16, uses=uses, ahead_bytes=0.0)
        assert needs.report(A, order, 0.0)
        return needs

    free = decided(needs_of(), free=0.0, at_most=1)
    [victims] = evicted(free)
    assert victims
    assert evicted(decided(needs_of(), free=0.0, at_most=1, pinned=pinning(*victims))) != [victims]
    assert decided(needs_of(), free=0.0, at_most=1, pinned=pinning(0, 1)) == []


def test_files_are_known_by_their_digests_in_every_domain() -> None:
    needs = board(2, held=[0])
    key = np.full(32, 7, np.uint8)
    names = named(shards([5, 6]), key)
    grown = needs.grown(names, key)
    needs.add_dataset(B, names, np.ones(2), np.zeros(2, bool), np.ones(2, bool), grown)
    assert [row.tobytes() for row in needs.files()] == [shard(number) for number in (0, 1, 5, 6)]

"""What is held for a job that will resume: needed though nobody reads it, never fetched, released as the job begins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quiver.residency import Needs, Shelf, Situation, StoredFile, decide
from quiver.residency.messages import HOLD_SECONDS_MAX, LEASE_SECONDS_MAX, NeedsReport
from tests.kernel.test_needs_policy import FAST, A, board, report, shard

HOLD, JOB, OTHER = 1, 2, 3


def shelf_of(needs: Needs, held: list[int]) -> Shelf:
    return Shelf.of([StoredFile(shard(number), 1, 0.0) for number in held], 1000.0, needs.needed_of)


def needed(needs: Needs, count: int) -> list[bool | None]:
    return [needs.needed(shard(number)) for number in range(count)]


def test_what_is_held_counts_as_needed_until_the_hold_expires() -> None:
    needs = board(4, held=[0, 1])
    needs.report(A, report(HOLD, [255, 10, 0, 0], hold=True, lease_seconds=600.0), 0.0)
    assert needed(needs, 4) == [True, True, False, False]
    needs.expire(601.0)
    needs.forget_unused()
    assert needed(needs, 4) == [None] * 4


def test_nothing_is_fetched_for_a_hold_and_a_lone_job_beside_it_still_reads_as_if_alone() -> None:
    needs = board(6, held=[0])
    needs.report(A, report(HOLD, [255] * 6, hold=True), 0.0)
    situation = Situation(now=0.0, free_bytes=10.0, fetches_max=9, origin=FAST)
    assert decide(needs, situation) == []
    alone, beside = board(6, held=[0]), board(6, held=[0])
    beside.report(A, report(HOLD, [0, 0, 255, 0, 0, 0], hold=True), 0.0)
    for each in (alone, beside):
        each.report(A, report(JOB, [255, 255, 0, 255, 255, 0], ahead_bytes=50.0), 0.0)
    assert len(decide(alone, situation)) == len(decide(beside, situation)) == 3


def test_what_is_held_is_not_evicted_for_another_jobs_fetch_unless_that_starves() -> None:
    needs = board(4, held=[0, 1])
    needs.report(A, report(HOLD, [255, 255, 0, 0], hold=True), 0.0)
    needs.report(A, report(OTHER, [0, 0, 255, 255], ahead_bytes=100.0), 0.0)
    situation = Situation(now=0.0, free_bytes=0.0, fetches_max=1, origin=FAST, shelf=lambda: shelf_of(needs, [0, 1]))
    assert decide(needs, situation) == []
    needs.report(A, report(OTHER, [0, 0, 255, 255]), 0.0)
    [decision] = decide(needs, situation)
    assert decision.forced


@pytest.mark.parametrize("pending", [[255, 128, 0, 0], [0, 1, 0, 0]])
def test_a_job_that_begins_and_needs_nothing_else_ends_the_hold(pending: list[int]) -> None:
    needs = board(4)
    needs.report(A, report(HOLD, [255, 255, 0, 0], hold=True, lease_seconds=600.0), 0.0)
    needs.report(A, report(JOB, pending), 1.0)
    assert len(needs) == 1
    assert needed(needs, 4) == [left > 0 for left in pending]


def test_other_jobs_of_the_dataset_leave_the_hold_alone() -> None:
    needs = board(4)
    needs.report(A, report(OTHER, [0, 0, 255, 255]), 0.0)
    needs.report(A, report(HOLD, [255, 255, 0, 255], hold=True, lease_seconds=600.0), 0.0)
    needs.report(A, report(OTHER, [0, 0, 0, 255]), 1.0)  # it went on
    needs.report(A, report(JOB, [255] * 4), 1.0)  # it begins, and needs more
    needs.report(A, report(4, [0] * 4), 1.0)  # it pauses
    needs.leave(report(JOB, []).consumer)
    assert needed(needs, 4) == [True, True, False, True]


def test_a_hold_does_not_hide_that_all_uses_of_a_dataset_are_known() -> None:
    needs = board(2)
    ordered = {"ordered": True, "order": bytes(16), "uses": np.array([0, 1], np.int32)}
    needs.report(A, report(HOLD, [255, 0], hold=True), 0.0)
    assert not needs.is_planned(A)
    needs.report(A, report(JOB, [255, 255], **ordered), 0.0)
    assert needs.is_planned(A)
    needs.leave(report(HOLD, []).consumer)
    assert needs.is_planned(A)


def test_a_hold_may_last_longer_than_a_lease_and_not_for_ever() -> None:
    for hold, longest in ((True, HOLD_SECONDS_MAX), (False, LEASE_SECONDS_MAX)):
        told = NeedsReport(A, report(HOLD, [255], hold=hold, lease_seconds=1e6))
        decoded = NeedsReport.decode(told.encode())
        assert decoded.report.hold == hold
        assert decoded.report.lease_seconds == longest
    brief = replace(report(HOLD, [255], hold=True), lease_seconds=5.0)
    assert NeedsReport.decode(NeedsReport(A, brief).encode()).report.lease_seconds == 5.0

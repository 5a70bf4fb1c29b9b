"""One consumer of several manifests: what each cache is told, and what a draw that waits says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.residency import ConsumerReport, Measured
from quiver_client import BatchSampler, Dataset
from quiver_client.loader.several_needs import SeveralNeeds
from tests.support.data import Files
from tests.support.residency import Rack

SIZES = [np.array([100.0, 100.0, 200.0]), np.array([400.0, 200.0])]
REPORT = ConsumerReport(
    consumer=b"c" * 16,
    left=np.array([255, 0, 255, 255, 0], np.uint8),
    rate=70.0,
    ahead_bytes=500.0,
    lease_seconds=5.0,
    soon=(3, 0, 2),
)
NOTHING = np.zeros(5, np.uint8)


def test_a_report_is_divided_by_manifest_and_the_answers_are_joined() -> None:
    racks = Rack(3), Rack(2, resident=False)
    needs = SeveralNeeds(racks, SIZES)
    assert needs.report(REPORT).tolist() == [1, 1, 1, 0, 0]
    needs.report(REPORT)
    one, two = (rack.reports[-1] for rack in racks)
    assert one.consumer == REPORT.consumer != two.consumer
    assert [each.left.tolist() for each in (one, two)] == [[255, 0, 255], [255, 0]]
    assert [each.soon for each in (one, two)] == [(0, 2), (0,)]
    assert [each.rate for each in (one, two)] == [30.0, 40.0]  # by bytes left: 300 and 400
    assert [each.ahead_bytes for each in (one, two)] == [500.0, 0.0]  # by bytes that are here
    needs.report(REPORT, leaving=True)
    needs.close()
    assert all(rack.left and rack.closed for rack in racks)


def test_what_was_attained_of_each_manifest_never_becomes_less() -> None:
    """Else a job would be served as a new one at the end of each epoch, under the policy las."""
    racks = Rack(3), Rack(2)
    needs = SeveralNeeds(racks, SIZES)
    for attained, left in ((1000.0, REPORT.left), (2000.0, np.array([0, 0, 255, 0, 0], np.uint8)), (3000.0, NOTHING)):
        needs.report(replace(REPORT, left=left, measured=Measured(attained_bytes=attained)))
    assert [[it.measured.attained_bytes for it in rack.reports] for rack in racks] == [
        [400.0, 800.0, 1200.0],
        [600.0, 1200.0, 1800.0],
    ]


def test_what_no_daemon_will_fetch_is_told_by_its_place_among_all_shards() -> None:
    racks = Rack(3), Rack(2)
    needs = SeveralNeeds(racks, SIZES)
    needs.report(REPORT)
    assert needs.orphaned is None
    racks[1].orphaned = np.array([False, True])
    needs.report(REPORT)
    assert needs.orphaned is not None
    assert needs.orphaned.tolist() == [False, False, False, False, True]


def test_a_manifest_without_a_cache_counts_as_resident() -> None:
    rack = Rack(2, resident=False)
    assert SeveralNeeds([None, rack], SIZES).report(REPORT).tolist() == [1, 1, 1, 0, 0]
    assert len(rack.reports) == 1


def test_a_cache_that_cannot_be_told_keeps_no_other_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    racks = Rack(3), Rack(2)

    def broken(report: Any, *, leaving: bool = False) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr(racks[0], "report", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        SeveralNeeds(racks, SIZES).report(REPORT)
    assert len(racks[1].reports) == 1


def test_a_draw_that_waits_says_that_nothing_is_ahead(
    files: Files, dataset: Callable[..., Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a cache would fetch nothing for one whose batch is larger than the runway that it keeps for a consumer."""
    data = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB")
    rack = Rack(data.manifest.shard_count)
    rack.holds([0])
    monkeypatch.setattr(Dataset, "needs", lambda self: rack)
    order = BatchSampler(data, 120)
    epoch = order.begin()
    order._consumer.wait_for_report(10.0)
    assert rack.reports[-1].ahead_bytes > 0
    assert not order.poll(epoch)  # too little is resident: the draw begins to wait
    for _ in range(2):  # one report may have been under way
        order._consumer.wait_for_report(10.0)
    assert rack.reports[-1].ahead_bytes == 0
    rack.holds(list(range(data.manifest.shard_count)))
    drawn = order.draw(epoch)
    assert drawn is not None
    assert len(drawn.rows) == 120
    order.close()

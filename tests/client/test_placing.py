"""Which rack runs which job: cache here and bandwidth there make up for one another, and crowding costs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiver.allocation import DatasetDemand, Problem, Reader
from quiver.manifest import Manifest
from quiver.overview import AllocationView, ShareView, dataset_id
from quiver_client import index
from quiver_client.migration.placing import ASSUMED_RATE, Job, Rack, place_jobs, predict, with_known_rates
from quiver_client.migration.racks import Wanted, _problem, jobs_of
from tests.support.data import make_files, random_files, rebased

GB = 1e9


def job(name: str, gigabytes: float = 100.0, **more: Any) -> Job:
    return Job(name=name, dataset=name, size_bytes=gigabytes * GB, largest_bytes=1e7, **more)


def rack(name: str, gigabytes: float = 1000.0, rate: float = 1.0, **more: Any) -> Rack:
    more = {"problem": Problem(capacity_bytes=gigabytes * GB, datasets=())} | more
    return Rack(
        name=name, url=f"http://{name}", capacity_bytes=gigabytes * GB, free_bytes=gigabytes * GB,
        origin_rate=rate * GB, **more,
    )  # fmt: skip


def where(jobs: list[Job], racks: list[Rack], **more: Any) -> list[str]:
    return [racks[it.rack].name for it in place_jobs(jobs, racks, **more)]


def test_a_job_goes_where_its_data_is_unless_the_origin_is_fast_enough_elsewhere() -> None:
    racks = [rack("near", resident={"a": 60 * GB}), rack("far", rate=2.0)]
    assert where([job("a")], racks) == ["near"]
    assert where([job("a")], [racks[0], rack("far", rate=3.0)]) == ["far"]
    slow = [rack("far", rate=3.0, resident={"a": 10 * GB}), rack("near", rate=3.0, resident={"a": 90 * GB})]
    [found] = place_jobs([job("a", rate=GB / 10)], slow)  # it never waits, so the bytes decide
    assert slow[found.rack].name == "near"
    assert "in far it would be as fast and read more" in found.reason


def test_what_does_not_fit_counts_in_every_epoch() -> None:
    racks = [rack("small", 50, resident={"a": 50 * GB}), rack("large", 500)]
    assert where([job("a")], racks, epochs=1) == ["small"]
    assert where([job("a")], racks, epochs=10) == ["large"]
    [found] = place_jobs([job("a")], racks)
    assert found.predictions[0].later_bytes == pytest.approx(50 * GB)
    assert found.prediction.later_bytes == 0
    assert found.prediction.origin_bytes(10) == pytest.approx(100 * GB)
    assert "all of it fits" in found.reason
    assert "small would take" in found.reason


def test_more_jobs_than_racks_spread_and_the_shortest_comes_first() -> None:
    racks = [rack("one"), rack("two")]
    placed = place_jobs([job("a", 100), job("b", 300), job("c", 100)], racks)
    assert placed[0].rack == placed[2].rack != placed[1].rack
    assert sorted([placed[0].after, placed[2].after]) == [0, 1]
    crowded = place_jobs([job("a", 300), job("b", 100)], racks[:1])
    assert [it.after for it in crowded] == [1, 0]
    assert all("with 1 of the others" in it.reason for it in crowded)


def test_jobs_that_run_there_count_by_what_they_lose() -> None:
    reader = Reader(name="old", rate=3 * GB)
    busy = Problem(
        capacity_bytes=1000 * GB,
        datasets=(DatasetDemand(name="z", size_bytes=5000 * GB, origin="s3", readers=(reader,)),),
        origin_rates={"s3": GB},
    )
    racks = [rack("busy", problem=busy), rack("idle")]
    assert where([job("a", origin="s3")], racks) == ["idle"]
    found = predict(job("a", origin="s3"), racks[0], 10)
    assert found.slowed > 0
    assert found.first_epoch_seconds > predict(job("a"), racks[1], 10).first_epoch_seconds
    shared = replace(busy, datasets=(replace(busy.datasets[0], name="a", size_bytes=100 * GB),))
    beside = predict(job("a", rate=GB), rack("same", problem=shared), 10)
    assert beside.slowed == 0  # they share one stream of reads


def test_where_nothing_is_known_of_who_runs_only_free_room_is_promised() -> None:
    full = rack("full", 1000, problem=None)
    found = predict(job("a"), replace(full, free_bytes=10 * GB, resident={"a": 20 * GB}), 2)
    assert found.cache_bytes == pytest.approx(30 * GB)


def test_an_unknown_rate_is_that_of_the_slowest_known_origin() -> None:
    racks = [rack("a", rate=0), rack("b", rate=3.0), rack("c", rate=2.0)]
    assert [it.origin_rate for it in with_known_rates(racks)] == [2 * GB, 3 * GB, 2 * GB]
    assert [it.origin_rate for it in with_known_rates(racks[:1])] == [ASSUMED_RATE]
    assert math.isfinite(predict(job("a"), with_known_rates(racks)[0], 3).seconds)


def test_another_dataset_of_the_same_name_and_size_is_not_taken_for_the_one_to_place(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.bin").write_bytes(bytes(1000))
    index(tmp_path / "d", tmp_path / "m.quiver", name="m")
    manifest = Manifest.open(tmp_path / "m.quiver")
    size, own, other = float(manifest.tables.shard_sizes.sum()), dataset_id(manifest.digest), "0" * 16
    wanted = [Wanted("m", manifest)]
    shares = [
        ShareView(id=it, name="m", size_bytes=size, origin="o", readers=[], cache_bytes=0.0) for it in (own, other)
    ]
    both = AllocationView("n", capacity_bytes=1e9, datasets=shares)
    alone = AllocationView("n", capacity_bytes=1e9, datasets=shares[1:])
    assert {it.name for it in _problem(both, wanted, 0.0).datasets} == {own, other}
    assert [it.name for it in _problem(alone, wanted, 0.0).datasets] == [own], "as another sharing domain calls it"


def test_a_rack_whose_daemons_are_smaller_than_a_shard_is_none() -> None:
    tiny = rack("tiny", rate=100.0, largest_bytes=1e6)
    assert where([job("a")], [tiny, rack("slow", rate=0.1)]) == ["slow"]
    with pytest.raises(ValueError, match="a: one of its shards is larger"):
        place_jobs([job("a")], [tiny])


def test_a_job_competes_with_those_that_read_other_data_of_the_same_origin(tmp_path: Path) -> None:
    """Daemons name an origin by its host, and a manifest has the URL of a folder."""
    remote = rebased(make_files(tmp_path, random_files(3, seed=1)), "http://Origin:80/a/", tmp_path / "m.quiver")
    [placed] = jobs_of([Wanted("m", remote.opened(), 8 * GB)])
    reader = Reader(name="runs", rate=8 * GB, ordered=True)
    theirs = DatasetDemand(name="z", size_bytes=5000 * GB, origin="http://origin", readers=(reader,))
    problem = Problem(capacity_bytes=1.0, datasets=(theirs,), origin_rates={"http://origin": 8 * GB})
    busy = Rack(name="r", url="u", capacity_bytes=1.0, free_bytes=0.0, origin_rate=8 * GB, problem=problem)
    assert predict(placed, busy, 10).slowed > 0.1

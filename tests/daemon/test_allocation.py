"""What operators say about allocation, what is measured for it, and that neither readers nor noise make it flap."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from quiver.allocation import DatasetDemand, Policy, Problem, allocate
from quiver.digest import Digest
from quiver.errors import Misconfigured
from quiver.identity import Identity
from quiver.lookup import as_rows
from quiver.residency import Commitments, ConsumerReport, Decision, Needs
from quiver.residency.report import FULL
from quiver.ring import Member, Ring
from quiver.wire import RangeStatus
from quiver_cacheserver.allocation import AllocationSettings, Allocator, Facts
from quiver_cacheserver.allocation.allocator import READ_SECONDS
from quiver_cacheserver.allocation.bandwidth import BEYOND, BURST_SECONDS, DEBT_SECONDS, Bandwidth, Turns, _Bucket
from quiver_cacheserver.allocation.gathering import Heard, readers_of, shown_name
from quiver_cacheserver.allocation.steady import BAND, Steady
from quiver_cacheserver.command import command
from quiver_cacheserver.overview.shares import Shown, view
from quiver_cacheserver.residency.fills import Fills
from quiver_cacheserver.residency.uploads import Uploads
from quiver_client.operating.explaining import explain_job
from quiver_client.operating.merging import Job

A, B = (Digest(bytes([letter]) * 32) for letter in b"AB")
CAPACITY = 1000
ORIGIN = "http://origin"


# -- settings ---------------------------------------------------------------------------------------------------------


def settings_of(
    policy: str = "max-min", tenants: dict[str, Any] | None = None, rates: tuple[str, ...] = ()
) -> AllocationSettings:
    return AllocationSettings.parse(policy, tenants or {}, rates, CAPACITY)


def test_settings_are_what_was_written() -> None:
    made = settings_of("las", {"vision": {"weight": 2, "quota": 500}, "speech": {"quota": "1KB"}}, ("s3://b/=2MB/s",))
    assert made.policy is Policy.LAS
    assert made.weights == {"vision": 2.0}
    assert made.quotas == {"vision": 500.0, "speech": 1000.0}
    assert made.cap_of("s3://b/data") == ("s3://b/", 2e6)
    assert made.cap_of("s3://c/data") is None
    assert settings_of(rates=("1GB", "http://x/=1MB")).cap_of("http://x/y") == ("http://x/", 1e6)
    assert settings_of("none").policy is None


def test_a_cap_is_of_a_folder_however_it_is_written_and_of_no_other_whose_name_begins_the_same() -> None:
    made = settings_of(rates=("/data/./train=1MB", "s3://b=2MB", "HTTP://Host:80/x=3MB", "s3://b/deep/=4MB"))
    assert made.cap_of("file:///data/train/images/") == ("file:///data/train/", 1e6)
    assert made.cap_of("file:///data/train-2/") is None
    assert made.cap_of("s3://b/other/") == ("s3://b/", 2e6)
    assert made.cap_of("s3://b/deep/er/") == ("s3://b/deep/", 4e6)
    assert made.cap_of("s3://b-private/") is None
    assert made.cap_of("http://host/x/y/") == ("http://host/x/", 3e6)
    assert made.cap_of("no place") is None
    assert settings_of(rates=("5MB",)).cap_of("no place") == ("", 5e6)


@pytest.mark.parametrize(
    ("rate", "base", "is_capped"),
    [
        ("/data/=1MB", "file:///data/imagenet/", True),
        ("/data/../data//x=1MB", "file:///data/x", True),
        ("file:///data=1MB", "file:///data/", True),
        ("s3://b/a=1MB", "S3://b/a/c/", True),
        ("s3://b/a=1MB", "s3://b/ab/", False),
        ("http://Host/=1MB", "HTTP://host:80/a/", True),
        ("http://host/=1MB", "http://host.example/a/", False),
        ("http://host/a%20b=1MB", "http://host/a b/", True),
    ],
)
def test_a_cap_holds_below_a_folder_however_its_url_is_written(rate: str, base: str, is_capped: bool) -> None:
    """A manifest says where its data is, and anybody may make another one that says it in other words."""
    assert (settings_of(rates=(rate,)).cap_of(base) is not None) == is_capped


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"policy": "fair"}, "--policy 'fair': write one of max-min, throughput, las, cost"),
        ({"tenants": {"a": {"weight": "two"}}}, "[tenants.a] weight = 'two': write a number"),
        ({"tenants": {"a": {"weight": True}}}, "write a number"),
        ({"tenants": {"a": {"weight": math.nan}}}, "write a number"),
        ({"tenants": {"a": {"weight": 0}}}, "[tenants.a] weight = 0: write one from 0.001"),
        ({"tenants": {"a": {"weight": -1}}}, "weight = -1"),
        ({"tenants": {"a": {"quota": "2KB"}}}, "more than --capacity"),
        ({"tenants": {"a": {"quota": "much"}}}, "[tenants.a] quota: not a size"),
        ({"tenants": {"a": {"share": 2}}}, "unknown key 'share'; known: weight, quota"),
        ({"tenants": {"a": 2}}, "[tenants.a]: write weight"),
        ({"tenants": {"a\n": {}}}, "does not print"),
        ({"tenants": {"a" * 200: {}}}, "more than 128 bytes"),
        ({"rates": ("fast",)}, "--origin-rate 'fast': write [PREFIX=]RATE"),
        ({"rates": ("s3://b/=0",)}, "--origin-rate 's3://b/=0'"),
        ({"rates": ("s3//b/=1MB",)}, "'s3//b/' is no prefix"),
        ({"rates": ("data=1MB",)}, "'data' is no prefix"),
        ({"rates": ("=5MB",)}, "--origin-rate: '' is no prefix: write an absolute path, or a URL"),
        ({"rates": ("data/train=5MB",)}, "--origin-rate: 'data/train' is no prefix"),
        ({"rates": ("ftp://h/=5MB",)}, "--origin-rate: ftp://h/ is not a URL of an origin"),
        ({"rates": ("http://u:secret@h/=5MB",)}, "--origin-rate: http://…@h/ contains a user or a password"),
        ({"rates": ("5MB", "6MB")}, "each origin has a rate already"),
        ({"rates": ("s3://b=5MB", "s3://b/=6MB")}, "s3://b/ has a rate already"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given_: dict[str, Any], says: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        settings_of(**given_)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "toml", "says"),
    [
        (["--policy", "fair"], "", "--policy 'fair'"),
        ([], "tenants = 2", "write [tenants.NAME]"),
        ([], "[tenants.a]\nquota = '2TiB'", "more than --capacity"),
        ([], "[tenants.a]\nweight = 'x'", "write a number"),
        (["--origin-rate", "x"], "", "--origin-rate 'x'"),
        ([], "origin-rate = 5", "origin-rate is a text in quotes, or a list of them"),
    ],
)
def test_a_daemon_does_not_start_with_wrong_settings(tmp_path: Path, flags: list[str], toml: str, says: str) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text(toml)
    always = ["--config", str(config), "--data-dir", str(tmp_path / "data"), "--capacity", "1GiB"]
    ended = CliRunner().invoke(command, [*always, *flags])
    assert ended.exit_code == 2
    assert says in ended.output


# -- what is measured -------------------------------------------------------------------------------------------------


def test_ranks_of_a_job_add_up_and_of_a_group_the_fastest_job_counts() -> None:
    heard = [Heard(A, f"{rank}", 10.0, "job", "", "t", attained_bytes=1.0) for rank in range(8)]
    heard += [Heard(A, "t1", 30.0, "trial 1", "sweep"), Heard(A, "t2", 40.0, "trial 2", "sweep")]
    heard += [Heard(B, "x", 5.0), Heard(B, "y", 0.0, "late"), Heard(B, "z", 6.0, "late"), Heard(B, "w", 7.0)]
    readers = readers_of(heard)
    assert {(it.name, it.rate, it.tenant) for it in readers[A]} == {("job", 80.0, "t"), ("sweep", 40.0, "")}
    assert next(it for it in readers[A] if it.name == "job").attained_bytes == 8.0
    assert {it.name: it.rate for it in readers[B]} == {"unnamed job": 7.0, "unnamed job (2)": 5.0, "late": 12.0}
    assert readers_of(reversed(heard)) == readers, "in whatever order they were heard"


def test_what_is_predicted_is_told_of_each_job_although_others_are_called_the_same() -> None:
    heard = [Heard(A, f"{at}", 10.0 + at, "train", "", tenant) for at, tenant in enumerate(("t", "u"))]
    heard.append(Heard(A, "x", 12.0, "train", "", "t", ordered=True))
    readers = readers_of(heard)[A]
    assert {(shown_name(it), it.tenant, it.ordered) for it in readers} == {
        ("train", "t", False),
        ("train", "u", False),
        ("train", "t", True),
    }
    demand = DatasetDemand(name="a", size_bytes=1000.0, origin=ORIGIN, readers=readers)
    problem = Problem(capacity_bytes=2000.0, datasets=(demand,))
    told = view("n", problem, allocate(problem), lambda it: Shown("1" * 16, it.name), age_seconds=0.0, entries_max=9)
    its = told.datasets[0].readers
    assert {(it.name, it.tenant, it.ordered, it.predicted) for it in its} == {
        ("train", "t", False, 10.0),
        ("train", "u", False, 11.0),
        ("train", "t", True, 12.0),
    }
    job = Job("train", "", "u", "a", "1" * 16, 1, 11.0, 11.0, 0.0, 0.0, 0.0, ordered=False, stock=False)
    [explained] = explain_job([job], [], told)
    assert explained.predicted == explained.anew == 11.0


def test_a_job_without_a_name_is_not_taken_for_one_that_is_called_so() -> None:
    heard = [Heard(A, "x", 5.0), Heard(A, "y", 6.0), Heard(A, "z", 7.0, "unnamed job"), Heard(A, "w", 8.0, "a", "b")]
    rates = {it.name: it.rate for it in readers_of(heard)[A]}
    assert rates == {"unnamed job (2)": 5.0, "unnamed job (3)": 6.0, "unnamed job": 7.0, "b": 8.0}


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=200), st.floats(0.05, 5.0))
def test_noise_around_a_speed_changes_nothing(noise: list[float], pause: float) -> None:
    value = Steady()
    value.add(100.0, 0.0)
    used = {value.add(100.0 * (1 + it * BAND * 0.9), (at + 1) * pause) for at, it in enumerate(noise)}
    assert used == {100.0}
    for at in range(100):
        value.add(200.0, 1000.0 + at)
    assert value.value == pytest.approx(200.0, rel=BAND)


def test_an_origin_is_measured_while_it_is_the_limit_and_stays_known() -> None:
    origin = Bandwidth()
    for now in range(10):
        origin.was_read(now, now + 0.5, 5.0)
    assert origin.value == 0.0, "nobody was short of data"
    for now in range(10, 30):
        origin.hungry(float(now), hungry=True)
        origin.was_read(now, now + 1.0, 7.0)
    assert origin.value == pytest.approx(7.0)
    origin.hungry(31.0, hungry=False)
    origin.was_read(32.0, 42.0, 1.0)
    assert origin.value == pytest.approx(7.0)


def test_the_bandwidth_of_an_origin_is_that_of_all_fills_that_read_it_at_once() -> None:
    origin = Bandwidth()
    origin.hungry(0.0, hungry=True)
    for step in range(40):  # four at a time, each of four seconds
        origin.was_read(max(step - 3.0, 0.0), step + 1.0, 7.0)
        origin.hungry(step + 1.0, hungry=True)
    assert origin.value == pytest.approx(7.0)


def test_what_peers_give_and_what_fails_makes_no_origin_slow() -> None:
    allocator, needs = daemon()
    hear(needs, 1, A, 1e9)
    now = 0.0
    allocator.problem(now)
    for _ in range(20):
        for seconds, from_origin in ((1.0, True), (0.5, False), (10.0, False)):
            ended = allocator.began(A, 100.0, now)
            now += seconds
            ended(now, from_origin)
        hear(needs, 1, A, 1e9)
        problem, _ = allocator.problem(now)
    assert problem.origin_rates == {ORIGIN: pytest.approx(100.0)}


def read_all(turns: Turns, datasets: list[Digest], seconds: float, size: float = 1.0) -> dict[Digest, float]:
    """Read as much as the buckets let each dataset, and return the bytes per second."""
    got, now = dict.fromkeys(datasets, 0.0), 0.0
    while now < seconds:
        for name in datasets:
            while turns.wait_seconds(name, now) == 0:
                turns.take(name, size)
                got[name] += size
        now += 0.05
    return {name: count / seconds for name, count in got.items()}


def test_datasets_get_their_parts_and_what_one_leaves_goes_to_the_other() -> None:
    rates = {A: 90.0, B: 10.0}
    both = Turns()
    both.set_rates(rates, {A: ORIGIN, B: ORIGIN}, 0.0)
    got = read_all(both, [A, B], 100.0)
    assert got[A] == pytest.approx(90 * BEYOND, rel=0.05)
    assert got[B] == pytest.approx(10 * BEYOND, rel=0.2)
    alone = Turns()
    alone.set_rates(rates, {A: ORIGIN, B: ORIGIN}, 0.0)
    assert read_all(alone, [B], 100.0)[B] == pytest.approx(100 * BEYOND, rel=0.05)
    free = Turns()
    free.set_rates({A: math.inf}, {A: ORIGIN}, 0.0)
    assert free.wait_seconds(A, 0.0) == 0
    free.take(A, 1e18)
    assert free.wait_seconds(A, 0.0) == 0


@given(st.floats(1.0, 1e9), st.floats(0.1, 1e9))
def test_a_cap_holds_whatever_the_size_of_shards_and_of_all_datasets_below_it(rate: float, size: float) -> None:
    turns, seconds = Turns(), 20.0
    for name in (A, B):
        turns.set_cap(name, ORIGIN, rate, 0.0)
    read, now = 0.0, 0.0
    while now < seconds and read < 3 * rate * seconds:
        for name in (A, B):
            while turns.wait_seconds(name, now) == 0 and read < 3 * rate * seconds:
                turns.take(name, max(size, rate / 100))
                read += max(size, rate / 100)
        now += 0.1
    assert read <= rate * (seconds + BURST_SECONDS) + 2 * max(size, rate / 100)


def test_buckets_are_filled_once_however_many_datasets_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, names = Turns(), [Digest.of(b"%d" % number) for number in range(100)]
    turns.set_rates(dict.fromkeys(names, 1.0), dict.fromkeys(names, ORIGIN), 0.0)
    filled, fill = list[float](), _Bucket.fill
    monkeypatch.setattr(_Bucket, "fill", lambda it, now, added=0.0: filled.append(now) or fill(it, now, added))  # type: ignore[func-returns-value]
    for name in names:
        turns.take(name, 10.0)
    for number, name in enumerate(names):
        assert turns.wait_seconds(name, 1.0 + number * 1e-6) > 0
    assert turns.credit(1.0).keys() == set(names)
    assert len(filled) == len(names)


# -- solving ----------------------------------------------------------------------------------------------------------


def daemon(members: int = 1) -> tuple[Allocator, Needs]:
    """An allocator of a daemon that knows two datasets of ten shards of 100 bytes."""
    needs = Needs()
    for name, letter in ((A, 1), (B, 2)):
        shards = as_rows(Digest(bytes([letter, at]) * 16) for at in range(10))
        needs.add_dataset(name, shards, np.full(10, 100.0), np.zeros(10, bool), np.ones(10, bool))
    ring = Ring.of("r", [Member(f"n{at}", f"http://h{at}:1") for at in range(members)])
    facts = {A: Facts("a", 1000.0, f"{ORIGIN}/a"), B: Facts("b", 1000.0, f"{ORIGIN}/b")}
    return Allocator(needs, facts.get, lambda: 1000.0, lambda: (ring, "n0")), needs


def hear(needs: Needs, consumer: int, dataset: Digest, rate: float, tenant: str = "") -> None:
    left = np.full(10, FULL, np.uint8)
    identity = Identity(f"job {consumer}", "", tenant)
    needs.report(dataset, ConsumerReport(bytes([consumer]) * 16, left, rate, 0.0, 1e9, identity=identity), 0.0)


def solve(allocator: Allocator, now: float) -> dict[Digest, float]:
    problem, names = allocator.problem(now)
    if allocator.is_due(problem, now):
        allocator.take(allocator.solve(problem, names, now))
    return allocator.division()


def test_room_is_divided_equally_until_something_is_solved_and_all_of_it_is_somebodys() -> None:
    allocator, needs = daemon()
    hear(needs, 1, A, 100.0)
    hear(needs, 2, B, 10.0)
    assert allocator.division() == {A: 500.0, B: 500.0}
    division = solve(allocator, 1.0)
    read = {A: 100.0 + 100.0 * READ_SECONDS, B: 100.0 + 10.0 * READ_SECONDS}  # a shard, and what is being read
    parts = {A: 1000.0 + read[A], B: read[B]}
    assert division == pytest.approx({it: 1000.0 * parts[it] / sum(parts.values()) for it in parts}), "it saves most"
    slow = allocator.division(fill_seconds=10.0)
    most = 1000.0 / 2
    assert slow[B] == pytest.approx(1000.0 * (read[B] + 100.0) / (1000.0 + most + read[B] + 100.0)), "and during a fill"
    assert allocator.current.names == {A: "a", B: "b"}
    allocator.settings = settings_of("none")
    assert allocator.division() == {}


def test_what_passes_has_room_for_a_shard_of_each_reader_up_to_three() -> None:
    """Each may have read what another has yet to read: with less room, one evicts it before the other has read it."""
    for readers, shards_of_it in ((1, 1), (2, 2), (8, 3)):
        allocator, needs = daemon()
        hear(needs, 100, A, 100.0)
        for rank in range(readers):
            hear(needs, rank, B, 10.0)
        division = solve(allocator, 1.0)
        parts = {A: 1000.0 + 100.0 + 100.0 * READ_SECONDS, B: shards_of_it * 100.0 + 10.0 * READ_SECONDS}
        assert division == pytest.approx({it: 1000.0 * parts[it] / sum(parts.values()) for it in parts})


def test_room_for_no_more_than_a_shard_of_each_dataset_is_not_divided() -> None:
    allocator, needs = daemon()
    hear(needs, 1, A, 100.0)
    hear(needs, 2, B, 10.0)
    assert solve(allocator, 1.0)
    allocator._capacity_bytes = lambda: 299.0  # type: ignore[method-assign] # of two datasets of shards of 100 bytes
    assert allocator.division() == {}
    allocator._capacity_bytes = lambda: 300.0  # type: ignore[method-assign]
    assert sum(allocator.division().values()) == pytest.approx(300.0)


def test_a_new_job_is_solved_for_at_once() -> None:
    allocator, needs = daemon()
    hear(needs, 1, A, 100.0)
    assert set(solve(allocator, 1.0)) == {A}
    hear(needs, 2, B, 100.0)
    assert set(solve(allocator, 1.1)) == {A, B}
    before = allocator.current
    solve(allocator, 1.2)
    assert allocator.current is before, "and not for nothing"


def test_an_allocation_does_not_follow_noise_nor_a_rival_that_is_no_better() -> None:
    """Two jobs of about one speed, and an origin that is no limit: all bytes are worth the same wherever they are."""
    allocator, needs = daemon()
    rng, seen = np.random.default_rng(1), set()
    for step in range(200):
        for consumer, dataset in ((1, A), (2, B)):
            hear(needs, consumer, dataset, 100.0 * (1 + rng.normal(0, 0.3)))
        division = solve(allocator, 0.5 * step)
        seen.add(tuple(round(share / 100) for share in division.values()))  # in shards
    assert len(seen) <= 2, "the first answer, and at most one better one"


def test_an_allocation_follows_a_speed_that_changed() -> None:
    allocator, needs = daemon()
    hear(needs, 1, A, 100.0)
    hear(needs, 2, B, 10.0)
    assert solve(allocator, 0.0)[A] > 900
    for step in range(60):
        hear(needs, 1, A, 10.0)
        hear(needs, 2, B, 100.0)
        division = solve(allocator, 1.0 + step)
    assert division[B] > 900


def test_daemons_of_a_rack_solve_the_same_and_each_takes_its_slice() -> None:
    allocator, needs = daemon(members=4)
    hear(needs, 1, A, 100.0)
    problem, _ = allocator.problem(1.0)
    assert problem.capacity_bytes == 4000.0
    assert problem.datasets[0].readers[0].rate == 100.0
    allocator.settings = settings_of(tenants={"t": {"quota": 100}}, rates=("8MB",))
    problem, _ = allocator.problem(1.0)
    assert problem.quotas == {"t": 400.0}
    assert problem.origin_rates == {ORIGIN: 8e6}, "a cap is of the rack"
    allocator.turns.take(A, 2e6)
    assert allocator.wait_seconds(A, 1.5) > 0
    assert allocator.wait_seconds(A, 1.0 + 2e6 / (8e6 / 4) + 0.1) == 0


def test_an_origin_measured_far_too_slow_is_never_idle_for_it_and_a_debt_is_soon_paid() -> None:
    allocator, needs = daemon()
    hear(needs, 1, A, 100.0)
    allocator.turns.set_rates({A: 1.0}, {A: ORIGIN}, 0.0)
    for second in range(100):
        ended = allocator.began(A, 50.0, second)
        assert allocator.wait_seconds(A, second + 0.5) > 0, "one read is under way"
        ended(second + 0.9, True)
        assert allocator.wait_seconds(A, second + 0.9) == 0, "none is"
    ended = allocator.began(A, 50.0, 100.0)
    allocator.turns.set_rates({A: 50.0}, {A: ORIGIN}, 100.0)
    assert allocator.wait_seconds(A, 100.0 + DEBT_SECONDS) == 0, "what was read before the rate was known is forgotten"
    ended(110.0, True)
    allocator.turns.set_cap(A, ORIGIN, 1.0, 110.0)
    allocator.began(A, 50.0, 111.0)(112.0, True)
    assert allocator.wait_seconds(A, 113.0) > 0, "a cap holds also where nothing is read"


def test_a_cap_holds_for_what_nobody_reports_on_too() -> None:
    """A dataset that is warmed, or that a reader has just opened."""
    allocator, needs = daemon()
    allocator.settings = settings_of(rates=("1MB",))
    assert allocator.wait_seconds(A, 0.0) == 0
    from_origin, from_peer = allocator.began(A, 1e6, 0.0), allocator.began(A, 1e6, 0.0)
    assert allocator.wait_seconds(A, 0.1) > 0
    assert allocator.wait_seconds(B, 0.1) > 0, "of the same origin"
    from_origin(0.5, True)
    hear(needs, 1, B, 100.0)
    allocator.problem(0.5)  # of B alone
    from_peer(0.5, False)
    assert allocator.wait_seconds(A, 0.9) > 0
    assert allocator.wait_seconds(A, 1.1) == 0, "what a peer gave does not count"


def test_origins_that_nobody_reads_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quiver_cacheserver.allocation.allocator.ORIGINS_MAX", 2)
    allocator, needs = daemon()
    where = {Digest.of(b"%d" % number): f"http://o{number}/" for number in range(9)}
    allocator._facts = lambda name: Facts("x", 1000.0, where[name]) if name in where else None  # type: ignore[method-assign]
    allocator.settings = settings_of(rates=("1MB",))
    for number, name in enumerate(where):
        assert allocator.wait_seconds(name, number) == 0
        allocator.began(name, 100.0, number)(number, True)
    hear(needs, 1, A, 100.0)
    where[A] = "http://read/"
    allocator.problem(100.0)
    assert set(allocator._bandwidths) == {"http://o7", "http://o8"}
    assert set(allocator.turns._caps) == {"http://read"}


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        (("http://origin:80/a=1MB",), None),
        (("http://origin:80/a=1MB", "http://origin:80/b=2MB"), 3e6),
        (("http://origin:80/a=1MB", "http://origin:80/=2MB"), 3e6),
        (("http://origin:80/=2MB",), 2e6),
    ],
)
def test_the_cap_of_a_prefix_does_not_limit_what_lies_beside_it(rates: tuple[str, ...], limit: float | None) -> None:
    allocator, needs = daemon()
    hear(needs, 1, A, 1e9)
    hear(needs, 2, B, 1e9)
    allocator.settings = settings_of(rates=rates)
    problem, _ = allocator.problem(1.0)
    assert problem.origin_rates == ({} if limit is None else {ORIGIN: limit})


def test_only_a_dataset_all_of_whose_tenants_have_quotas_is_limited_by_them() -> None:
    allocator, needs = daemon()
    hear(needs, 1, A, 100.0, "t")
    hear(needs, 2, B, 10.0, "t")
    hear(needs, 3, B, 10.0, "free")
    allocator.settings = settings_of(tenants={"t": {"quota": 300}})
    division = solve(allocator, 1.0)
    assert allocator.limits() == {A: pytest.approx(division[A])}


# -- fills ------------------------------------------------------------------------------------------------------------


class Barrier:
    """Lets the fills of one dataset wait until it is opened."""

    def __init__(self) -> None:
        self.closed: set[Digest] = set()
        self.asked: list[Digest] = []
        self.ended: list[tuple[Digest, bool]] = []

    def wait_seconds(self, dataset: Digest, now: float) -> float:
        del now
        self.asked.append(dataset)
        return 0.01 if dataset in self.closed else 0.0

    def began(self, dataset: Digest, size_bytes: float, now: float) -> Any:
        del size_bytes, now
        return lambda now, from_origin: self.ended.append((dataset, from_origin))


def test_a_fill_waits_for_its_datasets_turn_and_keeps_no_other_one_waiting() -> None:
    async def run() -> None:
        commitments, barrier = Commitments(), Barrier()
        barrier.closed.add(A)
        with ThreadPoolExecutor(4) as threads:
            fills = Fills(threads, commitments, Uploads(commitments), lambda error: None, barrier)
            held = [fills.start(Decision(Digest(bytes([at]) * 32), A, 1.0), lambda: "origin", "c") for at in range(8)]
            free = fills.start(Decision(Digest(bytes([9]) * 32), B, 1.0), lambda: "peer", "c")
            assert isinstance(free, asyncio.Future)
            assert await asyncio.wait_for(free, 30) == "peer"
            assert not any(it.done() for it in held if isinstance(it, asyncio.Future))
            barrier.closed.clear()
            for it in held:
                assert isinstance(it, asyncio.Future)
                assert await asyncio.wait_for(it, 30) == "origin"
            assert (B, False) in barrier.ended
            assert barrier.ended.count((A, True)) == 8

    asyncio.run(run())


def test_a_shard_of_two_datasets_that_waited_for_their_turn_is_read_once() -> None:
    """Waiting for a turn uses up no patience with the other dataset's fill of the same shard."""

    async def run() -> None:
        commitments, barrier, begun, go = Commitments(), Barrier(), list[Digest](), threading.Event()
        shard, other, c = (Digest(bytes([letter]) * 32) for letter in b"STC")
        barrier.closed |= {A, B, c}

        def work(dataset: Digest) -> str:
            begun.append(dataset)
            assert dataset == c or go.wait(60)
            return "origin"

        with ThreadPoolExecutor(4) as threads:
            fills = Fills(threads, commitments, Uploads(commitments), lambda error: None, barrier)
            try:
                its = [
                    fills.start(Decision(of, dataset, 1.0), partial(work, dataset), "c")
                    for of, dataset in ((shard, A), (shard, B), (other, c))
                ]
                barrier.closed.clear()
                assert await asyncio.wait_for(its[2], 30) == "origin"  # type: ignore[arg-type] # the last to have a turn
                assert sorted(begun) == sorted([A, c])
            finally:
                go.set()
            assert await asyncio.wait_for(its[1], 30) == "disk"  # type: ignore[arg-type]
            assert B not in begun

    asyncio.run(run())


def test_fills_that_wait_for_their_turn_count_against_the_bound_on_their_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quiver_cacheserver.residency.fills.PENDING_MAX", 8)

    async def run() -> None:
        commitments, barrier = Commitments(), Barrier()
        barrier.closed.add(A)
        with ThreadPoolExecutor(4) as threads:
            fills = Fills(threads, commitments, Uploads(commitments), lambda error: None, barrier)

            def ask(client: str, number: int) -> object:
                return fills.start(Decision(Digest.of(f"{client} {number}".encode()), A, 1.0), lambda: "origin", client)

            assert [isinstance(ask("c", number), asyncio.Future) for number in range(20)] == [True] * 8 + [False] * 12
            assert isinstance(ask("d", 0), asyncio.Future), "another client has one that waits in any case"
            assert ask("d", 1) is RangeStatus.FILLING
            fills.close()

    asyncio.run(run())

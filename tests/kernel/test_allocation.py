"""Allocation against brute force: enumeration of what could be cached, with up to four datasets."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.allocation import Allocation, DatasetDemand, Policy, Problem, Reader, allocate
from quiver.allocation.attained import KEPT, queues
from quiver.allocation.charges import Charges
from quiver.allocation.instance import Instance
from quiver.allocation.knapsack import spread
from quiver.allocation.throughput import best_rates

GB, MB = 1e9, 1e6
TENANTS = ("red", "blue", "green")
few = settings(max_examples=30, deadline=None)
fewer = settings(max_examples=10, deadline=None)  # for each of four policies


# --- problems ---------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn, *, quotas: bool = False, single: bool = False, origins: int = 2) -> Problem:
    """Draw up to four datasets with up to three readers each. ``single``: one reader that is known each."""
    rate = st.floats(0.1, 10).map(lambda x: round(x, 3))
    datasets = []
    for place in range(draw(st.integers(1, 4))):
        readers = tuple(
            Reader(
                name=f"job{place}{number}",
                rate=draw(rate),
                tenant=draw(st.sampled_from(TENANTS)),
                ordered=draw(st.booleans()),
                attained_bytes=draw(st.floats(0, 1000)),
            )
            for number in range(1 if single else draw(st.integers(1, 3)))
        )
        size, origin = float(draw(st.integers(1, 20))), f"o{draw(st.integers(1, origins))}"
        datasets.append(DatasetDemand(name=f"d{place}", size_bytes=size, origin=origin, readers=readers))
    capacity = float(draw(st.integers(0, int(sum(dataset.size_bytes for dataset in datasets)))))
    return Problem(
        capacity_bytes=capacity,
        datasets=tuple(datasets),
        origin_rates={f"o{number}": draw(st.floats(0.05, 15)) for number in range(1, origins + 1)},
        weights={tenant: draw(st.sampled_from([0.5, 1.0, 2.0])) for tenant in TENANTS},
        quotas={tenant: float(draw(st.integers(0, 20))) for tenant in TENANTS[:2]} if quotas else {},
    )


def weight(problem: Problem, reader: Reader) -> float:
    return problem.weights.get(reader.tenant, 1.0)


def demand(dataset: DatasetDemand, x: dict[tuple[str, str], float]) -> float:
    """Return D: the fastest of those that substitute, and each of those that read in a fixed order."""
    rates = [(reader.ordered, x[dataset.name, reader.name]) for reader in dataset.readers]
    return max((r for ordered, r in rates if not ordered), default=0.0) + sum(r for ordered, r in rates if ordered)


# --- brute force ------------------------------------------------------------------------------------------------------


def fill(total: float, wants: list[tuple[float, float]]) -> list[float]:
    """Divide ``total`` by weight among (weight, most that one can use), round by round."""
    got = [0.0] * len(wants)
    open_ = [place for place, (_, most) in enumerate(wants) if most > 0]
    while open_ and total > 1e-12:
        weights = sum(wants[place][0] for place in open_)
        step = min([total / weights, *((wants[p][1] - got[p]) / wants[p][0] for p in open_)])
        for place in open_:
            got[place] += step * wants[place][0]
        total -= step * weights
        open_ = [place for place in open_ if wants[place][1] - got[place] > 1e-12]
    return got


def equal_split(problem: Problem) -> dict[tuple[str, str], float]:
    """Return what each reader reaches if cache and bandwidth are divided by weight."""
    weights = [sum(weight(problem, reader) for reader in dataset.readers) for dataset in problem.datasets]
    wants = [(w, dataset.size_bytes) for w, dataset in zip(weights, problem.datasets, strict=True)]
    cached = fill(problem.capacity_bytes, wants)
    x = {}
    for origin, bandwidth in problem.origin_rates.items():
        streams = []
        for dataset, kept in zip(problem.datasets, cached, strict=True):
            missing = max(1 - kept / dataset.size_bytes, 0.0)
            sharing = [reader for reader in dataset.readers if not reader.ordered]
            for readers in ([sharing] if sharing else []) + [[r] for r in dataset.readers if r.ordered]:
                streams += [(dataset, missing, readers)] * (dataset.origin == origin)
        wants = [
            (sum(weight(problem, r) for r in readers), max(r.rate for r in readers) * missing)
            for _, missing, readers in streams
        ]
        for (dataset, missing, readers), given_ in zip(streams, fill(bandwidth, wants), strict=True):
            for reader in readers:
                speed = given_ / missing if missing > 1e-12 else math.inf
                x[dataset.name, reader.name] = min(reader.rate, speed * (1 + 1e-12))
    return x


def fewest_bytes(problem: Problem, x: dict[tuple[str, str], float]) -> float:
    """Return the fewest cached bytes with which the origins carry ``x``, over all vertices of the linear program."""
    result = 0.0
    for origin, bandwidth in problem.origin_rates.items():
        datasets = [dataset for dataset in problem.datasets if dataset.origin == origin]
        reads = [demand(dataset, x) for dataset in datasets]
        short = sum(reads) - bandwidth
        best = math.inf if short > 0 else 0.0
        for whole in itertools.product((False, True), repeat=len(datasets)):
            base = sum(dataset.size_bytes for dataset, full in zip(datasets, whole, strict=True) if full)
            rest = short - sum(read for read, full in zip(reads, whole, strict=True) if full)
            if rest <= 1e-12:
                best = min(best, base)
            for dataset, read, full in zip(datasets, reads, whole, strict=True):
                if not full and 0 < rest <= read:
                    best = min(best, base + rest / read * dataset.size_bytes)
        result += best
    return result


def best_worst(problem: Problem, floor: dict[tuple[str, str], float]) -> float:
    """Return the highest t at which everybody can have t times its weight of its full rate, or its floor."""

    def at(t: float) -> dict[tuple[str, str], float]:
        return {
            (dataset.name, reader.name): min(
                reader.rate, max(floor[dataset.name, reader.name], t * weight(problem, reader) * reader.rate)
            )
            for dataset in problem.datasets
            for reader in dataset.readers
        }

    low, high = 0.0, 2.0  # 1 / the least weight
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fewest_bytes(problem, at(middle)) <= problem.capacity_bytes else (low, middle)
    return low


def within_quotas(problem: Problem, cached: dict[str, float]) -> bool:
    """Say whether every set of datasets holds no more than the tenants that read it have together (Hall)."""
    charged = [d for d in problem.datasets if d.readers and all(r.tenant in problem.quotas for r in d.readers)]
    for count in range(1, len(charged) + 1):
        for some in itertools.combinations(charged, count):
            payers = {reader.tenant for dataset in some for reader in dataset.readers}
            if sum(cached[d.name] for d in some) > sum(problem.quotas[p] for p in payers) * (1 + 1e-9) + 1e-9:
                return False
    return True


def everything_cached(problem: Problem) -> list[dict[str, float]]:
    """Return every way to cache whole bytes within the capacity and the quotas: what is best is among them."""
    ranges = [range(int(dataset.size_bytes) + 1) for dataset in problem.datasets]
    names = [dataset.name for dataset in problem.datasets]
    ways = (dict(zip(names, map(float, way), strict=True)) for way in itertools.product(*ranges))
    return [way for way in ways if sum(way.values()) <= problem.capacity_bytes and within_quotas(problem, way)]


def small(problem: Problem, bytes_: int) -> Problem:
    """Return the problem with sizes of at most ``bytes_``, so that what can be cached can be enumerated."""
    datasets = tuple(dataclasses.replace(d, size_bytes=1 + d.size_bytes % bytes_) for d in problem.datasets)
    return dataclasses.replace(problem, datasets=datasets)


# --- what holds for all policies --------------------------------------------------------------------------------------


def check_shares(problem: Problem, result: Allocation) -> None:
    cached = {name: share.cache_bytes for name, share in result.shares.items()}
    assert set(cached) == {dataset.name for dataset in problem.datasets}
    assert sum(cached.values()) <= problem.capacity_bytes * (1 + 1e-9)
    assert within_quotas(problem, cached)
    spent: dict[str, float] = {}
    for dataset in problem.datasets:
        share = result.shares[dataset.name]
        assert -1e-9 <= share.cache_bytes <= dataset.size_bytes * (1 + 1e-12)
        assert share.reason
        misses = demand(dataset, dict(result.predicted)) * (1 - share.cache_bytes / dataset.size_bytes)
        assert misses <= share.origin_rate * (1 + 1e-6) + 1e-9
        spent[dataset.origin] = spent.get(dataset.origin, 0.0) + share.origin_rate
    for origin, rate in spent.items():
        assert rate <= problem.origin_rates.get(origin, math.inf) * (1 + 1e-9)
    for dataset in problem.datasets:
        for reader in dataset.readers:
            assert result.predicted[dataset.name, reader.name] <= reader.rate * (1 + 1e-9)


@pytest.mark.parametrize("policy", list(Policy))
@fewer
@given(problem=problems(quotas=True))
def test_shares_fit_the_cache_the_quotas_and_the_origins_and_carry_what_is_predicted(
    policy: Policy, problem: Problem
) -> None:
    check_shares(problem, allocate(problem, policy))


@pytest.mark.parametrize("policy", list(Policy))
@fewer
@given(problem=problems(quotas=True), seed=st.integers(0, 99))
def test_the_order_of_datasets_and_readers_changes_nothing(policy: Policy, problem: Problem, seed: int) -> None:
    chance = random.Random(seed)
    datasets = [
        dataclasses.replace(d, readers=tuple(chance.sample(d.readers, len(d.readers)))) for d in problem.datasets
    ]
    chance.shuffle(datasets)
    other = dataclasses.replace(problem, datasets=tuple(datasets))
    assert allocate(other, policy) == allocate(problem, policy)


@pytest.mark.parametrize("policy", list(Policy))
@fewer
@given(problem=problems(quotas=True), scale=st.sampled_from([0.125, 1 / 1024, 4.0]))
def test_a_daemon_that_solves_its_slice_finds_the_same_shares(policy: Policy, problem: Problem, scale: float) -> None:
    slice_ = Problem(
        capacity_bytes=problem.capacity_bytes * scale,
        datasets=tuple(
            dataclasses.replace(
                dataset,
                size_bytes=dataset.size_bytes * scale,
                readers=tuple(
                    dataclasses.replace(r, rate=r.rate * scale, attained_bytes=r.attained_bytes * scale)
                    for r in dataset.readers
                ),
            )
            for dataset in problem.datasets
        ),
        origin_rates={name: rate * scale for name, rate in problem.origin_rates.items()},
        weights=problem.weights,
        quotas={name: quota * scale for name, quota in problem.quotas.items()},
    )
    whole, part = allocate(problem, policy), allocate(slice_, policy)
    for name, share in whole.shares.items():
        assert part.shares[name].cache_bytes == pytest.approx(share.cache_bytes * scale, rel=1e-9)
        assert part.shares[name].origin_rate == pytest.approx(share.origin_rate * scale, rel=1e-6, abs=1e-9)


# --- max-min ----------------------------------------------------------------------------------------------------------


@few
@given(problem=problems())
def test_under_max_min_nobody_is_worse_off_than_with_an_equal_split(problem: Problem) -> None:
    predicted = allocate(problem, Policy.MAX_MIN).predicted
    for key, rate in equal_split(problem).items():
        assert predicted[key] >= rate * (1 - 1e-6)


@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_under_max_min_the_worst_off_is_as_well_off_as_brute_force_can_make_it(problem: Problem) -> None:
    floor = equal_split(problem)
    best = best_worst(problem, {key: rate * (1 - 1e-9) for key, rate in floor.items()})
    predicted = allocate(problem, Policy.MAX_MIN).predicted
    for dataset in problem.datasets:
        for reader in dataset.readers:
            aim = min(reader.rate, best * weight(problem, reader) * reader.rate)
            assert predicted[dataset.name, reader.name] >= aim * (1 - 1e-6)


@few
@given(problem=problems())
def test_under_max_min_nobody_could_read_faster_without_more_of_its_origin(problem: Problem) -> None:
    result = allocate(problem, Policy.MAX_MIN)
    for dataset in problem.datasets:
        slow = [r for r in dataset.readers if result.predicted[dataset.name, r.name] < r.rate * (1 - 1e-6)]
        if slow:
            used = sum(
                demand(d, dict(result.predicted)) * (1 - result.shares[d.name].cache_bytes / d.size_bytes)
                for d in problem.datasets
                if d.origin == dataset.origin
            )
            assert used == pytest.approx(problem.origin_rates[dataset.origin], rel=1e-6)
            assert sum(s.cache_bytes for s in result.shares.values()) == pytest.approx(problem.capacity_bytes, rel=1e-6)


def two(rate_a: float, rate_b: float, bandwidth: float, **arguments: object) -> Problem:
    """Return two datasets of 100 MB with a reader each, and a cache of a fifth of both."""
    return Problem(
        capacity_bytes=40 * MB,
        datasets=tuple(
            DatasetDemand(
                name=name, size_bytes=100 * MB, origin="o", readers=(Reader(name=name, rate=rate * MB, tenant=name),)
            )
            for name, rate in (("a", rate_a), ("b", rate_b))
        ),
        origin_rates={"o": bandwidth * MB},
        **arguments,  # type: ignore[arg-type]
    )


def total(result: Allocation) -> float:
    return sum(result.predicted.values()) / MB


@pytest.mark.parametrize(("rate", "slow", "reach"), [(4.8, 0.6, 5.3), (4.8, 0.48, 5.28)])
def test_a_hungry_job_beside_a_slow_one_reads_as_fast_as_brute_force_allows(
    rate: float, slow: float, reach: float
) -> None:
    problem = two(rate, slow, 0.8 * 0.8 * (rate + slow))
    result = allocate(problem)
    assert total(result) >= reach
    assert result.predicted["b", "b"] == pytest.approx(slow * MB)
    best = 0.0
    for kept in np.linspace(0, 40, 401):
        u_a, u_b, b = 1 - kept / 100, 1 - (40 - kept) / 100, problem.origin_rates["o"] / MB
        x_b = min(slow, b / u_b)
        best = max(best, x_b + min(rate, (b - x_b * u_b) / u_a))
    assert total(result) >= 0.999 * best


def test_equals_are_treated_equally() -> None:
    shares = allocate(two(4.8, 4.8, 3)).shares
    assert shares["a"].cache_bytes == shares["b"].cache_bytes == pytest.approx(20 * MB)
    assert shares["a"].origin_rate == shares["b"].origin_rate


def test_a_weight_of_two_is_twice_the_throughput_while_both_wait() -> None:
    predicted = allocate(two(10, 10, 2, weights={"a": 2.0})).predicted
    assert predicted["a", "a"] == pytest.approx(2 * predicted["b", "b"], rel=0.2)
    assert predicted["a", "a"] > predicted["b", "b"]


def test_readers_that_substitute_share_one_stream_and_those_of_a_fixed_order_do_not() -> None:
    def problem(ordered: bool) -> Problem:
        readers = tuple(Reader(name=f"r{n}", rate=1 * MB, ordered=ordered) for n in range(4))
        dataset = DatasetDemand(name="d", size_bytes=100 * MB, origin="o", readers=readers)
        return Problem(capacity_bytes=0, datasets=(dataset,), origin_rates={"o": 1 * MB})

    assert total(allocate(problem(ordered=False))) == pytest.approx(4)
    assert total(allocate(problem(ordered=True))) == pytest.approx(1)


def test_a_dead_origin_holds_nobody_else_back() -> None:
    alive = two(5, 5, 3)
    dead = tuple(
        DatasetDemand(name=f"x{n}", size_bytes=100 * MB, origin="dead", readers=(Reader(name=f"x{n}", rate=5 * MB),))
        for n in range(3)
    )
    both = dataclasses.replace(alive, datasets=(*alive.datasets, *dead), origin_rates={"o": 3 * MB, "dead": 0.0})
    result = allocate(both)
    assert [result.predicted[d.name, d.name] for d in dead] == [0, 0, 0]
    assert total(result) == pytest.approx(total(allocate(alive)), rel=1e-6)


# --- quotas -----------------------------------------------------------------------------------------------------------


@few
@given(problem=problems(quotas=True).map(lambda problem: small(problem, 6)))
def test_the_bytes_that_save_most_within_quotas_are_those_of_brute_force(problem: Problem) -> None:
    instance = Instance.of(problem)
    value = np.arange(len(instance.names)) % 3 + instance.sizes
    cached = spread(instance, instance.pinned, value)
    names = [dataset.name for dataset in problem.datasets]
    best = max(
        sum(value[i] * way[name] / instance.sizes[i] for i, name in enumerate(names))
        for way in everything_cached(problem)
    )
    assert (value * cached / instance.sizes).sum() == pytest.approx(best, abs=1e-9)


def test_a_tenant_without_quota_left_costs_another_that_reads_the_same_dataset_nothing() -> None:
    readers = (Reader(name="a", rate=MB, tenant="broke"), Reader(name="b", rate=MB, tenant="rich"))
    dataset = DatasetDemand(name="d", size_bytes=10, origin="o", readers=readers)
    problem = Problem(capacity_bytes=10, datasets=(dataset,), quotas={"broke": 0.0, "rich": 8.0})
    assert allocate(problem).shares["d"].cache_bytes == 8
    assert allocate(dataclasses.replace(problem, quotas={"broke": 0.0})).shares["d"].cache_bytes == 10


def test_charges_are_rerouted_when_a_later_dataset_has_one_payer_only() -> None:
    def dataset(name: str, *tenants: str) -> DatasetDemand:
        readers = tuple(Reader(name=tenant, rate=1, tenant=tenant) for tenant in tenants)
        return DatasetDemand(name=name, size_bytes=10, origin="o", readers=readers)

    datasets = (dataset("ab", "a", "b"), dataset("bc", "b", "c"), dataset("only a", "a"))
    quotas = {"a": 10.0, "b": 10.0, "c": 10.0}
    charges = Charges(Instance.of(Problem(capacity_bytes=100, datasets=datasets, quotas=quotas)))
    assert [charges.take(place, 10) for place in range(3)] == [10, 10, 10]
    assert charges.take(0, 1) == 0


# --- the other policies -----------------------------------------------------------------------------------------------


@few
@given(problem=problems(quotas=True).map(lambda problem: small(problem, 6)))
def test_cost_reads_the_fewest_origin_bytes_at_full_rates(problem: Problem) -> None:
    shares = allocate(problem, Policy.COST).shares
    full = {(d.name, r.name): r.rate for d in problem.datasets for r in d.readers}

    def misses(cached: dict[str, float]) -> float:
        return sum(demand(d, full) * (1 - cached[d.name] / d.size_bytes) for d in problem.datasets)

    best = min(misses(way) for way in everything_cached(problem))
    assert misses({name: share.cache_bytes for name, share in shares.items()}) <= best + 1e-9


def weighted(problem: Problem, result: Allocation) -> float:
    return sum(weight(problem, r) * result.predicted[d.name, r.name] for d in problem.datasets for r in d.readers)


def test_throughput_is_that_of_brute_force() -> None:
    chance, reached = random.Random(5), []
    while len(reached) < 25:
        datasets = tuple(
            DatasetDemand(
                name=f"d{n}",
                size_bytes=float(chance.randint(1, 5)),
                origin=f"o{chance.randint(1, 2)}",
                readers=(Reader(name="r", rate=chance.uniform(0.1, 10)),),
            )
            for n in range(chance.randint(2, 4))
        )
        rates = {f"o{n}": chance.uniform(0.05, 10) for n in (1, 2)}
        problem = Problem(capacity_bytes=float(chance.randint(1, 10)), datasets=datasets, origin_rates=rates)
        instance = Instance.of(problem)
        best = 0.0
        for way in everything_cached(problem):
            cached = np.array([way[name] for name in instance.names])
            best = max(best, float((instance.weight * best_rates(instance, cached, instance.rate)[0]).sum()))
        reached.append(weighted(problem, allocate(problem, Policy.THROUGHPUT)) / best)
    assert min(reached) >= 0.999


@few
@given(problem=problems())
def test_throughput_is_in_all_no_less_than_under_any_other_policy(problem: Problem) -> None:
    most = weighted(problem, allocate(problem, Policy.THROUGHPUT))
    for policy in (Policy.MAX_MIN, Policy.COST, Policy.LAS):
        assert most >= 0.97 * weighted(problem, allocate(problem, policy))  # 1 % is set aside for those that starve


def served(long: float, fresh: float, bandwidth: float = 5.0) -> Allocation:
    """Return the allocation to a job that attained ``long`` seconds of service beside one that attained ``fresh``."""
    problem = two(4, 4, bandwidth)
    datasets = tuple(
        dataclasses.replace(d, readers=(dataclasses.replace(d.readers[0], attained_bytes=seconds * d.readers[0].rate),))
        for d, seconds in zip(problem.datasets, (long, fresh), strict=True)
    )
    return allocate(dataclasses.replace(problem, datasets=datasets), Policy.LAS)


def test_a_new_trial_does_not_queue_behind_a_job_of_a_week() -> None:
    result = served(long=7 * 86400, fresh=0)
    assert result.predicted["b", "b"] == pytest.approx(4 * MB)
    assert result.predicted["a", "a"] >= KEPT * 2.5 * MB


def test_jobs_of_about_the_same_age_share_and_do_not_take_turns() -> None:
    result = served(long=100_000, fresh=90_000)
    assert result.predicted["a", "a"] == pytest.approx(result.predicted["b", "b"])


@given(seconds=st.floats(0, 1e9), rate=st.floats(1e-3, 1e9))
def test_a_queue_is_left_once_and_never_entered_again(seconds: float, rate: float) -> None:
    readers = tuple(Reader(name=f"{n}", rate=rate, attained_bytes=seconds * rate * (1 + n)) for n in range(4))
    dataset = DatasetDemand(name="d", size_bytes=1, origin="o", readers=readers)
    found = queues(Instance.of(Problem(capacity_bytes=1, datasets=(dataset,)))).tolist()
    assert found == sorted(found)
    assert found[0] >= 0


# --- what an operator or a stranger may come up with ------------------------------------------------------------------


def one(**arguments: object) -> Problem:
    dataset: dict[str, object] = {
        "name": "d",
        "size_bytes": 100.0,
        "origin": "o",
        "readers": (Reader(name="r", rate=5.0),),
    }
    problem: dict[str, object] = {"capacity_bytes": 40.0, "origin_rates": {"o": 2.0}}
    for key, value in arguments.items():
        (dataset if key in {"size_bytes", "readers", "pinned", "resident_bytes"} else problem)[key] = value
    return Problem(datasets=(DatasetDemand(**dataset),), **problem)  # type: ignore[arg-type]


STRANGE = {
    "nothing at all": Problem(capacity_bytes=0, datasets=()),
    "no capacity": one(capacity_bytes=0.0),
    "a capacity that is no number": one(capacity_bytes=math.nan),
    "a capacity without end": one(capacity_bytes=math.inf),
    "an empty dataset": one(size_bytes=0.0),
    "no readers": one(readers=()),
    "an unknown rate": one(readers=(Reader(name="r", rate=0.0),)),
    "an unknown rate, and no limit": one(readers=(Reader(name="r", rate=0.0),), origin_rates={}),
    "an infinite rate": one(readers=(Reader(name="r", rate=math.inf),)),
    "an infinite rate, and no limit": one(readers=(Reader(name="r", rate=math.inf),), origin_rates={}),
    "a rate that is no number": one(readers=(Reader(name="r", rate=math.nan),)),
    "a dead origin": one(origin_rates={"o": 0.0}),
    "an origin that nobody measured": one(origin_rates={}),
    "a dataset larger than everything": one(size_bytes=1e18),
    "a dataset that fits many times": one(capacity_bytes=1e18),
    "pinned, and too large": one(pinned=True),
    "pinned, without readers": one(pinned=True, readers=()),
    "a quota of nothing": one(quotas={"": 0.0}),
    "weights of nothing": one(weights={"": 0.0}),
    "weights that are no numbers": one(weights={"": math.nan}),
    "more resident than there is": one(resident_bytes=1e9),
    "nothing resident": one(resident_bytes=0.0),
    "two readers of one name": one(readers=(Reader(name="r", rate=1.0), Reader(name="r", rate=1.0, ordered=True))),
}


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("what", sorted(STRANGE))
def test_whatever_the_numbers_are_the_answer_is_sane(what: str, policy: Policy) -> None:
    problem = STRANGE[what]
    result = allocate(problem, policy)
    capacity = problem.capacity_bytes if problem.capacity_bytes > 0 else 0.0
    assert sum(share.cache_bytes for share in result.shares.values()) <= capacity
    for share in result.shares.values():
        assert share.cache_bytes >= 0
        assert share.origin_rate >= 0
        assert share.reason
    for dataset in problem.datasets:
        for reader in dataset.readers:
            assert 0 <= result.predicted[dataset.name, reader.name] < math.inf


def test_with_room_for_everything_all_is_kept() -> None:
    for capacity in (100.0, 1e18, math.inf):
        assert allocate(one(capacity_bytes=capacity)).shares["d"].cache_bytes == 100


def test_a_job_of_unknown_rate_gets_an_equal_share() -> None:
    problem = two(5, 0, 2)
    result = allocate(problem)
    assert result.predicted["b", "b"] == pytest.approx(1 / 0.8 * MB, rel=1e-6)


def test_a_pinned_dataset_is_kept_whole_before_all_others() -> None:
    problem = two(10, 0.1, 2)
    pinned = tuple(dataclasses.replace(d, size_bytes=30 * MB, pinned=d.name == "b") for d in problem.datasets)
    shares = allocate(dataclasses.replace(problem, datasets=pinned)).shares
    assert shares["b"].cache_bytes == 30 * MB
    assert shares["a"].cache_bytes == pytest.approx(10 * MB)
    assert "pinned" in shares["b"].reason


def test_a_share_that_is_not_filled_yet_is_given_bandwidth_to_fill_it() -> None:
    problem = two(5, 5, 2)
    sizes = (40 * MB, 400 * MB)
    datasets = tuple(
        dataclasses.replace(d, size_bytes=s, resident_bytes=0.0) for d, s in zip(problem.datasets, sizes, strict=True)
    )
    cold = allocate(dataclasses.replace(problem, datasets=datasets), Policy.COST)
    assert cold.shares["a"].cache_bytes == 40 * MB
    assert cold.shares["a"].origin_rate > 0.5 * MB
    assert cold.shares["a"].origin_rate + cold.shares["b"].origin_rate == pytest.approx(2 * MB)


def test_two_datasets_of_one_name_are_refused() -> None:
    problem = two(1, 1, 1)
    with pytest.raises(ValueError, match="same name"):
        allocate(dataclasses.replace(problem, datasets=problem.datasets + problem.datasets))


@pytest.mark.parametrize("policy", list(Policy))
def test_thousands_of_origins_are_each_used_to_the_full(policy: Policy) -> None:
    datasets = tuple(
        DatasetDemand(name=f"d{n:04}", size_bytes=100, origin=f"o{n}", readers=(Reader(name="r", rate=4.0 + n % 7),))
        for n in range(2000)
    )
    problem = Problem(capacity_bytes=0, datasets=datasets, origin_rates={f"o{n}": 1.0 + n % 3 for n in range(2000)})
    result = allocate(problem, policy)
    assert [result.predicted[d.name, "r"] for d in datasets] == pytest.approx([1.0 + n % 3 for n in range(2000)])


def test_the_reason_says_what_is_kept_and_why() -> None:
    shares = allocate(two(4.8, 0.6, 3.456)).shares
    assert shares["a"].reason == (
        "Reads at most 4.8 MB/s; 40 MB of 100 MB is kept, so that the slowest job gets as close to its full speed as "
        "possible: a cached GB saves its origin 48 MB/s, more than any other dataset. Its job would reach 99 % of its "
        "full speed: the origin gives 3.46 MB/s to all that read from it."
    )
    assert shares["b"].reason == (
        "Reads at most 600 kB/s; none of it is kept: a cached GB saves its origin 6 MB/s, and one other dataset saves "
        "more. Its job would run at full speed."
    )
    nothing = allocate(one(capacity_bytes=0.0)).shares["d"].reason
    assert "there is no room, or no quota left" in nothing
    assert "would reach 40 % of its full speed" in nothing

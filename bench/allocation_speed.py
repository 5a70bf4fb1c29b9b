"""How long does a daemon take to decide, and how near is the result to the optimum?

    python -m bench.allocation_speed [--rounds 5] [--gap 400]

First, 2,048 jobs on 1,000 datasets of five origins: each policy, with and without quotas of twenty tenants, best and
median of the rounds. Expected: under one second. Then random problems of two to four datasets, one or two readers
each, on two origins: throughput of the policy *throughput* ÷ that of the best of all ways to cache whole units,
its bandwidth being divided exactly. Expected: 1, but for a few (the problem contains the 0/1 knapsack).
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

import numpy as np

from quiver.allocation import DatasetDemand, Policy, Problem, Reader, allocate
from quiver.allocation.instance import Instance
from quiver.allocation.throughput import best_rates

JOBS, DATASETS, ORIGINS, TENANTS = 2048, 1000, 5, 20


def fleet(chance: random.Random, *, quotas: bool) -> Problem:
    """Return 2,048 readers of 1,000 datasets: sizes and rates over orders of magnitude, a cache of a twentieth."""
    readers: list[list[Reader]] = [[] for _ in range(DATASETS)]
    for number in range(JOBS):
        at = number if number < DATASETS else chance.randrange(DATASETS)
        readers[at].append(
            Reader(
                name=f"job{number}",
                rate=chance.lognormvariate(18, 1.5),
                tenant=f"t{chance.randrange(TENANTS)}",
                ordered=chance.random() < 0.3,
                attained_bytes=chance.lognormvariate(25, 3),
            )
        )
    datasets = tuple(
        DatasetDemand(
            name=f"d{number}",
            size_bytes=chance.lognormvariate(24, 2),
            origin=f"o{number % ORIGINS}",
            readers=tuple(readers[number]),
        )
        for number in range(DATASETS)
    )
    capacity = sum(dataset.size_bytes for dataset in datasets) / 20
    demand = sum(reader.rate for dataset in datasets for reader in dataset.readers)
    return Problem(
        capacity_bytes=capacity,
        datasets=datasets,
        origin_rates={f"o{number}": demand / 500 for number in range(ORIGINS)},
        quotas={f"t{number}": capacity * 0.03 for number in range(0, TENANTS, 2)} if quotas else {},
    )


def speed(rounds: int) -> None:
    for policy, quotas in itertools.product(Policy, (False, True)):
        problem = fleet(random.Random(1), quotas=quotas)
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            allocate(problem, policy)
            seconds.append(time.perf_counter() - begin)
        kind = "quotas" if quotas else "none"
        print(f"{policy:12} {kind:8} best {min(seconds):.3f} s, median {statistics.median(seconds):.3f} s")


def gap(count: int) -> None:
    chance, reached = random.Random(5), []
    for _ in range(count):
        datasets = tuple(
            DatasetDemand(
                name=f"d{number}",
                size_bytes=float(chance.randint(1, 8)),
                origin=f"o{chance.randint(1, 2)}",
                readers=tuple(
                    Reader(name=f"r{each}", rate=round(chance.uniform(0.1, 10), 2), ordered=chance.random() < 0.5)
                    for each in range(chance.randint(1, 2))
                ),
            )
            for number in range(chance.randint(2, 4))
        )
        capacity = float(chance.randint(0, int(sum(dataset.size_bytes for dataset in datasets))))
        rates = {f"o{number}": chance.uniform(0.05, 10) for number in (1, 2)}
        problem = Problem(capacity_bytes=capacity, datasets=datasets, origin_rates=rates)
        instance, best = Instance.of(problem), 0.0
        for way in itertools.product(*(range(int(size) + 1) for size in instance.sizes)):
            if sum(way) <= capacity:
                best = max(best, float(best_rates(instance, np.array(way, float), instance.rate)[0].sum()))
        reached.append(sum(allocate(problem, Policy.THROUGHPUT).predicted.values()) / best)
    below = [sum(ratio < limit for ratio in reached) / count for limit in (0.99, 0.95)]
    print(
        f"throughput ÷ brute force in {count} problems: mean {statistics.mean(reached):.4f}, worst {min(reached):.3f}, "
        f"below 0.99 in {below[0]:.1%}, below 0.95 in {below[1]:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gap", type=int, default=400, metavar="PROBLEMS")
    arguments = parser.parse_args()
    speed(arguments.rounds)
    if arguments.gap:
        gap(arguments.gap)


if __name__ == "__main__":
    main()

"""Run seeds: ``python -m tests.simulation --seeds 10000 --jobs 2``; replay one: ``--seed 17 --trace``."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence

from tests.simulation.world import Outcome, simulate


def attempt(seed: int) -> tuple[int, Outcome | str]:
    """Return the outcome of a seed, or what was wrong."""
    try:
        return seed, simulate(seed)
    except Exception as error:  # noqa: BLE001 - whatever happens to a seed is its result
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return seed, f"{type(error).__name__}: {error} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run, beginning with --first")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="run this seed alone, and raise what it finds")
    parser.add_argument("--trace", action="store_true", help="print the scenario and each fault as it begins")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        outcome = simulate(asked.seed, trace=asked.trace)
        print(f"seed {asked.seed}: exact; {outcome.virtual_seconds:.0f} s, {outcome.events} events; {outcome.checked}")
        return 0
    began = time.perf_counter()
    checked: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    wrong, slack, virtual = [], 0.0, 0.0
    with multiprocessing.get_context("fork").Pool(asked.jobs) as pool:
        seeds = range(asked.first, asked.first + asked.seeds)
        for seed, outcome in pool.imap_unordered(attempt, seeds, chunksize=20):
            if isinstance(outcome, str):
                wrong.append(seed)
                print(f"seed {seed}: {outcome}", flush=True)
                continue
            checked += outcome.checked
            fired += outcome.fired
            virtual += outcome.virtual_seconds
            slack = max(slack, outcome.slack)
    seconds = time.perf_counter() - began
    print("faults: " + ", ".join(f"{kind} {count:,}" for kind, count in fired.most_common()))
    print("checked: " + ", ".join(f"{what} {count:,}" for what, count in checked.most_common()))
    print(f"{virtual / 3600:,.0f} virtual hours in {seconds:.0f} s; slowest epoch at {slack:.0%} of its bound")
    print(f"{asked.seeds - len(wrong):,} of {asked.seeds:,} exact")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

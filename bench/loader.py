"""What the order and the state of a loader cost at 1.3 million samples. No sample is read.

    python bench/loader.py [--samples 1300000] [--shards 4500]

Expected on a two-core machine: beginning an epoch a third of a second, a batch under 0.2 ms, a state under 250 kB and
saved in under 5 ms, for one rank and for two.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from quiver.substitution import Mask, View
from quiver_client.loader.epoch import Deal, Epoch, ShardLayout
from quiver_client.loader.state import make_state, merge_states

BATCH = 256


def timed(work: Callable[[], object], times: int = 9) -> float:
    """Return the median milliseconds of ``work``."""
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return median(seconds) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_300_000)
    parser.add_argument("--shards", type=int, default=4_500)
    arguments = parser.parse_args()
    count, shards = arguments.samples, arguments.shards
    random = np.random.default_rng(0)
    shard_of = random.integers(0, shards, count)
    layout = ShardLayout(shard_of, np.bincount(shard_of, minlength=shards), np.full(shards, 110e3), 32e6)
    nothing = np.zeros(count, bool)
    for ranks, done in ((1, nothing), (2, nothing), (2, random.random(count) < 0.1)):
        deal = Deal(count, 0, True, 0, ranks, BATCH, False)
        begun = time.perf_counter()
        epoch = Epoch(0, deal.share(deal.order(0, done))[0], layout)
        began = time.perf_counter() - begun
        view = View(random.random(shards) < 0.2, np.zeros(shards, np.uint8), np.arange(shards))
        batches = []
        for _ in range(200):
            started = time.perf_counter()
            entries = epoch.choose(BATCH, view, None)
            assert entries is not None
            epoch.consume(epoch.draw(entries).number)
            batches.append(time.perf_counter() - started)

        def save(deal: Deal = deal, epoch: Epoch = epoch, done: Mask = done) -> dict[str, object]:
            return make_state("0" * 64, deal, 0, epoch.batches, done, epoch.consumed)

        size = len(pickle.dumps(save()))
        print(
            f"{count} samples, {ranks} rank{'s' * (ranks > 1)}{', dealt again' * bool(done.any())}:"
            f" epoch begun in {began * 1000:.0f} ms,"
            f" a batch of {BATCH} drawn and consumed in {median(batches) * 1e6:.0f} us,"
            f" state of {size / 1000:.1f} kB saved in {timed(save):.2f} ms"
        )
        if ranks == 1:
            print(f"  and merged for any number of ranks in {timed(lambda: merge_states([save()]), 3):.0f} ms")


if __name__ == "__main__":
    main()

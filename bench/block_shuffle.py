"""How far is a block shuffle from a uniform one, and does a network learn as much from it?

Orders alone: no cache takes part, since a block shuffle does not depend on one. For each layout, number of open shards
and classes: Pearson's chi-squared of batches' labels by its degrees of freedom (1 for a uniform shuffle) and whether
the loader warns; how alike consecutive epochs are (correlation of samples' places, and the share of batch mates that
meet again); and the accuracy of a small network on scikit-learn's digits, paired by seed with a full shuffle. In
``sequential`` layout the classes are in order, the worst case.

Expected: ``mixed`` layout as a uniform shuffle in its labels; ``sequential`` far from it, the farther the fewer shards
are open. Batch mates meet again somewhat more often than by chance in both.

    python -m bench.block_shuffle [--seeds 10]      prints the tables of docs/shuffles.md, in about a minute
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from bench.soundness import _compared, _met_again, _trained, divergences, labels_of, place, warns
from quiver.layout import Layout
from quiver.shuffles import block_permutation
from quiver.substitution import Ints, permutation
from quiver_client.loader.epoch import ShardLayout

SHARDS, SAMPLES, BATCH = 256, 128, 128
EPOCHS = 4
OPEN = (1, 4, 16, 64)
CLASSES = (10, 100)


def batches_of(order: Ints, batch: int) -> list[Ints]:
    return np.split(order, range(batch, len(order), batch))


def order_of(layout: ShardLayout, seed: int, epoch: int, open_shards: int) -> Ints:
    """``open_shards``: 0 for a full shuffle."""
    if not open_shards:
        return permutation(len(layout.shard_of), seed, epoch)
    return block_permutation(layout.shard_of, seed, epoch, open_shards)


def show_orders(kind: Layout, open_shards: int, seed: int) -> None:
    layout = place(kind, SHARDS * SAMPLES, SAMPLES, seed, 0)
    orders = [order_of(layout, seed, epoch, open_shards) for epoch in range(EPOCHS)]
    places = [np.argsort(order) for order in orders]
    alike = [np.corrcoef(*pair)[0, 1] for pair in itertools.pairwise(places)]
    again = [_met_again(before // BATCH, now // BATCH) for before, now in itertools.pairwise(places)]
    cells = [f"{kind}, {open_shards or 'full'}"]
    for classes in CLASSES:
        labels = labels_of(kind, SHARDS * SAMPLES, classes, seed)
        taken = [batches_of(order, BATCH) for order in orders]
        found = np.concatenate([divergences(labels, batches) for batches in taken])
        warned = sum(warns(labels, batches) for batches in taken)
        cells += [f"{np.median(found):.2f}", f"{np.percentile(found, 95):.2f}", f"{warned}/{EPOCHS}"]
    cells += [f"{np.mean(alike):+.2f}", f"{np.mean(again):.1%}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def show_accuracy(seeds: int) -> None:
    pixels, digits = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        (pixels / 16).astype(np.float32), digits, test_size=0.25, random_state=0, stratify=digits
    )
    by_class = np.argsort(train_y, kind="stable")
    test = torch.from_numpy(test_x), torch.from_numpy(test_y)
    kinds: tuple[tuple[Layout, int], ...] = tuple((kind, at) for kind in ("mixed", "sequential") for at in (0, 4, 16))
    reached: dict[tuple[Layout, int], list[float]] = {each: [] for each in kinds}
    for seed in range(seeds):
        for kind, open_shards in kinds:
            rows = by_class if kind == "sequential" else np.arange(len(train_y))
            tensors = torch.from_numpy(train_x[rows]), torch.from_numpy(train_y[rows])
            layout = place(kind, len(rows), 16, seed, 0)
            orders = [batches_of(order_of(layout, seed, epoch, open_shards), 32) for epoch in range(30)]
            reached[kind, open_shards].append(_trained(tensors, test, orders, seed))
    for (kind, open_shards), each in reached.items():
        it = _compared(kind, np.asarray(each), np.asarray(reached[kind, 0]))
        name = f"{kind}, {open_shards or 'full'}"
        print(f"| {name} | {it.mean:.2f} | {it.difference:+.2f} | {it.low:+.2f} to {it.high:+.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("quiver_client").setLevel(logging.ERROR)  # the table says when it would warn
    began = time.perf_counter()
    print("| layout, open shards | 10 classes: median | p95 | warned | 100: median | p95 | warned | places | again |")
    kinds: tuple[Layout, ...] = ("mixed", "sequential")
    for kind in kinds:
        for open_shards in (*OPEN, 0):
            show_orders(kind, open_shards, 0)
    show_accuracy(asked.seeds)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

"""Jobs killed at any batch and resumed with other ranks or workers: is each epoch's multiset exact?

Each *point* is a kill and a resume of the real ``DataLoader`` over a real dataset and an embedded cache. Most are kills
inside this process: the loader is dropped in the middle of its prefetching, and of the job nothing is left but the
states that were saved, through a file, and its ledger. Some are SIGKILLs of a process that trains. A run has several
points; between them world size, workers, batch size and prefetching change. Expected: every sample once, apart from
those repeated, or left out by ``drop_last``, so that all ranks get as many.

    python -m tests.chaos.resume --points 1000 --seed 0        prints "1,000 of 1,000 exact"; a seed repeats a run
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from quiver_client import DataLoader, Dataset, merge_states
from quiver_client.loader.consumer import CacheConsumer
from quiver_client.loader.ledger.recording import Replay
from tests.support.data import Files, make_files, random_files

SAMPLES: Final = 97  # no multiple of anything
State = dict[str, Any]
Batch = list[str]  # its keys


@dataclass
class Counts:
    """What the points were."""

    points: int = 0
    exact: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Place:
    """With what a part of an epoch is read."""

    world_size: int
    batch_size: int
    workers: int


@dataclass(frozen=True)
class Part:
    """What one rank read between two kills: of which epoch, the last checkpoint, and the batches that it covers."""

    epoch: int
    state: State
    given: list[Batch]


@dataclass
class Epoch:
    """One epoch as the training loops saw it. ``deals``: how its rest was dealt, and how many samples that were."""

    given: list[Batch] = field(default_factory=list)
    deals: list[tuple[Place, int]] = field(default_factory=list)


def dataset_in(folder: Path) -> Files:
    """Make the dataset: small samples in about fifteen shards."""
    return make_files(folder, random_files(SAMPLES, low=100, high=900), shard_bytes="4KiB")


class Run:
    """A job that is killed and resumed, until an epoch ends without a kill."""

    def __init__(self, files: Files, seed: int, *, in_workers: float = 0.03, by_signal: float = 0.15) -> None:
        self._chance = random.Random(seed)
        self._files, self._in_workers, self._by_signal = files, in_workers, by_signal
        self._folder = Path(tempfile.mkdtemp())
        capacity = self._chance.choice(["1GiB", "24KiB"])
        self._cache = f"file://{self._folder}/cache?capacity={capacity}"
        self._drop_last = self._chance.random() < 0.25
        self._substitute = self._chance.random() < 0.7
        self._seed = seed
        self._keeps_place = self._chance.random() < 0.2  # then it has a ledger, of one rank
        self._manifest = files.opened()
        self._blob = self._manifest.header.blobs[0].name
        self._rows = {self._manifest.key(row): row for row in range(SAMPLES)}
        self.epochs: dict[int, Epoch] = {}
        self._consumers: list[CacheConsumer] = []  # of killed runs: they report until the end, as suspended ones do
        self._last = -1  # the epoch of the last part
        self.kinds: Counter[str] = Counter()

    def go(self, points: int) -> None:
        """Train, killed ``points`` times. Raises ``AssertionError`` if it is not exact."""
        try:
            states: list[State] | None = None
            place = self._place()
            for _ in range(points):
                states = self._part(place, states, kill=True)
                place = self._moved(place)
            self._part(place, states, kill=False)
            self._check()
        finally:
            for consumer in self._consumers:
                consumer.close()
            gc.collect()
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- one part -----------------------------------------------------------------------------------------------------

    def _place(self) -> Place:
        if self._keeps_place:
            return Place(1, 6, 0)
        workers = self._chance.choice([1, 2]) if self._chance.random() < self._in_workers else 0
        return Place(self._chance.choice([1, 1, 2, 3, 5]), self._chance.choice([1, 3, 4, 7, 10]), workers)

    def _moved(self, place: Place) -> Place:
        return place if self._chance.random() < 0.3 else self._place()

    def _part(self, place: Place, states: list[State] | None, *, kill: bool) -> list[State] | None:
        """Read from the states on, to the end or to a kill; return the states that were saved last."""
        keeps = states is not None and len(states) == place.world_size and states[0]["batch_size"] == place.batch_size
        if states is not None and not keeps:
            states = [through_a_file(merge_states(states))] * place.world_size
            self.kinds["merged"] += 1
        batches = -(-SAMPLES // place.world_size // place.batch_size)
        stop = self._chance.randint(0, min(batches, 12)) if kill else None
        lag = self._chance.choice([0, 0, 1, 3])  # batches that the loop was given after the last checkpoint
        if kill and place.world_size == 1 and not place.workers and self._chance.random() < self._by_signal:
            parts = [self._killed_by_signal(place, states, stop or 0)]
        else:
            self.kinds[f"{place.workers} workers"] += 1
            parts = [self._rank(place, rank, states, stop, lag) for rank in range(place.world_size)]
        numbers, lengths = {part.epoch for part in parts}, {len(part.given) for part in parts}
        if len(numbers) != 1 or len(lengths) != 1:
            raise AssertionError(f"ranks are in epochs {numbers}, and were given {lengths} batches")
        self._count(place, states, numbers.pop(), [batch for part in parts for batch in part.given], keeps=keeps)
        return [part.state for part in parts]

    def _count(self, place: Place, states: list[State] | None, number: int, given: list[Batch], *, keeps: bool) -> None:
        """Count what the loops were given of an epoch, and how its rest was dealt."""
        epoch = self.epochs.setdefault(number, Epoch())
        if not keeps or number != self._last:
            epoch.deals.append((place, SAMPLES - len({key for keys in epoch.given for key in keys})))
        if states is not None and states[0]["epoch"] < number:
            # The state was of the end of an epoch; with drop_last, one of which too little was left for these ranks.
            self.epochs.setdefault(states[0]["epoch"], Epoch()).deals.append((place, 0))
        epoch.given += given
        self._last = number

    def _rank(self, place: Place, rank: int, states: list[State] | None, stop: int | None, lag: int) -> Part:
        """Read one rank's part; return its last checkpoint, and what the loop was given until then."""
        dataset = self._dataset()
        loader = self._loader(dataset, place, rank)
        if states is not None:
            loader.load_state_dict(states[rank])
        batches = iter(loader)
        number = loader.order.epoch
        given: list[Batch] = []
        for batch in itertools.islice(batches, stop):
            self._check_bytes(batch)
            given.append(batch["__key__"])
        state = through_a_file(loader.state_dict())
        for _ in itertools.islice(batches, lag if stop is not None else 0):
            pass  # lost: the loop was given it after the checkpoint
        self._abandon(loader, batches, dataset)
        return Part(number, state, given)

    def _dataset(self) -> Dataset:
        return Dataset(self._files.manifest, self._cache, fields=["__key__", self._blob])

    def _loader(self, dataset: Dataset, place: Place, rank: int) -> DataLoader:
        return DataLoader(
            dataset,
            place.batch_size,
            shuffle=True,
            num_workers=place.workers,
            drop_last=self._drop_last,
            substitute=self._substitute,
            prefetch_factor=self._chance.choice([1, 2, 5]),
            seed=self._seed,
            rank=rank,
            world_size=place.world_size,
            ledger=str(self._folder / "ledger") if self._keeps_place else None,
        )

    def _abandon(self, loader: DataLoader, batches: Any, dataset: Dataset) -> None:
        """Leave a loader in the middle of its prefetching; in half of the cases tell nobody."""
        if self._chance.random() < 0.5:
            loader.close()
        else:
            self._consumers.append(loader.order._consumer)
            loader.order._recorder._stop()  # as a killed process leaves the ledger: what is buffered is lost
        del batches, loader
        dataset.close()

    def _check_bytes(self, batch: dict[str, Any]) -> None:
        for key, data in zip(batch["__key__"], batch[self._blob], strict=True):
            if data != self._files.content[key]:
                raise AssertionError(f"wrong bytes of {key}")

    # -- kill -9 ------------------------------------------------------------------------------------------------------

    def _killed_by_signal(self, place: Place, states: list[State] | None, stop: int) -> Part:
        """Have a process train, and kill it with SIGKILL, at a batch or between two; return what it saved."""
        self.kinds["SIGKILL"] += 1
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=self._train, args=(there, place, states), daemon=True)
        child.start()
        there.close()
        number, state = here.recv()
        given: list[Batch] = []
        for _ in range(stop):
            state, keys = here.recv()
            if not keys:
                break
            given.append(keys)
        time.sleep(self._chance.random() * 0.004)  # so that it dies anywhere between two batches
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        while True:  # what it saved before it died counts
            try:
                state, keys = here.recv()
            except EOFError:
                break
            given += [keys] if keys else []
        here.close()
        child.close()
        return Part(number, state, given)

    def _train(self, out: Connection, place: Place, states: list[State] | None) -> None:
        """In the process that is killed: a message is a checkpoint together with what it covers, in one piece."""
        dataset = self._dataset()
        loader = self._loader(dataset, place, 0)
        if states is not None:
            loader.load_state_dict(states[0])
        batches = iter(loader)
        out.send((loader.order.epoch, loader.state_dict()))
        for batch in batches:
            self._check_bytes(batch)
            out.send((through_a_file(loader.state_dict()), batch["__key__"]))
        out.send((loader.state_dict(), []))
        time.sleep(60)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for number, epoch in self.epochs.items():
            self._check_epoch(number, epoch)
            if self._keeps_place:
                self._check_ledger(number, epoch)

    def _check_epoch(self, number: int, epoch: Epoch) -> None:
        counts = Counter(key for keys in epoch.given for key in keys)
        repeated, missing = counts.total() - len(counts), SAMPLES - len(counts)
        deals = epoch.deals
        if self._drop_last:
            most_repeated, most_missing = 0, sum(place.world_size * place.batch_size - 1 for place, _ in deals)
        else:
            most_repeated, most_missing = sum(-dealt % place.world_size for place, dealt in deals), 0
        told = f"epoch {number}, in deals {deals}: {missing} of {SAMPLES} never and {repeated} twice"
        if set(counts) - set(self._rows) or missing > most_missing or repeated > most_repeated:
            raise AssertionError(told)
        if len(deals) == 1:
            ((place, _),) = deals
            whole = SAMPLES // place.world_size // place.batch_size * place.batch_size * place.world_size
            if missing != (SAMPLES - whole if self._drop_last else 0) or repeated != most_repeated:
                raise AssertionError(told)

    def _check_ledger(self, number: int, epoch: Epoch) -> None:
        """The ledger replays what counted, in its order, whoever was killed."""
        dataset = self._dataset()
        order = self._loader(dataset, epoch.deals[0][0], 0).order
        replay = Replay(self._folder / "ledger", order._recorder._run)
        found = [
            self._manifest.key(row) for row in replay.order(number, order.deal, order._passes.layout).rows.tolist()
        ]
        order.close()
        dataset.close()
        if found != [key for keys in epoch.given for key in keys]:
            raise AssertionError(f"the ledger replays another order of {len(found)} samples")
        self.kinds["ledger replayed"] += 1


def through_a_file(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded


def attempt(files: Files, points: int, seed: int, *, in_workers: float = 0.03, by_signal: float = 0.15) -> Counts:
    """Run epochs until there were so many points. Prints each run that is not exact, with the seed that repeats it."""
    counts, number = Counts(), seed << 20
    while counts.points < points:
        many = min(random.Random(number).randint(1, 10), points - counts.points)
        run = Run(files, number, in_workers=in_workers, by_signal=by_signal)
        try:
            run.go(many)
            counts.exact += many
        except (AssertionError, ValueError) as error:
            print(f"run {number}, {many} points: {error}", flush=True)
        counts.points += many
        counts.kinds += run.kinds
        number += 1
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.resume", description=__doc__)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        counts = attempt(dataset_in(Path(folder)), asked.points, asked.seed)
    print(", ".join(f"{kind} {count:,}" for kind, count in counts.kinds.most_common()))
    print(f"{time.perf_counter() - began:.0f} s")
    print(f"{counts.exact:,} of {counts.points:,} exact")
    return 0 if counts.exact == counts.points else 1


if __name__ == "__main__":
    sys.exit(main())

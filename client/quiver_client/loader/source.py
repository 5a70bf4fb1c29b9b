"""What makes a loader's batches, in its threads and in its workers: reads the bytes, makes samples, collates them.

Invariant: what a random ``transform`` draws for a sample depends on (seed, epoch, sample) alone: not on the batch that
the sample is in, nor on the thread or process that makes it. A transform that takes ``rng`` has a generator per sample.
Others draw from global generators, which ``loader.randomness`` seeds for each sample while nobody else uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import blake3

from quiver.substitution import Ints
from quiver_client.collated_dataset import CollatedDataset
from quiver_client.failure import Named, annotate
from quiver_client.loaded import Loaded, made_one
from quiver_client.loader.epoch import Drawn
from quiver_client.loader.randomness import Randomness
from quiver_client.seeding import Seeds

Collate = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """A batch to make; a worker receives it through torch's index queue."""

    epoch: int
    rows: Ints  # (n,): as the dataset counts its samples
    epochs: Ints | None = None  # (n,): where the samples are of different epochs of their own


class Outcome:
    """What came of a batch: the samples that could be made, by their places in it, and the errors of the others."""

    __slots__ = ("batch", "errors", "samples")

    def __init__(self) -> None:
        self.samples: dict[int, Any] = {}
        self.errors: dict[int, Exception] = {}
        self.batch: Any = None  # collated, if there was no error


class Unmade:
    """A batch whose bytes are in memory, and whose samples are to be made in the training loop's thread."""

    def __init__(self, source: Source, loaded: Loaded, seeds: Seeds) -> None:
        self._source, self._loaded, self._seeds = source, loaded, seeds

    def make(self) -> Any:
        return self._source.made_alone(self._loaded, self._seeds)


class Source:
    """Makes batches of a dataset. Picklable: each worker has its own, and all threads share one."""

    def __init__(self, dataset: Any, collate: Collate, seed: int, *, by_columns: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self._seed = seed
        self._columns = CollatedDataset(dataset) if by_columns else None
        self.randomness = Randomness()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: Request) -> Any:
        """Make a batch in a worker, where no other thread draws from the global generators."""
        made = self.fetch(request)
        return made.make() if isinstance(made, Unmade) else made

    def fetch(self, request: Request) -> Any | Unmade:
        """Read a batch and make it, unless it has to be made in the training loop's thread.

        Most transforms draw nothing from the global generators, and then nothing is seeded.
        """
        if self._columns is not None:
            return self._columns.__getitems__(request.rows)  # type: ignore[arg-type]
        if not hasattr(self.dataset, "load"):
            return self.collate(self.dataset.__getitems__(request.rows.tolist()))
        loaded: Loaded = self.dataset.load(request.rows)
        seeds = loaded.seeds(self._seed, request.epoch if request.epochs is None else request.epochs)
        if not self.randomness.is_seeded:
            outcome, is_trusted = self.randomness.attempt(lambda: self._attempted(loaded, seeds))
            if is_trusted:
                return self._result(loaded, outcome)
        if self.randomness.is_for_loop:
            return Unmade(self, loaded, seeds)
        return self.made_alone(loaded, seeds)

    def made_alone(self, loaded: Loaded, seeds: Seeds) -> Any:
        """Make a batch whose samples draw from the global generators, each seeded."""
        outcome = Outcome()
        with self.randomness.alone() as turn:
            for at, make in enumerate(loaded.makers(seeds)):
                turn.seed(int(seeds[at]))
                if not self._make(loaded, at, make, outcome):
                    break
            if not outcome.errors:
                turn.seed(int.from_bytes(blake3.blake3(seeds.tobytes()).digest(8), "little"))
                self._collate(loaded, outcome)
        return self._result(loaded, outcome)

    def _attempted(self, loaded: Loaded, seeds: Seeds) -> Outcome:
        outcome = Outcome()
        together = loaded.together()
        if together is not None:
            try:
                outcome.samples = dict(enumerate(together()))
            except Exception as error:  # noqa: BLE001 - raised by _result
                annotate(error, *_names(loaded))
                outcome.errors[0] = error
        else:
            for at, make in enumerate(loaded.makers(seeds)):
                if not self._make(loaded, at, make, outcome):
                    break
        if not outcome.errors:
            self._collate(loaded, outcome)
        return outcome

    def _make(self, loaded: Loaded, at: int, make: Callable[[], Any], outcome: Outcome) -> bool:
        """Make one sample; return whether to go on."""
        try:
            outcome.samples[at] = made_one(loaded, at, make)
        except Exception as error:  # noqa: BLE001 - raised by _result
            outcome.errors[at] = error
            return False
        return True

    def _collate(self, loaded: Loaded, outcome: Outcome) -> None:
        try:
            outcome.batch = self.collate(list(outcome.samples.values()))
        except Exception as error:  # noqa: BLE001 - raised by _result
            annotate(error, *_names(loaded))
            outcome.errors[0] = error

    def _result(self, loaded: Loaded, outcome: Outcome) -> Any:
        for error in outcome.errors.values():
            raise error
        return outcome.batch


def _names(loaded: Loaded) -> tuple[list[Named], int]:
    return [loaded.named(at) for at in range(min(len(loaded), 3))], len(loaded)


class ThreadedSource:
    """A source as the threads of one pass use it, and the training loop's thread."""

    def __init__(self, source: Source, epoch: int, finish: Callable[[Any], Any], took: Callable[[float], None]) -> None:
        """``finish`` is applied to each batch, in the thread that made it: it pins memory; ``took`` to the seconds that
        it took to read and make the batch."""
        self._source, self._epoch, self._finish, self._took = source, epoch, finish, took
        source.randomness.has_loop = True

    def fetch(self, drawn: Drawn) -> Any:
        begun = time.monotonic()
        made = self._source.fetch(Request(self._epoch, drawn.rows, drawn.epochs))
        self._took(time.monotonic() - begun)
        return made if isinstance(made, Unmade) else self._finish(made)

    def asked(self) -> None:
        """The loop's thread waits for a batch."""
        self._source.randomness.loop_asks()

    def received(self, made: Any) -> Any:
        """Return the batch to hand to the loop, in whose thread this is called."""
        if isinstance(made, Unmade):
            made = self._finish(made.make())
        self._source.randomness.loop_left()
        return made

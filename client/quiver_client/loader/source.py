"""What makes a loader's batches, in its threads and in its workers: reads the bytes, makes samples, collates them.

Invariant: what a random ``transform`` draws for a sample depends on (seed, epoch, sample) alone: not on the batch that
the sample is in, nor on the thread or process that makes it. A transform that takes ``rng`` has a generator per sample.
Others draw from global generators, which ``loader.randomness`` seeds for each sample while nobody else uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import blake3

from quiver.errors import Changed, NotFound
from quiver.substitution import Ints
from quiver_client.collated_dataset import CollatedDataset
from quiver_client.failure import Named, annotate
from quiver_client.loaded import Loaded, made_one, made_singly
from quiver_client.loader.bad_samples import BadSample, Incomplete, is_bad_sample
from quiver_client.loader.epoch import Drawn
from quiver_client.loader.making import Making, WorkerRows
from quiver_client.loader.randomness import Randomness, Turn
from quiver_client.read_clock import Stopwatch, past_the_cache
from quiver_client.seeding import Seeds

Collate = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """A batch to make; a worker receives it through torch's index queue."""

    epoch: int
    rows: Ints  # (n,): as the dataset counts its samples
    epochs: Ints | None = None  # (n,): where the samples are of different epochs of their own
    is_probe: bool = False  # read it past the cache, to measure a miss


class Outcome:
    """What came of a batch: the samples that could be made, by their places in it, and the errors of the others."""

    __slots__ = ("batch", "errors", "failed", "samples")

    def __init__(self) -> None:
        self.samples: dict[int, Any] = {}
        self.errors: dict[int, Exception] = {}
        self.failed: Exception | None = None  # an error that is none of a single sample
        self.batch: Any = None  # collated, if there was no error


class Unmade:
    """A batch whose bytes are in memory, and whose samples are to be made in the training loop's thread."""

    def __init__(self, source: Source, request: Request, loaded: Loaded, seeds: Seeds, *, is_check: bool) -> None:
        self._source, self._request, self._loaded, self._seeds = source, request, loaded, seeds
        self._is_check = is_check

    def make(self) -> Any:
        return self._source.made_seeded(self._request, self._loaded, self._seeds, is_check=self._is_check)


class Source:
    """Makes batches of a dataset. Picklable: each worker has its own, and all threads share one.

    ``is_tolerant``: a batch of which some samples are bad is returned as ``Incomplete``; else their error is raised.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, *, by_columns: bool, is_tolerant: bool) -> None:
        self.dataset = dataset
        self.collate = collate
        self._seed = seed
        self._columns = CollatedDataset(dataset) if by_columns else None
        self._is_tolerant = is_tolerant
        self.randomness = Randomness()
        self.rows: WorkerRows | None = None  # where workers say what their batches cost

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: Request) -> Any:
        """Make a batch in a worker, where no other thread draws from the global generators."""
        watch = Stopwatch(is_probe=request.is_probe)
        made = self.fetch(request)
        made = made.make() if isinstance(made, Unmade) else made
        if self.rows is not None:
            self.rows.add(watch.stop())
        return made

    def fetch(self, request: Request) -> Any | Unmade:
        """Read a batch and make it, unless it has to be made in the training loop's thread.

        Most transforms draw nothing from the global generators, and then nothing is seeded.
        """
        with past_the_cache(request.is_probe):
            return self._fetched(request)

    def _fetched(self, request: Request) -> Any | Unmade:
        if self._columns is not None:
            return self._by_columns(request, self._columns)
        if not hasattr(self.dataset, "load"):
            return self.collate(self.dataset.__getitems__(request.rows.tolist()))
        loaded, seeds = self._loaded(request)
        with self.randomness.probe() as is_probe:
            if is_probe:
                return self.made_seeded(request, loaded, seeds, is_check=False)
        is_check = not self.randomness.is_used
        if is_check:
            outcome, is_trusted = self.randomness.attempt(lambda: self._attempted(loaded, seeds))
            if is_trusted:
                return self._result(request, loaded, outcome)
        if self.randomness.is_for_loop:
            return Unmade(self, request, loaded, seeds, is_check=is_check)
        return self.made_seeded(request, loaded, seeds, is_check=is_check)

    def made_seeded(self, request: Request, loaded: Loaded, seeds: Seeds, *, is_check: bool) -> Any:
        """Make a batch whose samples draw from the global generators, or that is made to find out whether they do.

        ``is_check``: it was made before, and a generator changed meanwhile.
        """
        outcome = Outcome()
        with self.randomness.alone() as turn:
            of_batch = int.from_bytes(blake3.blake3(seeds.tobytes()).digest(8), "little")
            if not self.randomness.is_used and loaded.together() is not None:
                turn.seed(of_batch)
                outcome = self._attempted(loaded, seeds)
            if (outcome.failed is None and not outcome.samples) or turn.draws():  # each sample by itself
                outcome = Outcome()
                self._seeded(loaded, seeds, outcome, turn)
                turn.seed(of_batch)
                self._collate(loaded, outcome)
        self.randomness.found(drawn=turn.has_drawn, is_check=is_check)
        return self._result(request, loaded, outcome)

    # -- bad samples, in the training loop's thread -------------------------------------------------------------------

    def remade(self, epoch: int, rows: Ints) -> Incomplete:
        """Make the samples that replace bad ones; they may be bad as well."""
        request = Request(epoch, rows)
        loaded, seeds = self._loaded(request)
        if self._columns is not None:
            return Incomplete(rows, None, _bad(loaded, _lost(loaded)))
        outcome = Outcome()
        with self.randomness.alone() as turn:
            self._seeded(loaded, seeds, outcome, turn)
        if outcome.failed is not None:
            raise outcome.failed
        return Incomplete(rows, list(outcome.samples.values()), _bad(loaded, outcome.errors))

    def completed(self, epoch: int, rows: Ints, samples: list[Any] | None) -> Any:
        """Collate good samples, or read them as columns."""
        if samples is None:
            assert self._columns is not None
            return self._columns.__getitems__(rows)  # type: ignore[arg-type]
        with self.randomness.alone() as turn:
            turn.seed(int.from_bytes(blake3.blake3(rows.tobytes()).digest(7), "little") ^ self._seed ^ epoch)
            return self.collate(samples)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _loaded(self, request: Request) -> tuple[Loaded, Seeds]:
        loaded: Loaded = self.dataset.load(request.rows, lose=self._is_tolerant)
        return loaded, loaded.seeds(self._seed, request.epoch if request.epochs is None else request.epochs)

    def _by_columns(self, request: Request, columns: CollatedDataset) -> Any:
        try:
            return columns.__getitems__(request.rows)  # type: ignore[arg-type]
        except (Changed, NotFound):
            if not self._is_tolerant:
                raise
        loaded, _ = self._loaded(request)
        return Incomplete(request.rows, None, _bad(loaded, _lost(loaded)))

    def _attempted(self, loaded: Loaded, seeds: Seeds) -> Outcome:
        outcome = Outcome()
        together = loaded.together()
        if together is not None:
            try:
                outcome.samples = dict(enumerate(together()))
            except Exception as error:  # noqa: BLE001 - raised by _result
                if not (self._is_tolerant and is_bad_sample(error)):
                    outcome.failed = _annotated(error, loaded)
                    return outcome
                together = None
        if together is None and not self._is_tolerant:
            try:
                outcome.samples = dict(enumerate(made_singly(loaded, seeds)))
            except Exception as error:  # noqa: BLE001 - raised by _result
                outcome.failed = error
        elif together is None:
            for at, make in enumerate(loaded.makers(seeds)):
                if not self._make(loaded, at, make, outcome):
                    break
        self._collate(loaded, outcome)
        return outcome

    def _seeded(self, loaded: Loaded, seeds: Seeds, outcome: Outcome, turn: Turn) -> None:
        for at, make in enumerate(loaded.makers(seeds)):
            turn.seed(int(seeds[at]))
            if not self._make(loaded, at, make, outcome):
                break

    def _make(self, loaded: Loaded, at: int, make: Callable[[], Any], outcome: Outcome) -> bool:
        """Make one sample; return whether to go on."""
        try:
            outcome.samples[at] = made_one(loaded, at, make)
        except Exception as error:  # noqa: BLE001 - raised by _result
            if not (self._is_tolerant and is_bad_sample(error)):
                outcome.failed = error
                return False
            outcome.errors[at] = error
        return True

    def _collate(self, loaded: Loaded, outcome: Outcome) -> None:
        if outcome.failed is not None or outcome.errors:
            return
        try:
            outcome.batch = self.collate(list(outcome.samples.values()))
        except Exception as error:  # noqa: BLE001 - raised by _result
            outcome.failed = _annotated(error, loaded)

    def _result(self, request: Request, loaded: Loaded, outcome: Outcome) -> Any:
        if outcome.failed is not None:
            raise outcome.failed
        if outcome.errors:
            return Incomplete(request.rows, list(outcome.samples.values()), _bad(loaded, outcome.errors))
        return outcome.batch


def _bad(loaded: Loaded, errors: Mapping[int, Exception]) -> list[BadSample]:
    return [BadSample.of(at, loaded.named(at), error) for at, error in errors.items()]


def _lost(loaded: Loaded) -> dict[int, Exception]:
    """Return the samples that the origin lost, by their places."""
    return dict(getattr(loaded, "lost", {}))


def _annotated(error: Exception, loaded: Loaded) -> Exception:
    annotate(error, *_names(loaded))
    return error


def _names(loaded: Loaded) -> tuple[list[Named], int]:
    return [loaded.named(at) for at in range(min(len(loaded), 3))], len(loaded)


class ThreadedSource:
    """A source as the threads of one pass use it, and the training loop's thread."""

    def __init__(
        self,
        source: Source,
        epoch: int,
        finish: Callable[[Any], Any],
        took: Callable[[float], None],
        making: Making,
        is_probe: Callable[[], bool],
    ) -> None:
        """``finish`` is applied to each batch, in the thread that made it: it pins memory; ``took`` to the seconds that
        it took to read and make the batch. ``is_probe`` says of the next batch whether to read it past the cache."""
        self._source, self._epoch, self._finish, self._took = source, epoch, finish, took
        self._making, self._is_probe = making, is_probe
        source.randomness.has_loop = True

    def fetch(self, drawn: Drawn) -> Any:
        request = Request(self._epoch, drawn.rows, drawn.epochs, self._is_probe())
        watch = Stopwatch(is_probe=request.is_probe)
        made = self._source.fetch(request)
        finished = made if isinstance(made, Unmade | Incomplete) else self._finish(made)
        cost = watch.stop()
        self._making.add(cost)
        self._took(cost.read_seconds + cost.making_seconds)
        return finished

    def asked(self) -> None:
        """The loop's thread waits for a batch."""
        self._source.randomness.loop_asks()

    def received(self, made: Any) -> Any:
        """Return the batch to hand to the loop, in whose thread this is called."""
        if isinstance(made, Unmade):
            begun = time.perf_counter()
            made = made.make()
            made = made if isinstance(made, Incomplete) else self._finish(made)
            self._making.here_seconds += time.perf_counter() - begun
        self._source.randomness.loop_left()
        return made

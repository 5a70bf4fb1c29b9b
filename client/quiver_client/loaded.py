"""A batch whose bytes are in memory and whose samples are yet to be made.

Reading and making are two steps, so that a loader may decide in which thread samples are made, make them again without
reading them again, and go on where one of them fails. Each sample is made by one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from quiver.errors import QuiverError
from quiver_client.failure import Named, annotate, failure
from quiver_client.seeding import Seeds, asked_for, generators, seeds_of

if TYPE_CHECKING:
    from quiver_client.batch import Batch
    from quiver_client.dataset import Dataset

Make = Callable[[], Any]
Rows = npt.NDArray[np.intp]


class Loaded(Protocol):
    """What ``load`` of a dataset returns for a batch of ``n`` samples; ``at`` counts from 0 to n - 1."""

    def __len__(self) -> int: ...

    def named(self, at: int) -> Named:
        """Return how to name a sample in messages."""
        ...

    def maker(self, at: int) -> tuple[str, tuple[type[Exception], ...]]:
        """Return what makes a sample, and which of its exceptions a loop would take for the end of the dataset."""
        ...

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any]) -> Seeds:
        """Return the seed ``(n,)`` of each sample, the same wherever the sample is read."""
        ...

    def makers(self, seeds: Seeds | None) -> Iterator[Make]:
        """Yield, for each sample, the call that makes it; each is called before the next one is taken.

        ``seeds``: for transforms that ask for a generator; ``None``: torch's default generator determines those.
        A sample that the origin lost raises when it is made.
        """
        ...

    def together(self) -> Callable[[], list[Any]] | None:
        """Return the call that makes all samples at once, if that is faster than one by one, else ``None``."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Samples of a ``Dataset`` that makes them by its fields and its ``transform``."""

    dataset: Dataset
    indices: Rows  # (n,) as the user counts
    rows: Rows  # (n,) of the manifest
    batch: Batch | None  # of the rows that are not lost
    lost: Mapping[int, QuiverError] = field(default_factory=dict)  # by place in the batch

    def __len__(self) -> int:
        return len(self.rows)

    def named(self, at: int) -> Named:
        return Named.of(self.dataset.manifest, int(self.indices[at]), int(self.rows[at]))

    def maker(self, at: int) -> tuple[str, tuple[type[Exception], ...]]:
        return "transform", (StopIteration, IndexError)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any]) -> Seeds:
        return seeds_of(seed, epochs, self.dataset.manifest.digest, self.rows)

    def makers(self, seeds: Seeds | None) -> Iterator[Make]:
        transform = self.dataset.transform
        names = asked_for(transform) if transform is not None else ()
        samples = self._samples()
        for at in range(len(self.rows)):
            if at in self.lost:
                yield partial(_raise, self.lost[at])
                continue
            sample = next(samples)
            if transform is None:
                yield partial(_same, sample)
            elif names:
                seed = None if seeds is None else int(seeds[at])
                yield partial(_with_generators, transform, names, seed, sample)
            else:
                yield partial(transform, sample)

    def together(self) -> Callable[[], list[Any]] | None:
        return None if self.dataset.transform is not None or self.lost else lambda: list(self._samples())

    def _samples(self) -> Iterator[Any]:
        rows = np.delete(self.rows, list(self.lost)) if self.lost else self.rows
        return self.dataset.raw_samples(rows, self.batch)


@dataclass(frozen=True, slots=True)
class LoadedByMethod:
    """Samples that a subclass makes by a ``__getitem__`` or ``__getitems__`` of its own, which read the bytes, too."""

    dataset: Dataset
    indices: Rows
    rows: Rows
    in_batches: bool  # the subclass overrides ``__getitems__``

    def __len__(self) -> int:
        return len(self.rows)

    def named(self, at: int) -> Named:
        return Named.of(self.dataset.manifest, int(self.indices[at]), int(self.rows[at]))

    def maker(self, at: int) -> tuple[str, tuple[type[Exception], ...]]:
        return f"{type(self.dataset).__name__}.__getitem__", (StopIteration,)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any]) -> Seeds:
        return seeds_of(seed, epochs, self.dataset.manifest.digest, self.rows)

    def makers(self, seeds: Seeds | None) -> Iterator[Make]:
        for index in self.indices.tolist():
            yield partial(self._one, index)

    def together(self) -> Callable[[], list[Any]] | None:
        return partial(self.dataset.__getitems__, self.indices.tolist()) if self.in_batches else None

    def _one(self, index: int) -> Any:
        return self.dataset.__getitems__([index])[0] if self.in_batches else self.dataset[index]


class Interleaved:
    """The samples of several datasets in the order of one batch."""

    def __init__(self, parts: Sequence[Loaded], which: npt.NDArray[Any], indices: npt.NDArray[Any]) -> None:
        """``which`` ``(n,)``: the part of each sample; those of one part come in its order. ``indices`` ``(n,)``: of
        the samples in the dataset that is made of the parts."""
        self._parts, self._which, self._indices = parts, which, indices
        self._at = np.zeros(len(which), np.intp)
        for part in range(len(parts)):
            mine = np.flatnonzero(which == part)
            self._at[mine] = np.arange(len(mine))

    def __len__(self) -> int:
        return len(self._which)

    def named(self, at: int) -> Named:
        named = self._parts[int(self._which[at])].named(int(self._at[at]))
        return replace(named, index=int(self._indices[at]))

    def maker(self, at: int) -> tuple[str, tuple[type[Exception], ...]]:
        return self._parts[int(self._which[at])].maker(int(self._at[at]))

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any]) -> Seeds:
        out = np.zeros(len(self), np.uint64)
        for part, loaded in enumerate(self._parts):
            mine = self._which == part
            out[mine] = loaded.seeds(seed, epochs if isinstance(epochs, int) else epochs[mine])
        return out

    def makers(self, seeds: Seeds | None) -> Iterator[Make]:
        each = [
            loaded.makers(None if seeds is None else seeds[self._which == part])
            for part, loaded in enumerate(self._parts)
        ]
        for part in self._which.tolist():
            yield next(each[part])

    def together(self) -> Callable[[], list[Any]] | None:
        return None


def made(loaded: Loaded, seeds: Seeds | None = None) -> list[Any]:
    """Make all samples. An exception carries the index and key of its sample; ``StopIteration`` and ``IndexError``,
    which a loop would take for the end of the dataset, become a ``RuntimeError`` that does."""
    together = loaded.together()
    if together is not None:
        return together()
    return made_singly(loaded, seeds)


def made_singly(loaded: Loaded, seeds: Seeds | None) -> list[Any]:
    """Make all samples, one by one; see ``made``."""
    out: list[Any] = []
    try:
        for make in loaded.makers(seeds):
            out.append(make())  # noqa: PERF401 - the length says which sample failed
    except Exception as error:
        _name(loaded, len(out), error)
        raise
    return out


def made_one(loaded: Loaded, at: int, make: Make) -> Any:
    """Make one sample; see ``made``."""
    try:
        return make()
    except Exception as error:
        _name(loaded, at, error)
        raise


def _name(loaded: Loaded, at: int, error: Exception) -> None:
    """Add a note that names the sample; raise another error for one that a loop would take for its end."""
    what, ends_loops = loaded.maker(at)
    if isinstance(error, ends_loops):
        raise failure(what, error, [loaded.named(at)]) from error
    annotate(error, [loaded.named(at)])


def _raise(error: QuiverError) -> Any:
    raise error


def _same(sample: Any) -> Any:
    return sample


def _with_generators(transform: Callable[..., Any], names: tuple[str, ...], seed: int | None, sample: Any) -> Any:
    return transform(sample, **generators(names, seed))

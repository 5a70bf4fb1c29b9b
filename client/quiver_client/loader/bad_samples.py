"""What a loader does about samples that cannot be made: ``on_error="skip"`` or ``"replace"``, up to ``errors_max``.

A worker or thread returns the good samples of such a batch uncollated, with the errors of the others. Here, in the
training loop's thread, the batch is completed: bad samples are counted and logged, replaced by pending ones of the
rank's share, and the batch is collated. It is rare, so it is not overlapped with the loop. Nothing is decided by where
or when a batch was made: replay, resume and other ranks see the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from math import floor
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from quiver.errors import Changed, NotFound, QuiverError
from quiver.substitution import Ints
from quiver_client.failure import Named
from quiver_client.loader.loop_rate import NOT_TIMED, LoopTurn

log = logging.getLogger("quiver_client")

POLICIES: Final = ("raise", "skip", "replace")
SHARE_MAX: Final = 0.001  # of an epoch's samples, where errors_max is not given


def is_bad_sample(error: BaseException) -> bool:
    """Whether an error says that the sample is bad, and not that the machine or a service fails."""
    if isinstance(error, QuiverError):
        return isinstance(error, Changed | NotFound)
    return isinstance(error, Exception) and not isinstance(error, MemoryError | torch.OutOfMemoryError)


class BadSample(NamedTuple):
    """A sample that could not be made. Plain values: workers send it, and any exception may not survive that."""

    place: int  # in its batch
    sample: Named
    error: str

    @classmethod
    def of(cls, place: int, sample: Named, error: BaseException) -> BadSample:
        said = str(error)
        return cls(place, sample, f"{type(error).__name__}: {said}" if said else type(error).__name__)

    def __str__(self) -> str:
        return f"{self.sample}: {self.error}"


class Incomplete:
    """A batch of which some samples could not be made. torch's loader passes it on as it is."""

    def __init__(self, rows: Ints, samples: list[Any] | None, bad: Sequence[BadSample]) -> None:
        """``rows``: all that were asked for; ``samples``: the good ones, ``None`` where they are made as columns."""
        self.rows, self.samples, self.bad = rows, samples, list(bad)

    @property
    def good(self) -> Ints:
        """The rows of the good samples."""
        return np.delete(self.rows, [each.place for each in self.bad])


class ErrorPolicy(NamedTuple):
    """``on_error`` and ``errors_max`` of a loader."""

    on_error: str = "raise"
    errors_max: float | None = None

    @classmethod
    def parsed(cls, on_error: Any, errors_max: Any) -> ErrorPolicy:
        """Raises ``ValueError`` naming the argument that is wrong."""
        if not isinstance(on_error, str) or on_error not in POLICIES:
            raise ValueError(f"on_error={on_error!r}: give 'raise', 'skip' or 'replace'")
        if errors_max is None:
            return cls(on_error)
        if on_error == "raise":
            raise ValueError("errors_max: with on_error='raise' the first error is raised; give 'skip' or 'replace'")
        most = errors_max.item() if isinstance(errors_max, np.generic) else errors_max
        if (type(most) is int and most >= 0) or (type(most) is float and 0 < most < 1):
            return cls(on_error, most)
        raise ValueError(
            f"errors_max={errors_max!r}: give a number of samples per epoch, or a fraction of them between 0 and 1"
        )

    @property
    def is_tolerant(self) -> bool:
        return self.on_error != "raise"

    def most(self, samples: int) -> int:
        """Return how many bad samples to tolerate of so many."""
        if self.errors_max is not None and self.errors_max == floor(self.errors_max):
            return floor(self.errors_max)
        return max(floor(samples * (SHARE_MAX if self.errors_max is None else self.errors_max)), 1)


class ErrorLog:
    """The bad samples of one loader: counted by epoch, each named once in the log."""

    def __init__(self, policy: ErrorPolicy) -> None:
        self._policy = policy
        self._logged: set[tuple[str, str]] = set()
        self._bad: list[BadSample] = []  # of this pass
        self._most = 0

    def begin(self, samples: int) -> None:
        """A pass over so many samples begins."""
        self._bad, self._most = [], self._policy.most(samples)

    def add(self, bad: Sequence[BadSample]) -> None:
        """Count bad samples. Raises ``RuntimeError`` with all names if they are more than are tolerated."""
        self._bad += bad
        verb = "left out" if self._policy.on_error == "skip" else "replaced"
        for each in bad:
            name = each.sample.dataset, each.sample.key
            if name not in self._logged:
                self._logged.add(name)
                log.warning("bad sample, %s: %s", verb, each)
        if len(self._bad) > self._most:
            named = "\n  ".join(map(str, self._bad))
            raise RuntimeError(
                f"errors_max={self._most}: {len(self._bad)} samples of this epoch cannot be made. Repair them, give a"
                f" larger errors_max, or find them all by `quiver verify --decode`:\n  {named}"
            )


class Remaking(Protocol):
    """What makes samples again: a ``Source``."""

    def remade(self, epoch: int, rows: Ints) -> Incomplete:
        """Make single samples; all of them may be bad."""
        ...

    def completed(self, epoch: int, rows: Ints, samples: list[Any] | None) -> Any:
        """Collate good samples."""
        ...


class Replacing(Protocol):
    """What replaces samples: an order of batches."""

    def replace(self, epoch: Any, number: int, failed: dict[int, int], wanted: int) -> Ints: ...
    def consumed(self, epoch: Any, number: int, turn: LoopTurn = NOT_TIMED) -> None: ...


class CompleteBatches:
    """Iterator over ``(number, batch)`` of one pass in which incomplete batches are completed."""

    def __init__(  # noqa: PLR0913 - what one pass consists of
        self,
        batches: Any,
        order: Replacing,
        epoch: Any,
        source: Remaking,
        errors: ErrorLog,
        *,
        replaces: bool,
        finish: Callable[[Any], Any],
    ) -> None:
        self._batches, self._order, self._epoch, self._source = batches, order, epoch, source
        self._errors, self._replaces, self._finish = errors, replaces, finish

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        while True:
            number, batch = next(self._batches)
            if not isinstance(batch, Incomplete):
                return number, batch
            rows, samples = self._complete(number, batch)
            if len(rows):
                return number, self._finish(self._source.completed(self._epoch.number, rows, samples))
            self._order.consumed(self._epoch, number)  # nothing of it is left, and nothing to replace it with

    def close(self, *, wait: bool = True) -> None:
        self._batches.close(wait=wait)

    def _complete(self, number: int, batch: Incomplete) -> tuple[Ints, list[Any] | None]:
        """Return the samples of the batch as it is handed out: the good ones, then those that replace bad ones."""
        rows, samples = batch.good, batch.samples
        before = 0  # candidates before those of ``batch``
        while batch.bad:
            self._errors.add(batch.bad)
            failed = {before + each.place: int(batch.rows[each.place]) for each in batch.bad}
            # Where nothing is left of a batch that may get shorter, one sample is added: no loop expects an empty one.
            wanted = len(failed) if self._replaces else int(not len(rows))
            added = self._order.replace(self._epoch, number, failed, wanted)
            before += len(batch.rows)
            if not len(added):
                break
            batch = self._source.remade(self._epoch.number, added)
            rows = np.concatenate([rows, batch.good])
            samples = None if samples is None or batch.samples is None else [*samples, *batch.samples]
        return rows, samples

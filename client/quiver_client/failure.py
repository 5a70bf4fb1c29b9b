"""Which samples an exception is about: the note that it carries, and the error that replaces one that ends loops.

Every exception that a transform, a subclass's ``__getitem__`` or a collate function raises keeps its type and carries
a note (PEP 678) with index, key and dataset. ``StopIteration`` ends a ``for`` loop silently, wherever below
``__next__`` it is raised, and ``IndexError`` ends a loop over an object that has only ``__getitem__``. If the user's
code raises one by mistake, the loop would lose all samples that follow; so it becomes a ``RuntimeError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quiver.manifest import Manifest

NAMED: Final = 3  # samples of a batch that a message names
MARK: Final = "quiver: "  # with which each of our notes begins


@dataclass(frozen=True, slots=True)
class Named:
    """A sample as a message names it."""

    index: int
    key: str
    dataset: str

    @classmethod
    def of(cls, manifest: Manifest, index: int, row: int) -> Named:
        count = len(manifest)  # a subclass may have more samples than its manifest
        return cls(index, manifest.key(row % count) if -count <= row < count else "", str(manifest.path))

    def __str__(self) -> str:
        return f"{self.index} ({self.key!r})"


def names_of(samples: Sequence[Named], count: int | None = None) -> str:
    """Return ``sample 3 ('a.jpg')`` or ``samples 3 ('a.jpg'), 7 ('b.jpg') and 2 more``; ``count``: of all samples."""
    count = len(samples) if count is None else count
    more = f" and {count - NAMED} more" if count > NAMED else ""
    return f"sample{'s' * (count > 1)} {', '.join(map(str, samples[:NAMED]))}{more}"


def failure(what: str, error: BaseException, samples: Sequence[Named], count: int | None = None) -> RuntimeError:
    """Return the error to raise because ``what`` raised ``error`` while it made these samples."""
    said = f": {error}" if str(error) else ""
    return RuntimeError(
        f"{what} raised {type(error).__name__}{said}, for {names_of(samples, count)}."
        " A loop would take that for its end and lose the samples that follow; raise another exception"
    )


def annotate(error: BaseException, samples: Sequence[Named], count: int | None = None) -> None:
    """Add a note that names the samples, unless the error has one already.

    A note of an earlier sample is replaced: some programs raise one exception object again and again.
    """
    note = note_of(samples, count)
    notes = [each for each in getattr(error, "__notes__", []) if not str(each).startswith(MARK)]
    error.__notes__ = [*notes, note]


def note_of(samples: Sequence[Named], count: int | None = None) -> str:
    where = f" of {samples[0].dataset}" if samples else ""
    return f"{MARK}{names_of(samples, count)}{where}"

"""``Readable``: what a dataset of ours, a concatenation and a join have in common, and what the loader reads.

Each is a map-style torch dataset that reads a batch by ``__getitems__`` and knows its samples' ``placement``. Parts of
one are made here: a selection, a split and a slice are the same dataset with row numbers, so they need no
manifest of their own and read, check and transform samples as the whole does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import blake3
import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset as TorchDataset

from quiver_client.failure import Named
from quiver_client.fields import Feature
from quiver_client.loaded import Loaded
from quiver_client.placement import Placement
from quiver_client.seeding import Seeds
from quiver_client.selection import Chosen, Columns, Ints, chosen_rows, rows_in
from quiver_client.splitting import bounds_of, groups_of, split_groups, split_rows

if TYPE_CHECKING:
    from quiver_client.concatenated import Concatenated
    from quiver_client.iterable import IterableView

SELECTION: Final = b"quiver-selection-v1"


class Readable(TorchDataset[Any]):
    """A dataset that reads by the batch, of which parts can be selected. Samples are numbered from 0."""

    # -- what each kind has -------------------------------------------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``."""

    @abstractmethod
    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the samples at ``indices`` as one collated batch, by field. No transform is applied."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """64 hex digits that name these samples in this order: what states and ledgers are of."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """The names of a sample's fields, in order."""

    @property
    @abstractmethod
    def features(self) -> dict[str, Feature]:
        """The type of each field."""

    @property
    @abstractmethod
    def reads_bytes(self) -> bool:
        """Whether a sample has a byte field; without one, no shard is read."""

    @property
    @abstractmethod
    def can_collate(self) -> bool:
        """Whether no sample is processed alone, so that ``columns`` is what collating the samples would give."""

    @property
    @abstractmethod
    def scalars(self) -> Columns:
        """The scalar columns and the keys of these samples, for expressions and groups."""

    @abstractmethod
    def placement(self) -> Placement:
        """Return which samples of which manifests these are."""

    @abstractmethod
    def named(self, index: int) -> Named:
        """Return how messages name a sample."""

    @abstractmethod
    def load(self, indices: Sequence[int], *, lose: bool = False) -> Loaded:
        """Read the bytes of the samples at ``indices``, which are made of them later.

        ``lose``: a sample that the origin lost raises when it is made; else reading raises for the whole batch.
        """

    @abstractmethod
    def seeds(self, seed: int, epochs: int | npt.NDArray[Any], indices: Ints) -> Seeds:
        """Return the seeds of samples in epochs ``(n,)``, the same in each selection that has the sample."""

    @abstractmethod
    def _of(self, positions: Ints) -> Self:
        """Return the dataset of the samples at these positions, in this order."""

    @abstractmethod
    def close(self) -> None:
        """Close sockets, threads and maps. They open again when the dataset is used again."""

    def reading(self, fields: Sequence[str]) -> Readable:
        """Return this dataset without the other fields, where that saves reading them."""
        return self

    # -- parts --------------------------------------------------------------------------------------------------------

    def select(self, chosen: Chosen) -> Self:
        """Return the dataset of some of the samples: no manifest is made, and nothing is read.

        ``chosen`` is one of

        - row numbers ``(n,)``, in the order in which the selection has them: a list, a range, an array, a tensor.
          Negative ones count from the end. A row may be given more than once; the selection then has that sample more
          than once, and each time counts as a sample of its own.
        - a mask ``(len(dataset),)`` of booleans
        - an expression of ``pyarrow.compute`` over the scalar fields and ``"__key__"``, whether or not ``fields=`` has
          them: ``pc.field("label") == 3``, ``pc.starts_with(pc.field("__key__"), "train/")``. A sample for which it is
          null is not selected.

        A selection of a selection counts rows of the first. Raises ``ValueError`` for a mask of another length, an
        expression over fields that there are not or that is no condition, and if nothing is selected; ``IndexError``
        for a row out of range.
        """
        return self._of(chosen_rows(chosen, len(self), self.scalars))

    def split(self, *sizes: float, seed: int = 0, by: str | None = None) -> list[Self]:
        """Return disjoint parts, of samples chosen at random: ``train, valid = dataset.split(0.9, 0.1)``.

        ``sizes`` are fractions of the samples, at most 1 together, or numbers of samples; what they leave out is in no
        part. The parts are the same for the same ``seed`` in every process and version. ``by``: a scalar field (or
        ``"__key__"``) by whose values samples are kept together: all samples of one ``"user"``, say, are in one part,
        so the sizes are met only as nearly as the groups allow. Samples without a value are one group.
        In each part samples are in the order that they have here.

        Raises ``ValueError`` if the sizes are too large, if a part would be empty, or for an unknown field.
        """
        if isinstance(seed, bool) or not hasattr(seed, "__index__") or seed.__index__() < 0:
            raise ValueError(f"seed={seed!r}: give an integer of at least 0")
        count, seed = len(self), seed.__index__()
        ends = bounds_of(sizes, count)
        if by is None:
            parts = split_rows(count, ends, seed)
        else:
            scalars = self.scalars
            parts = split_groups(groups_of(scalars[scalars.checked("by", by)]), ends, seed)
        for size, rows in zip(sizes, parts, strict=True):
            if not len(rows):
                of = f"{count} samples" if by is None else f"{count} samples grouped by {by!r}"
                raise ValueError(f"split: the part of {size} of {of} would be empty; give larger parts")
        return [self._of(rows) for rows in parts]

    def __add__(self, other: TorchDataset[Any]) -> Concatenated:
        """Return the samples of this dataset and then those of ``other``, as a dataset that reads by the batch."""
        from quiver_client.concatenated import Concatenated

        return Concatenated([self, other])

    def iterable(self, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> IterableView:
        """Return these samples as a torch ``IterableDataset``. See ``quiver_client.iterable``."""
        from quiver_client.iterable import IterableView

        return IterableView(self, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def stats(self) -> dict[str, Any]:
        """Return the counters of this process, those of all datasets that are read together. See ``Dataset.stats``."""
        found = [leaf.stats() for leaf in self.placement().leaves]
        return {name: sum(each[name] for each in found) for name in found[0]}

    def checked(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return indices, negative ones too, as positions of ``len(self)`` samples. ``IndexError``, ``TypeError``."""
        return rows_in(np.asarray(indices), len(self))

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples, in order.

        Without this method Python would iterate by ``__getitem__`` until any ``IndexError``, even one of a transform.
        """
        for index in range(len(self)):
            yield self[index]


def identity_of_rows(whole: str, rows: Ints) -> str:
    """Return the identity of a selection of ``rows`` of the dataset ``whole``."""
    hasher = blake3.blake3(SELECTION + bytes.fromhex(whole))
    return hasher.update(np.ascontiguousarray(rows, "<i8").data.cast("B")).hexdigest()


def is_all(rows: Ints, count: int) -> bool:
    """Whether these rows are all ``count`` samples, in order: then a selection is the dataset itself."""
    return len(rows) == count and bool((rows == np.arange(count)).all())

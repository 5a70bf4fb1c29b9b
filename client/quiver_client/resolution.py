"""What a loader reads when it is given torch's ``Subset`` and ``ConcatDataset`` around datasets of ours.

``resolved`` turns any nest of them into a ``Readable``: a ``Subset`` into a selection, a ``ConcatDataset`` into a
``Concatenated``, so that batches are read by one plan, and the loader knows which shards still matter. A subclass that
overrides ``__getitem__`` or ``__getitems__`` is still called for every sample: then only where samples lie is resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torch.utils.data import Dataset as TorchDataset

from quiver_client.concatenated import Concatenated
from quiver_client.failure import Named
from quiver_client.fields import Feature
from quiver_client.loaded import Loaded, Make
from quiver_client.placement import Placement
from quiver_client.readable import Readable
from quiver_client.seeding import Seeds
from quiver_client.selection import Columns, Ints

KINDS = "a quiver_client.Dataset, or torch's Subset or ConcatDataset of such datasets"


def resolved(dataset: TorchDataset[Any]) -> Readable:
    """Return the dataset as one that the loader can read.

    Raises ``ValueError`` naming ``dataset`` for a dataset whose samples are not known to be ours.
    """
    if isinstance(dataset, Subset):
        return _of_subset(dataset)
    if isinstance(dataset, ConcatDataset):
        return _of_concatenation(dataset)
    if isinstance(dataset, Readable):
        return dataset
    hint = ""
    if isinstance(inside := getattr(dataset, "dataset", None), Readable):
        hint = (
            "; this loader decides the order: give it the dataset of the stream, not the stream"
            if isinstance(dataset, IterableDataset)
            else "; which samples its indices are is not known. Derive it from torch.utils.data.Subset, or give the"
            f" {type(inside).__name__} inside a transform="
        )
    raise ValueError(f"dataset: give {KINDS}, not {type(dataset).__name__}{hint}")


def _of_subset(subset: Subset[Any]) -> Readable:
    inner = resolved(subset.dataset)
    part = inner.select(np.asarray(subset.indices))
    if _overrides(subset, Subset) or _is_seen_inside(inner):
        return Wrapped(subset, part)
    return part


def _of_concatenation(whole: ConcatDataset[Any]) -> Readable:
    if isinstance(whole, Concatenated):
        parts = [resolved(each) for each in whole.datasets]
        overrides = _overrides(whole, Concatenated)
        if not overrides and all(part is each for part, each in zip(parts, whole.datasets, strict=True)):
            return whole
        made = Concatenated(parts)
        made = made if whole.rows is None else made.select(whole.rows)
        return Wrapped(whole, made) if overrides else made
    made = Concatenated([resolved(each) for each in whole.datasets])
    return Wrapped(whole, made) if _overrides(whole, ConcatDataset) else made


def _overrides(dataset: TorchDataset[Any], base: type) -> bool:
    """Whether a subclass makes samples itself."""
    kind: Any = type(dataset)
    return any(getattr(kind, name, None) is not getattr(base, name, None) for name in ("__getitem__", "__getitems__"))


def _is_seen_inside(dataset: Readable) -> bool:
    """Whether the user's code inside would see other indices if a selection were read in place of a ``Subset``."""
    from quiver_client.dataset import Dataset

    if isinstance(dataset, Wrapped):
        return True
    if isinstance(dataset, Concatenated):
        return _overrides(dataset, Concatenated) or any(_is_seen_inside(resolved(each)) for each in dataset.datasets)
    return isinstance(dataset, Dataset) and _overrides(dataset, Dataset)


class Wrapped(Readable):
    """The user's own dataset, whose samples are those of ``like``: read through it, and counted as ``like``."""

    def __init__(self, dataset: TorchDataset[Any], like: Readable) -> None:
        self.dataset, self._like = dataset, like

    def __len__(self) -> int:
        return len(self._like)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        read = getattr(self.dataset, "__getitems__", None)
        return cast("list[Any]", read(indices) if read is not None else [self.dataset[index] for index in indices])

    def __repr__(self) -> str:
        return f"{type(self.dataset).__name__}({self._like!r})"

    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        return self._like.columns(indices)

    @property
    def identity(self) -> str:
        return self._like.identity

    @property
    def fields(self) -> tuple[str, ...]:
        return self._like.fields

    @property
    def features(self) -> dict[str, Feature]:
        return self._like.features

    @property
    def reads_bytes(self) -> bool:
        return self._like.reads_bytes

    @property
    def can_collate(self) -> bool:
        return False

    def close(self) -> None:
        self._like.close()

    @property
    def scalars(self) -> Columns:
        return self._like.scalars

    def placement(self) -> Placement:
        return self._like.placement()

    def named(self, index: int) -> Named:
        return self._like.named(index)

    def load(self, indices: Sequence[int], *, lose: bool = False) -> Loaded:
        return LoadedThrough(self.dataset, self._like, self.checked(indices))

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any], indices: Ints) -> Seeds:
        return self._like.seeds(seed, epochs, indices)

    def _of(self, positions: Ints) -> Self:
        made = object.__new__(type(self))
        made.dataset, made._like = Subset(self.dataset, positions.tolist()), self._like.select(positions)
        return made


@dataclass(frozen=True, slots=True)
class LoadedThrough:
    """Samples that the user's own dataset makes, which reads the bytes, too."""

    dataset: TorchDataset[Any]
    like: Readable
    indices: Ints  # (n,)

    def __len__(self) -> int:
        return len(self.indices)

    def named(self, at: int) -> Named:
        return self.like.named(int(self.indices[at]))

    def maker(self, at: int) -> tuple[str, tuple[type[Exception], ...]]:
        return f"{type(self.dataset).__name__}.__getitem__", (StopIteration,)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any]) -> Seeds:
        return self.like.seeds(seed, epochs, self.indices)

    def makers(self, seeds: Seeds | None) -> Iterator[Make]:
        read = getattr(self.dataset, "__getitems__", None)
        for index in self.indices.tolist():
            yield partial(_first, read, index) if read is not None else partial(self.dataset.__getitem__, index)

    def together(self) -> Callable[[], list[Any]] | None:
        read = getattr(self.dataset, "__getitems__", None)
        return None if read is None else partial(read, self.indices.tolist())


def _first(read: Callable[[list[int]], Sequence[Any]], index: int) -> Any:
    return read([index])[0]

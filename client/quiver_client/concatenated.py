"""``Concatenated``: several datasets as one, the samples of one part after those of another.

torch's ``ConcatDataset`` has no ``__getitems__``, so a loader reads it sample by sample. This one reads each batch by
one plan, and one request per peer, for each part that it has samples of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Self, cast, overload

import blake3
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset
from torch.utils.data import Dataset as TorchDataset

from quiver_client.failure import Named
from quiver_client.fields import Feature
from quiver_client.loaded import Interleaved, Loaded
from quiver_client.placement import Placement
from quiver_client.readable import Readable, identity_of_rows, is_all
from quiver_client.seeding import Seeds
from quiver_client.selection import Columns, Ints, Rows

CONCATENATION: Final = b"quiver-concatenation-v1"


class Concatenated(ConcatDataset[Any], Readable):
    """The samples of several datasets, one dataset after another: ``Concatenated([a, b])`` or ``a + b``.

    The parts may have different manifests, caches, fields and transforms. ``DataLoader`` reads parts that are datasets,
    selections, joins or concatenations of Quiver's, and torch's ``Subset`` and ``ConcatDataset`` of such.
    """

    def __init__(self, datasets: Iterable[TorchDataset[Any]]) -> None:
        """Raises ``ValueError`` if there are none, or one is no map-style dataset."""
        datasets = list(datasets)
        if not datasets:
            raise ValueError("Concatenated: give at least one dataset")
        for each in datasets:
            if isinstance(each, torch.utils.data.IterableDataset) or not hasattr(each, "__len__"):
                raise ValueError(f"Concatenated: {type(each).__name__} is no map-style dataset with a length")
            if getattr(each, "is_mixture", False):
                raise ValueError("Concatenated: the weights of a Mix would be lost; give what is added as a part of it")
        super().__init__(datasets)
        self._rows: Rows | None = None

    def __len__(self) -> int:
        return self._whole if self._rows is None else len(self._rows.array)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.select(index)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``, read part by part."""
        rows = self._located(indices)
        out: list[Any] = [None] * len(rows)
        for part, positions in self._by_part(rows):
            samples = _read(self.datasets[part], rows[positions] - self._firsts[part])
            for position, sample in zip(positions.tolist(), samples, strict=True):
                out[position] = sample
        return out

    def __repr__(self) -> str:
        return f"Concatenated({len(self)} samples of {self.datasets})"

    @property
    def identity(self) -> str:
        parts = [_ours(each).identity for each in self.datasets]
        whole = blake3.blake3(CONCATENATION + bytes.fromhex("".join(parts))).hexdigest()
        return whole if self._rows is None else identity_of_rows(whole, self._rows.array)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of the first part's samples."""
        return _ours(self.datasets[0]).fields

    @property
    def features(self) -> dict[str, Feature]:
        """The types of the fields of the first part's samples."""
        return _ours(self.datasets[0]).features

    @property
    def reads_bytes(self) -> bool:
        return any(_ours(each).reads_bytes for each in self.datasets)

    @property
    def rows(self) -> Ints | None:
        """The rows ``(n,)`` of all parts together that are selected; ``None`` for all."""
        return None if self._rows is None else self._rows.array

    @property
    def can_collate(self) -> bool:
        parts = self.datasets
        alike = all(isinstance(each, Readable) and each.can_collate for each in parts)
        return alike and len({cast(Any, each).fields for each in parts}) == 1

    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        rows = self._located(indices)
        found = [
            (positions, _ours(self.datasets[part]).columns((rows[positions] - self._firsts[part]).tolist()))
            for part, positions in self._by_part(rows)
        ]
        names = found[0][1] if found else ()
        return {name: _merged([(positions, each[name]) for positions, each in found], len(rows)) for name in names}

    @property
    def scalars(self) -> Columns:
        parts = [_ours(each).scalars for each in self.datasets]
        names = [name for name in parts[0].names[:-1] if all(name in each.names for each in parts)]
        others = dict.fromkeys(name for each in parts for name in (*each.names[:-1], *each.others) if name not in names)
        return Columns(names, tuple(others), lambda name: self._column([each[name] for each in parts]))

    def named(self, index: int) -> Named:
        row = int(self._located([index])[0])
        part = int(np.searchsorted(self.cumulative_sizes, row, "right"))
        return replace(_ours(self.datasets[part]).named(row - self._firsts[part]), index=index)

    def load(self, indices: Sequence[int], *, lose: bool = False) -> Loaded:
        positions = self.checked(indices)
        rows = positions if self._rows is None else self._rows.array[positions]
        parts, which = [], np.zeros(len(rows), np.intp)
        for number, (part, at) in enumerate(self._by_part(rows)):
            parts.append(_ours(self.datasets[part]).load((rows[at] - self._firsts[part]).tolist(), lose=lose))
            which[at] = number
        return Interleaved(parts, which, positions)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any], indices: Ints) -> Seeds:
        rows, seeds = self._located(indices.tolist()), np.zeros(len(indices), np.uint64)
        for part, at in self._by_part(rows):
            each = epochs if isinstance(epochs, int) else epochs[at]
            seeds[at] = _ours(self.datasets[part]).seeds(seed, each, rows[at] - self._firsts[part])
        return seeds

    def placement(self) -> Placement:
        whole = Placement.concatenated([_ours(each).placement() for each in self.datasets])
        return whole if self._rows is None else whole.take(self._rows.array)

    def close(self) -> None:
        """Close all parts. They open again when they are used again."""
        for each in self.datasets:
            cast(Callable[[], None], getattr(each, "close", lambda: None))()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _whole(self) -> int:
        return self.cumulative_sizes[-1]

    @property
    def _firsts(self) -> list[int]:
        return [0, *self.cumulative_sizes[:-1]]

    def _located(self, indices: Sequence[int]) -> Ints:
        positions = self.checked(indices)
        return positions if self._rows is None else self._rows.array[positions]

    def _by_part(self, rows: Ints) -> list[tuple[int, Ints]]:
        """Return the parts that have some of these rows, each with their positions."""
        part_of = np.searchsorted(self.cumulative_sizes, rows, "right")
        return [(int(part), np.flatnonzero(part_of == part)) for part in np.unique(part_of)]

    def _of(self, positions: Ints) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        rows = positions if self._rows is None else self._rows.array[positions]
        made._rows = None if is_all(rows, self._whole) else Rows(rows)
        return made

    def _column(self, parts: list[Any]) -> Any:
        import pyarrow as pa

        types = {each.type for each in parts}
        if len(types) > 1:  # of an integer and a float column, say
            unified = (
                pa.unify_schemas([pa.schema([("c", each)]) for each in types], promote_options="permissive")
                .field(0)
                .type
            )
            parts = [each.cast(unified) for each in parts]
        whole = pa.chunked_array([chunk for each in parts for chunk in each.chunks])
        return whole if self._rows is None else whole.take(pa.array(self._rows.array))


def _read(dataset: TorchDataset[Any], rows: Ints) -> Sequence[Any]:
    """Return samples of a part, by one call where it reads by the batch."""
    indices = rows.tolist()
    read = getattr(dataset, "__getitems__", None)
    return cast("Sequence[Any]", read(indices) if read is not None else [dataset[index] for index in indices])


def _ours(dataset: TorchDataset[Any]) -> Readable:
    from quiver_client.resolution import resolved

    return resolved(dataset)


def _merged(parts: list[tuple[Ints, Any]], count: int) -> Any:
    """Return one column of ``count`` samples, given in parts: one tensor if each part has one, of one shape."""
    if len(parts) == 1:
        return parts[0][1]
    values = [values for _, values in parts]
    if all(isinstance(each, torch.Tensor) for each in values) and len({each.shape[1:] for each in values}) == 1:
        dtype = values[0].dtype
        for each in values[1:]:
            dtype = torch.promote_types(dtype, each.dtype)
        merged = torch.empty((count, *values[0].shape[1:]), dtype=dtype)
        for positions, each in parts:
            merged[torch.from_numpy(positions)] = each.to(dtype)
        return merged
    out: list[Any] = [None] * count
    for positions, each in parts:
        for position, value in zip(positions.tolist(), each, strict=True):
            out[position] = value
    return out

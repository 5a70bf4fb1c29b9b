"""``Joined``: fields of several datasets about the same samples, read side by side; nothing is copied.

Invariant: sample i of each part is about the same thing, since each part is a selection in one common order. Keys are
matched once, by Arrow's hash tables over the columns of the manifests, without a Python step per sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Self, get_args, overload

import blake3
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch.utils.data import Dataset as TorchDataset

from quiver.manifest import KEY_FIELD
from quiver_client.failure import Named
from quiver_client.fields import Feature, Sample
from quiver_client.loaded import Loaded, Make, made
from quiver_client.placement import Placement
from quiver_client.readable import Readable
from quiver_client.seeding import Seeds, asked_for, generators
from quiver_client.selection import Columns, Ints

log = logging.getLogger("quiver_client")

JOIN: Final = b"quiver-join-v1"
NAMED: Final = 3  # keys that a message names
How = Literal["inner", "strict"]
Transform = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the joined datasets, and under which names its fields are in a joined sample."""

    dataset: Readable
    names: Mapping[str, str]  # by the part's own name; fields that are not in it are left out

    def renamed(self, sample: Any) -> Mapping[str, Any]:
        if not isinstance(sample, Mapping):
            raise TypeError(f"join: the transform of {self.dataset!r} must return a dictionary, not {type(sample)}")
        return {self.names.get(name, name): value for name, value in sample.items() if self._has(name)}

    def _has(self, name: str) -> bool:
        return name in self.names or name not in self.dataset.fields  # a transform may add fields


class Joined(Readable):
    """Samples with the fields of several datasets. Made by ``Dataset.join``, which describes the arguments."""

    def __init__(self, parts: Sequence[Part], transform: Transform | None) -> None:
        """``parts``: datasets of one length, of which sample i is about the same thing."""
        self._parts, self._transform = tuple(parts), transform

    def __len__(self) -> int:
        return len(self._parts[0].dataset)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.select(index) if isinstance(index, slice) else self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``: one plan, and one request per peer, for each part."""
        return made(self.load(indices)) if len(indices) else []

    def __repr__(self) -> str:
        return f"Joined({len(self)} samples of {[part.dataset for part in self._parts]})"

    @property
    def parts(self) -> tuple[Readable, ...]:
        """The joined datasets, each as the selection whose sample i is this dataset's."""
        return tuple(part.dataset for part in self._parts)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of a sample's fields, in order."""
        return tuple(name for part in self._parts for name in part.names.values())

    @property
    def features(self) -> dict[str, Feature]:
        """The type of each field; see ``Dataset.features``."""
        return {
            new: part.dataset.features[name]
            for part in self._parts
            for name, new in part.names.items()
            if name in part.dataset.features
        }

    @property
    def transform(self) -> Transform | None:
        return self._transform

    @property
    def identity(self) -> str:
        parts = "".join(part.dataset.identity for part in self._parts)
        return blake3.blake3(JOIN + bytes.fromhex(parts)).hexdigest()

    @property
    def can_collate(self) -> bool:
        return self._transform is None and all(part.dataset.can_collate for part in self._parts)

    @property
    def reads_bytes(self) -> bool:
        return any(part.dataset.reads_bytes for part in self._parts)

    @property
    def scalars(self) -> Columns:
        columns = [part.dataset.scalars for part in self._parts]
        homes: dict[str, tuple[int, str]] = {}
        others: dict[str, None] = {}
        for number, part in enumerate(self._parts):
            for name in columns[number].names[:-1]:
                homes.setdefault(part.names.get(name, name), (number, name))
            others |= dict.fromkeys(part.names.get(name, name) for name in columns[number].others)
        homes[KEY_FIELD] = 0, KEY_FIELD
        names = [name for name in homes if name != KEY_FIELD]
        return Columns(names, tuple(others), lambda name: columns[homes[name][0]][homes[name][1]])

    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in self._parts:
            columns = part.dataset.columns(indices)
            found |= {new: columns[name] for name, new in part.names.items()}
        return found

    def placement(self) -> Placement:
        """Return where the samples lie: in first place the part that has most bytes, by which they count as resident.

        Parts of which no byte is read need no shard.
        """
        read = [part.dataset.placement() for part in self._parts if part.dataset.reads_bytes]
        if not read:
            return self._parts[0].dataset.placement()
        main = max(range(len(read)), key=lambda number: read[number].bytes)
        return Placement.joined(read[main], [*read[:main], *read[main + 1 :]])

    def named(self, index: int) -> Named:
        return self._parts[0].dataset.named(index)

    def load(self, indices: Sequence[int], *, lose: bool = False) -> Loaded:
        positions = self.checked(indices)
        parts = [part.dataset.load(positions.tolist(), lose=lose) for part in self._parts]
        return LoadedJoin(parts, self._parts, self._transform)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any], indices: Ints) -> Seeds:
        return self._parts[0].dataset.seeds(seed, epochs, indices)

    def close(self) -> None:
        for part in self._parts:
            part.dataset.close()

    def _of(self, positions: Ints) -> Self:
        made_of = object.__new__(type(self))
        parts = tuple(Part(part.dataset.select(positions), part.names) for part in self._parts)
        made_of.__dict__.update(self.__dict__, _parts=parts)
        return made_of


@dataclass(frozen=True, slots=True)
class LoadedJoin:
    """A batch of joined samples, of which each part was read."""

    loaded: Sequence[Loaded]
    parts: Sequence[Part]
    transform: Transform | None

    def __len__(self) -> int:
        return len(self.loaded[0])

    def named(self, at: int) -> Named:
        return self.loaded[0].named(at)

    def maker(self, at: int) -> tuple[str, tuple[type[Exception], ...]]:
        return "transform", (StopIteration, IndexError)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any]) -> Seeds:
        return self.loaded[0].seeds(seed, epochs)

    def makers(self, seeds: Seeds | None) -> Iterator[Make]:
        names = asked_for(self.transform) if self.transform is not None else ()
        makers = [loaded.makers(seeds) for loaded in self.loaded]
        for at in range(len(self)):
            yield partial(self._one, [next(each) for each in makers], names, None if seeds is None else int(seeds[at]))

    def together(self) -> Callable[[], list[Any]] | None:
        each = [loaded.together() for loaded in self.loaded]
        if self.transform is not None or any(one is None for one in each):
            return None
        return lambda: [self._merged(samples) for samples in zip(*(one() for one in each if one), strict=True)]

    def _one(self, makes: Sequence[Make], names: tuple[str, ...], seed: int | None) -> Any:
        sample = self._merged([make() for make in makes])
        return sample if self.transform is None else self.transform(sample, **generators(names, seed))

    def _merged(self, samples: Sequence[Any]) -> Sample:
        merged: Sample = {}
        for part, sample in zip(self.parts, samples, strict=True):
            renamed = part.renamed(sample)
            twice = merged.keys() & renamed.keys()
            if twice:
                raise ValueError(f"join: {min(twice)!r} is a field of two parts, as a transform made it; rename one")
            merged |= renamed
        return merged


def join(
    datasets: Sequence[TorchDataset[Any]],
    on: str,
    how: How,
    suffixes: Sequence[str] | None,
    fields: Sequence[str] | None,
    transform: Transform | None,
) -> Joined:
    """Join datasets; see ``Dataset.join``."""
    from quiver_client.resolution import resolved

    if len(datasets) < 2:
        raise ValueError("join: give at least two datasets: Dataset.join(images, captions)")
    if how not in get_args(How):
        raise ValueError(f"how={how!r}: choose inner or strict")
    parts = [resolved(each) for each in datasets]
    keys = [_keys(part, on, number) for number, part in enumerate(parts)]
    names = _chosen(_names([part.fields for part in parts], on, suffixes), fields)
    rows = matched(keys, on, strict=how == "strict")
    aligned = [part.select(each) for part, each in zip(parts, rows, strict=True)]
    joined = [Part(part.reading(list(own)), own) for part, own in zip(aligned, names, strict=True) if own]
    return Joined(joined, transform)


def matched(keys: Sequence[pa.Array[Any]], on: str, *, strict: bool) -> list[Ints]:
    """Return, for each array of keys, the rows ``(n,)`` of the keys that are in all of them, in the order of the first.

    Raises ``ValueError`` for keys that are there twice, of types that cannot be compared, or if no key is in all; if
    ``strict``, also for a key that is missing somewhere. Otherwise missing keys are counted in a warning of the log.
    """
    import pyarrow.compute as pc

    keys = _of_one_type(keys, on)
    for number, each in enumerate(keys):
        _check_distinct(each, on, number)
    found = [np.arange(len(keys[0]), dtype=np.int64)]
    kept = keys[0].is_valid().to_numpy(zero_copy_only=False)
    for each in keys[1:]:
        at = pc.index_in(keys[0], value_set=each, skip_nulls=True)
        found.append(at.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64))
        kept = kept & (found[-1] >= 0)
    rows = [each[kept] for each in found]
    missing = []
    for number, (each, own) in enumerate(zip(keys, rows, strict=True)):
        lost = np.ones(len(each), bool)
        lost[own] = False
        if lost.any():
            some = ", ".join(repr(key) for key in each.take(np.flatnonzero(lost)[:NAMED]).to_pylist())
            more = ", …" if np.count_nonzero(lost) > NAMED else ""
            missing.append(f"{np.count_nonzero(lost)} of {len(each)} samples of dataset {number + 1} ({some}{more})")
    if missing:
        what = f"join: by {on!r}, not in every dataset are " + "; ".join(missing)
        if strict or not len(rows[0]):
            hint = "" if strict else ". No sample is in all: are these the same keys?"
            raise ValueError(what + hint)
        log.warning("%s. They are left out (how='strict' raises)", what)
    return rows


def _keys(part: Readable, on: str, number: int) -> pa.Array[Any]:
    columns = part.scalars
    try:
        column = columns[columns.checked("on", on)]
    except ValueError as error:
        raise ValueError(f"{error} (in dataset {number + 1})") from error
    return column.combine_chunks()


def _of_one_type(keys: Sequence[pa.Array[Any]], on: str) -> list[pa.Array[Any]]:
    types = [each.type for each in keys]
    if len(set(types)) == 1:
        return list(keys)
    try:
        unified = pa.unify_schemas([pa.schema([(on, each)]) for each in types], promote_options="permissive")
        return [each.cast(unified.field(0).type) for each in keys]
    except pa.ArrowException as error:
        told = ", ".join(map(str, types))
        raise ValueError(f"on={on!r}: its types in the datasets cannot be compared: {told}") from error


def _check_distinct(keys: pa.Array[Any], on: str, number: int) -> None:
    import pyarrow.compute as pc

    first = pc.index_in(keys, value_set=keys, skip_nulls=True).fill_null(-1).to_numpy(zero_copy_only=False)
    again = np.flatnonzero((first >= 0) & (first != np.arange(len(keys))))
    if len(again):
        some = ", ".join(repr(key) for key in keys.take(again[:NAMED]).to_pylist())
        more = ", …" if len(again) > NAMED else ""
        raise ValueError(
            f"join: {len(again)} samples of dataset {number + 1} have a {on!r} that another one has ({some}{more});"
            " each may be there once. Select one of each first"
        )


def _names(fields: Sequence[Sequence[str]], on: str, suffixes: Sequence[str] | None) -> list[dict[str, str]]:
    """Return for each dataset its fields, each with its name in a joined sample.

    What the join is on, and the key, are the first dataset's that has them.
    """
    if suffixes is not None and (isinstance(suffixes, str) or len(suffixes) != len(fields)):
        raise ValueError(f"suffixes={suffixes!r}: give one for each of {len(fields)} datasets")
    shared = (on, KEY_FIELD)
    times: dict[str, int] = {}
    for name in (name for own in fields for name in own):
        times[name] = times.get(name, 0) + 1
    twice = [name for name, count in times.items() if count > 1 and name not in shared]
    if twice and suffixes is None:
        raise ValueError(
            f"join: field {twice[0]!r} is in several datasets; leave it out of all but one by fields=[…] of Dataset, or"
            ' give suffixes=("", "_2")'
        )
    names: list[dict[str, str]] = []
    taken: set[str] = set()
    for number, own in enumerate(fields):
        renamed = {
            name: name + suffixes[number] if suffixes is not None and name in twice else name
            for name in own
            if name not in shared or name not in taken
        }
        clash = taken & set(renamed.values())
        if clash or len(set(renamed.values())) < len(renamed):
            raise ValueError(f"suffixes={suffixes!r}: two fields would be named {min(clash or set(renamed))!r}")
        taken |= set(renamed.values())
        names.append(renamed)
    return names


def _chosen(names: list[dict[str, str]], fields: Sequence[str] | None) -> list[dict[str, str]]:
    """Return the names of those fields alone that were chosen."""
    if fields is None:
        return names
    known = [new for own in names for new in own.values()]
    unknown = [name for name in fields if name not in known]
    if isinstance(fields, str) or not fields or unknown:
        raise ValueError(f"fields={fields!r}: give a list of names out of {', '.join(known)}")
    return [{name: new for name, new in own.items() if new in fields} for own in names]

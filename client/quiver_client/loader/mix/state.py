"""The state of a mixture in a checkpoint: where the mixture is, and of each part the states of its open passes.

    version, dataset (hex), samples, seed, shuffle, epoch, rank, world_size, batch_size, drop_last: as of one dataset
    batches    batches of this epoch that were handed out to a rank
    taken      samples of this epoch that were handed out to this rank since its shares were dealt
    before     samples of this epoch that were handed out to all ranks before that
    left       samples of this epoch that are left for this rank
    mix_seed   the mixture's own seed
    parts      by name: ``weight``, an integer, and ``deficit``, see ``mix_schedule``; and
               ``passes``, the states of the part's passes that are not consumed, oldest first, each as one dataset's
    guided     of a guided mixture: ``weights`` now, ``drawn`` batches, and the losses that count

States of several ranks merge pass by pass: a rank that has no state of a pass between its oldest and its newest has
read its share of it; one whose oldest pass is a later one has, too; and one whose newest is earlier has not begun it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from quiver_client.loader.epoch import Deal
from quiver_client.loader.mix.schedule import UNIT_MAX
from quiver_client.loader.state import State, merge_states, pack, unpack

VERSION: Final = 1
OPEN_PASSES_MAX: Final = 100_000  # of one part
_NUMBERS: Final = (
    *("version", "samples", "seed", "mix_seed", "epoch", "rank", "world_size", "batch_size"),
    *("batches", "taken", "before", "left"),
)
_SAME: Final = ("dataset", "samples", "seed", "mix_seed", "shuffle", "drop_last")
_SAME_RUN: Final = (*_SAME, "world_size", "batch_size")


@dataclass(frozen=True, slots=True)
class PartState:
    """Of one part: its weight and deficit, and the states of its open passes."""

    weight: int
    deficit: int
    passes: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class MixState:
    """A checked state. ``numbers`` has all but ``parts`` and ``guided``."""

    numbers: Mapping[str, Any]
    parts: Mapping[str, PartState]
    guided: Mapping[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.numbers[name]

    @classmethod
    def parsed(cls, state: Any) -> MixState:
        """Return a state that a serialiser may have changed, checked. Raises ``ValueError``."""
        if not is_mix(state):
            raise ValueError("state: it is not of a Mix; give one that state_dict() of a loader over a Mix returned")
        if state.get("version") != VERSION:
            raise ValueError(f"state: it is version {state.get('version')!r}; this release reads version {VERSION}")
        numbers: dict[str, Any] = {}
        for name in _NUMBERS:
            value = state.get(name)
            if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 0:
                raise ValueError(f"state: {name!r} is missing or no count; was it made by state_dict()?")
            numbers[name] = value.__index__()
        for name, kind in (("dataset", str), ("shuffle", None), ("drop_last", None)):
            if name not in state or (kind is not None and type(state[name]) is not kind):
                raise ValueError(f"state: {name!r} is missing; was it made by state_dict()?")
            numbers[name] = state[name]
        if not numbers["rank"] < numbers["world_size"] or not numbers["batch_size"]:
            raise ValueError("state: rank, world_size or batch_size out of range")
        parts = {name: _part(name, part) for name, part in state["parts"].items()}
        guided = state.get("guided")
        if guided is not None and not isinstance(guided, Mapping):
            raise ValueError("state: 'guided' is no dictionary; was it made by state_dict()?")
        return cls(numbers, parts, guided)

    def plain(self) -> State:
        """Return the state as a plain dictionary."""
        parts = {
            name: {"weight": part.weight, "deficit": part.deficit, "passes": list(part.passes)}
            for name, part in self.parts.items()
        }
        guided = {"guided": self.guided} if self.guided is not None else {}
        return {**self.numbers, "parts": parts, **guided}

    def check(self, ours: Mapping[str, Any], parts: Sequence[str]) -> None:
        """Raise ``ValueError`` if it is of other parts, datasets or seeds than ``ours``."""
        if set(self.parts) != set(parts):
            gone = [name for name in self.parts if name not in parts]
            new = [name for name in parts if name not in self.parts]
            differs = [f"it has {_listed(gone)}, which this mix lacks"] * bool(gone)
            differs += [f"it lacks {_listed(new)}"] * bool(new)
            raise ValueError(
                f"state: it is of other parts: {' and '.join(differs)}. Give the Mix the same parts, with weight 0 for"
                " those that are no longer to be drawn; a part that is new needs a new run"
            )
        for name in _SAME:
            if name != "drop_last" and self.numbers[name] != ours[name]:
                raise ValueError(
                    f"state: its {_what(name)} is {_short(self.numbers[name])}, this loader's {_short(ours[name])};"
                    " it cannot be resumed here"
                )

    @property
    def is_at_end(self) -> bool:
        """Whether everything of the epoch was handed out."""
        return not self.numbers["left"]


def is_mix(state: Any) -> bool:
    """Whether a state is of a mixture."""
    return isinstance(state, Mapping) and isinstance(state.get("parts"), Mapping)


def merge_mixes(states: Sequence[Any]) -> State:
    """Merge the states of all ranks of a mixture: see ``merge_states``. Raises ``ValueError``."""
    parsed = [MixState.parsed(state) for state in states]
    plain = [each.plain() for each in parsed]
    # Ranks that get the same samples have equal states, which count as one.
    given = [each for at, each in enumerate(parsed) if plain[at] not in plain[:at]]
    first = given[0]
    for each in given:
        for name in _SAME_RUN:
            if each[name] != first[name]:
                raise ValueError(
                    f"states: they are of different runs: {_what(name)} {_short(first[name])} and {_short(each[name])}"
                )
        if set(each.parts) != set(first.parts):
            raise ValueError("states: they are of different runs: their parts differ")
    ranks = sorted(each["rank"] for each in given)
    if len(ranks) != first["world_size"] or ranks != list(range(len(ranks))):
        raise ValueError(f"states: ranks {ranks} given; give one state of each of {first['world_size']} ranks")
    given = _in_one_epoch(sorted(given, key=lambda each: each["rank"]))
    first = given[0]
    if any(each["before"] != first["before"] for each in given):
        raise ValueError("states: their shares were not dealt from the same samples; they are of different runs")
    taken = sum(each["taken"] for each in given)
    numbers = {
        **first.numbers,
        "rank": 0,
        "world_size": 1,
        "batches": max(each["batches"] for each in given),
        "taken": 0,
        "before": first["before"] + taken,
        "left": sum(each["left"] for each in given),
    }
    parts = {
        name: replace(part, passes=_merged_passes([list(each.parts[name].passes) for each in given]))
        for name, part in first.parts.items()
    }
    return MixState(numbers, parts, first.guided).plain()


def _in_one_epoch(given: Sequence[MixState]) -> list[MixState]:
    """Return the states, those at the end of an epoch as at the beginning of the next if another rank is there."""
    epoch = max(each["epoch"] for each in given)
    moved = []
    for each in given:
        if each["epoch"] == epoch:
            moved.append(each)
        elif each["epoch"] == epoch - 1 and each.is_at_end:
            numbers = {"epoch": epoch, "batches": 0, "taken": 0, "before": 0, "left": 0}
            moved.append(replace(each, numbers={**each.numbers, **numbers}))
        else:
            raise ValueError(f"states: rank {each['rank']} is in epoch {each['epoch']}, another in epoch {epoch}")
    return moved


def _merged_passes(by_rank: Sequence[list[State]]) -> tuple[State, ...]:
    """Merge the passes of one part that the ranks have open."""
    numbers = sorted({state["epoch"] for states in by_rank for state in states})
    merged = []
    for number in numbers:
        known = {rank: state for rank, states in enumerate(by_rank) for state in states if state["epoch"] == number}
        has_read = {rank for rank, states in enumerate(by_rank) if states[-1]["epoch"] > number and rank not in known}
        merged.append(_merged_pass(known, has_read, len(by_rank)))
    left = [state for state in merged if not _is_complete(state)]
    if left:
        return tuple(left)
    after = merged[-1]
    following = {**after, "epoch": after["epoch"] + 1, "done": None, "own": None}
    following.pop("positions", None)
    return (following,)


def _merged_pass(known: Mapping[int, State], has_read: set[int], world_size: int) -> State:
    """Merge what the ranks have of one pass; ``has_read``: those that have read their shares of it."""
    template = next(iter(known.values()))
    states = []
    for rank in range(world_size):
        own = pack(np.ones(_share_of(template), bool)) if rank in has_read else None
        states.append(known.get(rank, {**template, "rank": rank, "own": own}))
    return merge_states(states)


def _share_of(state: State) -> int:
    """Return the samples of each rank's share of what was not done before."""
    read = int(unpack(state["done"], int(state["samples"])).sum())
    deal = Deal(int(state["samples"]) - read, 0, False, 0, int(state["world_size"]), 1, bool(state["drop_last"]))
    return deal.share_samples


def _is_complete(state: State) -> bool:
    samples = int(state["samples"])
    done = unpack(state["done"], samples)
    left = samples - int(done.sum())
    return bool(unpack(state.get("positions"), left).all())


def _part(name: Any, part: Any) -> PartState:
    known: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("weight", lambda value: 0 <= value <= UNIT_MAX),
        ("deficit", lambda value: abs(value) < 1 << 63),
    )
    if not isinstance(name, str) or not isinstance(part, Mapping):
        raise ValueError("state: 'parts' is no dictionary of parts; was it made by state_dict()?")
    for field, fits in known:
        value: Any = part.get(field)
        if isinstance(value, bool) or not hasattr(value, "__index__") or not fits(value.__index__()):
            raise ValueError(f"state: {field!r} of part {name!r} is missing or no integer in range")
    passes = part.get("passes")
    if not isinstance(passes, Sequence) or not 0 < len(passes) <= OPEN_PASSES_MAX:
        raise ValueError(f"state: part {name!r} has no list of passes; was it made by state_dict()?")
    if not all(isinstance(each, Mapping) and "epoch" in each for each in passes):
        raise ValueError(f"state: a pass of part {name!r} is no state; was it made by state_dict()?")
    ordered = [int(each["epoch"]) for each in passes]
    if ordered != sorted(set(ordered)):
        raise ValueError(f"state: the passes of part {name!r} are not in order; was it made by state_dict()?")
    return PartState(part["weight"].__index__(), part["deficit"].__index__(), tuple(dict(each) for each in passes))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _what(name: str) -> str:
    return {"dataset": "set of datasets", "mix_seed": "Mix's seed"}.get(name, name)


def _short(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 12 else f"{value}"

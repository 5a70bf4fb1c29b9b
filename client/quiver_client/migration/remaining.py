"""What a saved job still needs of a dataset, and in which order: decided from its state alone. Values, no I/O.

In an order that is fixed, the shards in the order of their first use. Otherwise the job takes what is there, so all
shards with samples left are equally urgent, and what is worth most of its room comes first: the shard of which most is
left. A shard of which every sample was read is not needed, however much room there is: its next use is an epoch away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from quiver_client.loader.epoch import Deal, ShardLayout
from quiver_client.loader.mix.state import MixState, is_mix
from quiver_client.loader.state import (
    State,
    checked,
    has_positions,
    is_untouched,
    located,
    merge_states,
    reads_in_order,
    rest_of,
    unpack,
)
from quiver_client.placement import NOWHERE, Ints, Placement

ENDLESS: Final = (
    "state: a sampler without an end, or with a state of its own, gave the order, and what it has left is not known;"
    " warm all of the dataset, without --state"
)


@dataclass(frozen=True, slots=True, eq=False)
class Remaining:
    """What is left of one epoch. ``shards``: in the order in which to bring them, numbered over all leaves.

    ``left`` ``(shards,)``: samples of each shard of all leaves that are left to read. ``in_order``: the job will use
    the shards in just this order.
    """

    shards: Ints
    left: Ints
    samples: int
    epoch: int
    in_order: bool

    @classmethod
    def all_of(cls, layout: ShardLayout) -> Remaining:
        """Return the need of a job that has not begun."""
        left = np.bincount(layout.shard_of, minlength=len(layout.counts)) + layout.beside_of(
            np.arange(len(layout.shard_of))
        )
        return cls(np.flatnonzero(left), left, len(layout.shard_of), 0, False)


def remaining(
    states: Sequence[Mapping[str, Any]], identity: str, placement: Placement, *, substitute: bool | None = None
) -> Remaining:
    """Return what the job that saved these states, one of it or one of each rank, still needs of a dataset.

    ``identity``: the dataset's, which may be a part of the mixture that the states are of. ``substitute``: as the job
    will be resumed; by default as it was saved. Raises ``ValueError`` for states of another dataset, of which some
    ranks are missing, or of an order of which nobody knows the rest.
    """
    if any(is_mix(state) for state in states):
        return _of_part(states, identity, placement, substitute)
    for state in states:
        _check_dataset(state, identity, len(placement))
    state = _one(states)
    layout = ShardLayout.of(placement)
    rows = _rows(state, layout)
    if not len(rows):  # the end of an epoch: the job resumes with the next one
        state = _following(state)
        rows = _rows(state, layout)
    in_order = reads_in_order(state) if substitute is None else not substitute or _is_fixed(state)
    return _remaining(rows, layout, state["epoch"], in_order=in_order)


def _check_dataset(state: Mapping[str, Any], identity: str, samples: int) -> None:
    theirs, count = state.get("dataset"), state.get("samples")
    if theirs != identity or count != samples:
        raise ValueError(
            f"state: it is of dataset {_short(theirs)} with {count} samples, and this one is {_short(identity)} with"
            f" {samples}; give the manifest that the job read (of a part, a join or several datasets, call"
            " quiver_client.warm with the dataset that the job made)"
        )


def _one(states: Sequence[Mapping[str, Any]]) -> State:
    """Return one state for all ranks."""
    first = checked(states[0])
    if len(states) == 1 and first["world_size"] > 1 and is_untouched(first):
        return {**first, "rank": 0, "world_size": 1}  # the same in all ranks
    if len(states) == 1 and first["world_size"] > 1 and first["own"] and _has_read_all(first):
        return {**_following(first), "rank": 0, "world_size": 1}
    if any("given" in state or "sampler_state" in state for state in states):
        raise ValueError(ENDLESS)
    return merge_states(states)


def _has_read_all(state: State) -> bool:
    """Whether a rank has read all of its share. Then so have the others, within a batch."""
    left = state["samples"] - int(unpack(state["done"], state["samples"]).sum())
    share = replace(_deal(state), samples=left).share_samples
    return bool(unpack(state["own"], share).all())


def _following(state: State) -> State:
    """Return the state of the next epoch, of which nothing is read."""
    kept = {name: value for name, value in state.items() if name not in ("rest", "positions", "before", "owed")}
    return {**kept, "epoch": state["epoch"] + 1, "done": None, "own": None, "batches": 0}


def _rows(state: State, layout: ShardLayout) -> Ints:
    """Return the samples that are left of a merged state, in the order of its permutation or of its sampler."""
    rest = rest_of(state)
    if rest is not None:
        return rest
    if state.get("sampler"):
        return np.flatnonzero(~unpack(state["done"], state["samples"]))
    deal = _deal(state)
    if has_positions(state):
        done = unpack(state["done"], deal.samples)
        state = located(state, deal.order(state["epoch"], done, layout.shard_of))
    order = deal.order(state["epoch"], unpack(state["done"], deal.samples), layout.shard_of)
    return deal.share(order)[0]


def _deal(state: Mapping[str, Any]) -> Deal:
    names = ("samples", "seed", "shuffle", "rank", "world_size", "batch_size", "drop_last")
    return Deal(**{name: state[name] for name in names}, block_shards=state.get("block_shards", 0))


def _is_fixed(state: Mapping[str, Any]) -> bool:
    """Whether the order is fixed, whatever ``substitute`` says."""
    return reads_in_order({name: value for name, value in state.items() if name != "in_order"})


def _remaining(rows: Ints, layout: ShardLayout, epoch: int, *, in_order: bool) -> Remaining:
    columns = [layout.shard_of[rows], *(beside[rows] for beside in layout.beside)]
    uses = np.stack(columns, axis=1).reshape(-1)
    uses = uses[uses != NOWHERE]
    left = np.bincount(uses, minlength=len(layout.counts))
    if in_order:
        distinct, first = np.unique(uses, return_index=True)
        shards = distinct[np.argsort(first)]
    else:
        shards = by_share_left(left, layout)
    return Remaining(shards, left, len(rows), epoch, in_order)


def by_share_left(left: Ints, layout: ShardLayout) -> Ints:
    """Return the shards of which something is left, the one of which most is left first."""
    shards = np.flatnonzero(left)
    return shards[np.argsort(-(left[shards] / layout.counts[shards]), kind="stable")]


# -- mixtures ---------------------------------------------------------------------------------------------------------


def _of_part(
    states: Sequence[Mapping[str, Any]], identity: str, placement: Placement, substitute: bool | None
) -> Remaining:
    """Return what a mixture still needs of the part that is this dataset.

    A part is read again and again in an epoch of the mixture, as its weight says. If what is left of its open passes
    does not last until the epoch's end, all of it is needed: first what those have left, then the rest.
    """
    mix = MixState.parsed(merge_states(states))
    names = [name for name, part in mix.parts.items() if part.passes[0]["dataset"] == identity]
    if not names:
        known = ", ".join(f"{name!r} ({_short(part.passes[0]['dataset'])})" for name, part in mix.parts.items())
        raise ValueError(f"state: it is of a mixture of {known}, and this dataset is {_short(identity)}, none of them")
    part = mix.parts[names[0]]
    each = [remaining([state], identity, placement, substitute=substitute) for state in part.passes]
    layout = ShardLayout.of(placement)
    left = np.sum([it.left for it in each], axis=0)
    shards = np.concatenate([it.shards for it in each])
    shards = shards[np.sort(np.unique(shards, return_index=True)[1])]
    samples = sum(it.samples for it in each)
    weights = sum(it.weight for it in mix.parts.values())
    expected = mix["left"] * part.weight / weights if weights else 0.0
    if not part.weight:
        return Remaining(shards[:0], np.zeros_like(left), 0, mix["epoch"], False)
    if expected > samples or not mix["left"]:
        whole = Remaining.all_of(layout)
        others = whole.shards[~np.isin(whole.shards, shards)]
        shards, left = np.concatenate([shards, others]), np.maximum(left, whole.left)
    return Remaining(shards, left, samples, mix["epoch"], each[0].in_order)


def _short(identity: object) -> str:
    return f"{identity[:12]}…" if isinstance(identity, str) else f"{identity!r}"

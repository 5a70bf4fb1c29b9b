"""The state of a loader in a checkpoint: a plain dictionary that any serialiser takes, and that ranks can merge.

    version, dataset (hex), samples, seed, shuffle, epoch, rank, world_size, batch_size, drop_last, batches
    done    one bit per sample: consumed before the shares were dealt; None for none
    own     one bit per entry of this rank's share: consumed since, in ``batches`` batches; None for none
    owed    how many samples are to be repeated at the end of the share, since as many bad ones were replaced; missing
            for none
    before  batches of the epoch that were handed out before the shares were dealt; missing for none
    block_shards  of a block shuffle; missing for a full one, and without a shuffle
    positions     one bit per sample that is not done, in the order that was dealt: consumed since by any rank; only
            where states of a block shuffle were merged, whose order ``merge_states`` cannot know; missing for none
    in_order True where a full shuffle is read without substitution, and missing elsewhere: no loader reads it, and what
            fetches for the job that will resume does
    sampler True where a sampler gives the order, and missing elsewhere
    rest    the samples that such an order has left, 8 bytes each; missing where the sampler gives each sample once
    given   how many samples a sampler that has no end in sight had given when these were handed out
    sampler_state  its own state then, if it has one

``merge_states`` merges the states of several ranks: everything consumed becomes ``done``, and what remains is dealt
again. A state of one rank alone can be merged by itself. What several ranks' samplers have left becomes one ``rest``,
dealt again like a share. Bits are packed, the first in the highest bit. No value is an empty ``bytes``: ``torch.load``
rejects that in a file of ``torch.save`` unless it may run arbitrary code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from quiver.manifest.checks import SAMPLES_MAX
from quiver.shuffles import BLOCK_SHARDS_MAX
from quiver.substitution import Ints, Mask
from quiver_client.loader.epoch import Deal

VERSION: Final = 1
RANKS_MAX: Final = 1 << 20
State = dict[str, Any]
_NUMBERS: Final = ("version", "samples", "seed", "epoch", "rank", "world_size", "batch_size", "batches")
_FIELDS: Final[dict[str, type]] = dict.fromkeys(_NUMBERS, int) | {
    "dataset": str,
    "shuffle": bool,
    "drop_last": bool,
}
_BITS: Final = ("done", "own")
_COUNTS: Final = ("before", "owed", "given")  # missing for none
_REST: Final = np.dtype("<i8")
_SAME: Final = ("version", "dataset", "samples", "seed", "shuffle", "block_shards")
_SAME_SHARE: Final = ("world_size", "rank", "batch_size", "drop_last")


ONE_RANKS: Final = (
    "A trainer that keeps rank 0's state alone can resume several ranks from the end of an epoch and not from its"
    " middle: save checkpoints at the end, or have all ranks call loader.state_dict(merged=True) and save that; it is"
    " merge_states of what torch.distributed.all_gather_object gathers of loader.state_dict()"
)


def pack(mask: Mask) -> bytes | None:
    return np.packbits(mask).tobytes() if mask.any() else None


def unpack(bits: bytes | None, count: int) -> Mask:
    """Return ``count`` bits. Raises ``ValueError`` if ``bits`` has another length."""
    if not bits:
        return np.zeros(count, bool)
    _check_bits(bits, count)
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool)


def _check_bits(bits: bytes | None, count: int) -> None:
    if bits and len(bits) != -(-count // 8):
        raise ValueError(f"state: {len(bits)} bytes of bits, but {count} samples have {-(-count // 8)}")


def make_state(dataset: str, deal: Deal, epoch: int, batches: int, done: Mask, own: Mask) -> State:
    """Return the state of one rank: ``done`` ``(samples,)``, ``own`` ``(share,)``."""
    blocks = {"block_shards": deal.block_shards} if deal.block_shards else {}
    return {
        "version": VERSION,
        "dataset": dataset,
        "samples": deal.samples,
        "seed": deal.seed,
        "shuffle": deal.shuffle,
        "epoch": epoch,
        "rank": deal.rank,
        "world_size": deal.world_size,
        "batch_size": deal.batch_size,
        "drop_last": deal.drop_last,
        "batches": batches,
        "done": pack(done),
        "own": pack(own),
        **blocks,
    }


def counting(state: State, before: int) -> State:
    """Return the state with the number of batches that were handed out before its shares were dealt."""
    return {**state, "before": before} if before else state


def counted(state: Mapping[str, Any]) -> int:
    """Return how many batches of the epoch were handed out to a rank, whatever their size."""
    before: int = state.get("before", 0)
    return before + int(state["batches"])


def marked(state: State, *, in_order: bool) -> State:
    """Return the state with the mark that a shuffled order is read as it is, or without it."""
    state = {name: value for name, value in state.items() if name != "in_order"}
    is_full = state["shuffle"] and not state.get("block_shards") and not state.get("sampler") and "parts" not in state
    return {**state, "in_order": True} if in_order and is_full else state


def reads_in_order(state: Mapping[str, Any]) -> bool:
    """Whether the job reads what is left in the order of the state, and nothing before its turn."""
    if state.get("sampler"):
        return "rest" in state
    return not state["shuffle"] or bool(state.get("block_shards")) or bool(state.get("in_order"))


def of_sampler(state: State, rest: Ints | None) -> State:
    """Return the state of a sampler's order, of which ``rest`` is left; ``None``: all samples that are not done."""
    return {**state, "sampler": True} | ({"rest": rest.astype(_REST).tobytes()} if rest is not None else {})


def rest_of(state: Mapping[str, Any]) -> Ints | None:
    """Return what is left of a sampler's order, ``None`` if the state does not list it."""
    return np.frombuffer(state["rest"], _REST).astype(np.int64) if "rest" in state else None


def belonging(state: Mapping[str, Any], dataset: str, deal: Deal) -> State:
    """Return the state, checked. Raises ``ValueError`` if it is of another dataset or seed; its rank may be any."""
    if isinstance(state, Mapping) and "parts" in state:
        raise ValueError("state: it is of a Mix, and this loader reads one dataset; give the loader that Mix")
    state = checked(state)
    ours = make_state(dataset, deal, 0, 0, np.zeros(0, bool), np.zeros(0, bool))
    for name in _SAME:
        theirs, our = state.get(name, 0), ours.get(name, 0)
        if theirs != our:
            raise ValueError(
                f"state: it is of {_what(name)} {_short(theirs)}, this loader of {_short(our)};"
                " it cannot be resumed here"
            )
    _check_bits(state["own"], _share_samples(state))
    return state


def fitted(
    state: Mapping[str, Any], dataset: str, deal: Deal, *, sampler: bool = False, in_order: bool = False
) -> State:
    """Return the state as a loader of this deal resumes from it. Raises ``ValueError`` that says what does not fit.

    ``sampler``: the loader's order is that of a sampler; ``in_order``: which does not shuffle.
    """
    state = belonging(state, dataset, deal)
    ours = {name: getattr(deal, name) for name in _SAME_SHARE}
    if state.get("sampler") and not is_untouched(state):
        return _fitted_sampler(state, deal, ours, sampler=sampler, in_order=in_order)
    state.pop("sampler", None)
    different = [name for name in _SAME_SHARE if state[name] != ours[name]] if state["own"] else []
    if different == ["rank"] and unpack(state["own"], _share_samples(state)).all():
        # The end of an epoch is the same in all ranks, and most trainers keep the state of one rank only.
        return {**state, **ours}  # every rank's share has the same length
    if different and state["world_size"] > 1:
        name = different[0]
        raise ValueError(
            f"state: it is one rank's, with {name}={state[name]}, and this loader has {name}={ours[name]};"
            " merge the states of all ranks with merge_states first. " + ONE_RANKS
        )
    if different or (sampler and state["own"]):
        state = merge_states([state])
    return {**state, **ours}


def is_untouched(state: Mapping[str, Any]) -> bool:
    """Whether nothing of the state's epoch is consumed: then it is the same in all ranks."""
    return not (state["done"] or state["own"] or "rest" in state or counted(state) or _is_counted(state))


def _is_counted(state: Mapping[str, Any]) -> bool:
    """Whether the state says how far a sampler was read, and not what it has left: nobody knows that."""
    return "given" in state or "sampler_state" in state


def _fitted_sampler(state: State, deal: Deal, ours: Mapping[str, Any], *, sampler: bool, in_order: bool) -> State:
    if not sampler and (state["world_size"] > 1 or _is_bound(state)):
        raise ValueError("state: a sampler gave its order; give the loader the same sampler")
    if state["world_size"] == 1 and ours["world_size"] > 1 and not _is_counted(state):
        return {**_dealt_again(state, deal, in_order=in_order), **ours}
    for name in ("world_size", "rank"):
        if state[name] != ours[name]:
            raise ValueError(
                f"state: it is of a sampler's order in one rank, with {name}={state[name]}, and this loader has"
                f" {name}={ours[name]}; merge the states of all ranks with merge_states first. " + ONE_RANKS
            )
    return {**state, **ours}


def _dealt_again(state: State, deal: Deal, *, in_order: bool) -> State:
    """Return the state of this rank's share of what samplers have left, of which all ranks get the same number."""
    rest = rest_of(state)
    if rest is None:
        done = unpack(state["done"], state["samples"])
        rest = replace(deal, shuffle=not in_order).order(state["epoch"], done)
    share, _ = deal.share(rest)
    return _with_rest(state, share)


def _with_rest(state: State, rest: Ints) -> State:
    """Return the state of an order of which ``rest`` is left, and nothing else."""
    state = {name: value for name, value in state.items() if name != "rest"}
    if len(rest):
        return of_sampler(state, rest)
    return {**state, "sampler": True, "done": pack(np.ones(state["samples"], bool))}


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """Merge the states of all ranks of one run into one that loads into any world size and any number of workers.

    ``states``: one of each rank, in any order, taken at the same point of training. The equal states of processes that
    read one share together (``mesh=``, ``replicate=``) count as one. Where samplers gave the orders,
    what each has left is dealt again, in turns; samples that a ``DistributedSampler`` repeated to even out the ranks
    are left only if no rank has read them. Raises ``ValueError`` if a rank is missing or there twice, or if they are
    not of one run. ``DataLoader.state_dict(merged=True)`` gathers the states of all ranks, and merges them.
    """
    if not states:
        raise ValueError("states: none given; give one of each rank")
    if any(isinstance(state, Mapping) and "parts" in state for state in states):
        from quiver_client.loader.mix.state import merge_mixes  # it merges the states of parts by this function

        return merge_mixes(states)
    states = [checked(state) for state in states]
    given = sorted(state["rank"] for state in states)
    states = _distinct(states)
    world_size = states[0]["world_size"]
    for state in states:
        for name in (*_SAME, "world_size", "batch_size", "drop_last"):
            first, other = states[0].get(name, 0), state.get(name, 0)
            if first != other:
                raise ValueError(
                    f"states: they are of different runs: {_what(name)} {_short(first)} and {_short(other)}"
                )
    if sorted(state["rank"] for state in states) != list(range(world_size)):
        raise ValueError(f"states: ranks {given} given; give one state of each of {world_size} ranks")
    if world_size > 1 and any("given" in state or "sampler_state" in state for state in states):
        raise ValueError(
            "states: what is left of a sampler that has no end in sight is not known; load each in its rank"
        )
    if any(state.get("sampler") and (world_size > 1 or _is_bound(state)) for state in states):
        return _merged_samplers(sorted(map(dict, states), key=lambda state: state["rank"]))
    epoch = max(state["epoch"] for state in states)
    done = np.zeros(states[0]["samples"], bool)
    at_start = [state for state in states if state["epoch"] == epoch]
    if any(state.get(name) != at_start[0].get(name) for state in at_start for name in ("done", "positions")):
        raise ValueError("states: their shares were not dealt from the same samples; they are of different runs")
    # What replaced bad samples is missing from the last batches, so ``drop_last`` may have to leave out less.
    is_short = any(state.get("owed") for state in at_start) and not all(map(_has_read_its_share, at_start))
    for state in states:
        if state["epoch"] == epoch:
            done |= _consumed(state, leaves_out=not is_short)
        elif state["epoch"] != epoch - 1 or not _has_read_its_share(state):
            raise ValueError(f"states: rank {state['rank']} is in epoch {state['epoch']}, another in epoch {epoch}")
    merged = {
        **states[0],
        "epoch": epoch,
        "rank": 0,
        "world_size": 1,
        "batches": 0,
        "done": pack(done),
        "own": None,
    }
    merged.pop("before", None)
    merged.pop("owed", None)
    if positions := _positions(at_start, leaves_out=not is_short):
        merged["positions"] = positions
    return counting(merged, max(counted(state) for state in at_start))


def _distinct(states: Sequence[Mapping[str, Any]]) -> list[State]:
    """Return the states without those that equal an earlier one of the same rank."""
    by_rank: dict[int, list[State]] = {}
    for state in states:
        same = by_rank.setdefault(state["rank"], [])
        if state not in same:
            same.append(dict(state))
    return [state for same in by_rank.values() for state in same]


def _merged_samplers(states: list[State]) -> State:
    """Merge the states of ranks whose orders were given by samplers, one of each rank, in order of rank."""
    epoch = max(state["epoch"] for state in states)
    begun = [state for state in states if state["epoch"] == epoch and not is_untouched(state)]
    if any(not state.get("sampler") for state in states):
        raise ValueError("states: a sampler gave the order of some ranks and not of others; they are of different runs")
    if any(map(_is_counted, begun)):
        raise ValueError(
            "states: a sampler without an end, or with a state of its own, gave the order; load each state in its rank"
        )
    for state in states:
        if state["epoch"] == epoch:
            if begun and is_untouched(state):
                raise ValueError(f"states: rank {state['rank']} has not begun epoch {epoch}, and others have")
        elif state["epoch"] != epoch - 1 or len(_left(state)):
            raise ValueError(f"states: rank {state['rank']} is in epoch {state['epoch']}, another in epoch {epoch}")
    merged = {**states[0], "epoch": epoch, "rank": 0, "world_size": 1, "batches": 0, "done": None, "own": None}
    for name in ("rest", "before"):
        merged.pop(name, None)
    if not begun:
        return merged
    consumed = [unpack(state["done"], state["samples"]) for state in begun if len(_left(state))]
    rest = _interleaved([_left(state) for state in begun])
    if consumed:
        done = np.logical_or.reduce(consumed)
        before = np.logical_and.reduce(consumed) if len(consumed) > 1 else np.zeros_like(done)  # the shares were dealt
        given = int(before.sum()) + sum(int((each & ~before).sum()) for each in consumed) + len(rest)
        either = done.copy()
        either[rest] = True
        if given - int(either.sum()) < len(states):  # each sample once, but for those that even out the ranks
            rest = rest[~done[rest]]
            rest = rest[np.sort(np.unique(rest, return_index=True)[1])]
        merged["done"] = pack(done)
    return counting(_with_rest(merged, rest), max(counted(state) for state in begun))


def _left(state: State) -> Ints:
    """Return what a sampler's order has left, as the state of one rank has it."""
    rest = rest_of(state)
    return np.flatnonzero(~unpack(state["done"], state["samples"])) if rest is None else rest


def _interleaved(parts: Sequence[Ints]) -> Ints:
    """Return the entries of all parts in turns: what ``[rank::ranks]`` of each rank was cut from."""
    turns = [np.arange(len(part)) * len(parts) + at for at, part in enumerate(parts)]
    return np.concatenate(parts)[np.argsort(np.concatenate(turns), kind="stable")]


def _deal_of(state: Mapping[str, Any]) -> Deal:
    names = ("samples", "seed", "shuffle", "rank", "world_size", "batch_size", "drop_last")
    return Deal(**{name: state[name] for name in names}, block_shards=state.get("block_shards", 0))


def _share(state: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    deal = _deal_of(state)
    return deal.share(deal.order(state["epoch"], unpack(state["done"], deal.samples)))[0]


def _undealt(state: Mapping[str, Any]) -> int:
    """Return how many samples the order has that a state's shares were dealt from."""
    return int(state["samples"]) - int(unpack(state["done"], state["samples"]).sum())


def _share_samples(state: Mapping[str, Any]) -> int:
    return replace(_deal_of(state), samples=_undealt(state)).share_samples


def _has_read_its_share(state: Mapping[str, Any]) -> bool:
    if state.get("block_shards"):
        return bool(unpack(state["own"], _share_samples(state)).all())
    return bool(_consumed(state, leaves_out=True)[_share(state)].all())


def _positions(states: Sequence[Mapping[str, Any]], *, leaves_out: bool) -> bytes | None:
    """Return the positions of a block shuffle's order that these states, dealt from it, have consumed.

    They are merged by position, since which sample stands at one depends on the shards of the dataset.
    """
    if not states[0].get("block_shards"):
        return None
    left = _undealt(states[0])
    consumed = unpack(states[0].get("positions"), left)
    world_size, share = states[0]["world_size"], _share_samples(states[0])
    entries = np.zeros((share, world_size), bool)  # as ``dealt`` deals them
    for state in states:
        entries[:, state["rank"]] = unpack(state["own"], share)
    if entries.any() and states[0]["drop_last"] and leaves_out:
        consumed[entries.size :] = True
    at = np.flatnonzero(entries.reshape(-1))
    consumed[at % left if len(at) else at] = True  # what lies behind the end repeats entries from the front
    return pack(consumed)


def has_positions(state: Mapping[str, Any]) -> bool:
    return "positions" in state


def located(state: State, order: Ints) -> State:
    """Return the state with the samples at its consumed positions of ``order`` ``(left,)`` as done."""
    done = unpack(state["done"], state["samples"])
    done[order[unpack(state["positions"], len(order))]] = True
    return {name: value for name, value in state.items() if name != "positions"} | {"done": pack(done)}


def _consumed(state: Mapping[str, Any], *, leaves_out: bool) -> Mask:
    """Return which samples are consumed, as a state has it: ``(samples,)``; of a block shuffle, without ``own``.

    ``leaves_out``: those that ``drop_last`` left out of the deal are, too.
    """
    deal = _deal_of(state)
    done = unpack(state["done"], deal.samples)
    if state["own"] and not deal.block_shards:
        share, left_out = deal.share(deal.order(state["epoch"], done))
        done[share[unpack(state["own"], len(share))]] = True
        done[left_out] = leaves_out
    return done


def checked(state: Mapping[str, Any]) -> State:
    """Return the state with plain numbers: a serialiser may have turned them into numpy's."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: give a dictionary made by state_dict(), not {type(state).__name__}")
    if "version" in state and state["version"] != VERSION:
        raise ValueError(
            f"state: it is version {state['version']!r}, but this release of Quiver reads version {VERSION}"
        )
    plain = dict(state)
    for name, kind in _FIELDS.items():
        value = state.get(name)
        if isinstance(value, np.integer | np.bool_):
            plain[name] = value = value.item()
        if type(value) is not kind:
            raise ValueError(f"state: {name!r} is missing or not {kind.__name__}; was it made by state_dict()?")
    for name in _BITS:
        if name not in state or type(state[name]) not in (bytes, type(None)):
            raise ValueError(f"state: {name!r} is missing or not bytes; was it made by state_dict()?")
    if not (0 <= plain["rank"] < plain["world_size"] <= RANKS_MAX and plain["batch_size"] > 0):
        raise ValueError("state: rank, world_size or batch_size out of range")
    if not 0 < plain["samples"] < SAMPLES_MAX:
        raise ValueError(f"state: {plain['samples']} samples are none, or more than a dataset has")
    for name in _COUNTS:
        plain |= {name: _counted(plain[name])} if name in plain else {}
    if plain["epoch"] < 0 or plain["batches"] < 0:
        raise ValueError("state: epoch or batches out of range")
    _check_bits(plain["done"], plain["samples"])
    _check_block(plain)
    if "rest" in plain:
        rest = plain["rest"]
        if type(rest) is not bytes or not rest or len(rest) % _REST.itemsize:
            raise ValueError("state: 'rest' is not a list of samples; was it made by state_dict()?")
        rows = np.frombuffer(rest, _REST)
        if not 0 <= int(rows.min()) <= int(rows.max()) < plain["samples"]:
            raise ValueError(f"state: 'rest' has indices outside the dataset's {plain['samples']} samples")
    return plain


def _check_block(plain: State) -> None:
    """Check what a state has of a block shuffle."""
    blocks = plain.get("block_shards", 0)
    if isinstance(blocks, np.integer):
        plain["block_shards"] = blocks = blocks.item()
    if type(blocks) is not int or not 0 <= blocks <= BLOCK_SHARDS_MAX or (blocks and not plain["shuffle"]):
        raise ValueError("state: 'block_shards' is not a number of shards; was it made by state_dict()?")
    if "positions" in plain:
        if not blocks or type(plain["positions"]) is not bytes:
            raise ValueError("state: 'positions' is not of a block shuffle; was it made by state_dict()?")
        _check_bits(plain["positions"], _undealt(plain))


def _is_bound(state: Mapping[str, Any]) -> bool:
    """Whether what is left of a sampler's order does not follow from the samples that are done."""
    return any(name in state for name in ("rest", "given", "sampler_state"))


def _counted(count: Any) -> int:
    value = count.item() if isinstance(count, np.integer) else count
    if type(value) is not int or value < 0:
        raise ValueError("state: epoch or batches out of range")
    return value


def _what(name: str) -> str:
    return {"dataset": "dataset", "samples": "a dataset of"}.get(name, name)


def _short(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) else f"{value}"

"""What a checkpoint says of a loader: a plain dictionary that any serialiser takes, and that ranks can join.

    version, dataset (hex), samples, seed, shuffle, epoch, rank, world_size, batch_size, drop_last, batches
    done    a bit a sample: behind already when the shares were dealt; None for none
    own     a bit an entry of this rank's share: consumed since, in ``batches`` batches; None for none

The states of several ranks are joined by ``merge_states``: what is consumed then is all ``done``, and what remains is
dealt out anew. With one rank that needs nobody else. Bits are packed, the first the highest. No empty bytes are among
it: ``torch.load`` refuses those in a file that ``torch.save`` made of them, unless it may run any code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from quiver.substitution import Mask
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
_SAME: Final = ("version", "dataset", "samples", "seed", "shuffle")
_SAME_SHARE: Final = ("world_size", "rank", "batch_size", "drop_last")


def pack(mask: Mask) -> bytes | None:
    return np.packbits(mask).tobytes() if mask.any() else None


def unpack(bits: bytes | None, count: int) -> Mask:
    """Return ``count`` bits. Raises ``ValueError`` if these are not as many."""
    if not bits:
        return np.zeros(count, bool)
    _check_bits(bits, count)
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool)


def _check_bits(bits: bytes | None, count: int) -> None:
    if bits and len(bits) != -(-count // 8):
        raise ValueError(f"state: {len(bits)} bytes of bits where {count} samples have {-(-count // 8)}")


def make_state(dataset: str, deal: Deal, epoch: int, batches: int, done: Mask, own: Mask) -> State:
    """Return the state of one rank: ``done`` ``(samples,)``, ``own`` ``(share,)``."""
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
    }


def fitted(state: Mapping[str, Any], dataset: str, deal: Deal) -> State:
    """Return the state as the loader of this deal goes on from it. Raises ``ValueError`` saying what does not fit."""
    state = _checked(state)
    ours = make_state(dataset, deal, 0, 0, np.zeros(0, bool), np.zeros(0, bool))
    for name in _SAME:
        if state[name] != ours[name]:
            raise ValueError(
                f"state: it is of {_what(name)} {_short(state[name])}, this loader of {_short(ours[name])};"
                " nothing of it can be resumed here"
            )
    if state["own"]:
        unpack(state["own"], len(_share(state)))
    for name in _SAME_SHARE if state["own"] else ():
        if state[name] != ours[name]:
            if state["world_size"] > 1:
                raise ValueError(
                    f"state: it is one rank's, with {name}={state[name]}, and this loader has {name}={ours[name]};"
                    " join the states of all ranks with merge_states first"
                )
            state = merge_states([state])
            break
    return {**state, **{name: ours[name] for name in _SAME_SHARE}}


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """Join the states of all ranks of one run into one that loads into any world size and any number of workers.

    ``states``: one of each rank, in any order, taken at the same point of training. Raises ``ValueError`` if a rank is
    missing or twice, or if they are not of one run.
    """
    if not states:
        raise ValueError("states: none given; give one of each rank")
    states = [_checked(state) for state in states]
    world_size = states[0]["world_size"]
    for state in states:
        for name in (*_SAME, "world_size", "batch_size", "drop_last"):
            if state[name] != states[0][name]:
                raise ValueError(
                    f"states: they are of different runs: {_what(name)} {_short(states[0][name])}"
                    f" and {_short(state[name])}"
                )
    ranks = sorted(state["rank"] for state in states)
    if ranks != list(range(world_size)):
        raise ValueError(f"states: ranks {ranks} given where one of each of {world_size} ranks is wanted")
    epoch = max(state["epoch"] for state in states)
    done = np.zeros(states[0]["samples"], bool)
    at_start = [state for state in states if state["epoch"] == epoch]
    if any(state["done"] != at_start[0]["done"] for state in at_start):
        raise ValueError("states: their shares were not dealt from the same samples; they are of different runs")
    for state in states:
        if state["epoch"] == epoch:
            done |= _consumed(state)
        elif state["epoch"] != epoch - 1 or not _consumed(state)[_share(state)].all():
            raise ValueError(f"states: rank {state['rank']} is in epoch {state['epoch']}, another in epoch {epoch}")
    return {
        **states[0],
        "epoch": epoch,
        "rank": 0,
        "world_size": 1,
        "batches": 0,
        "done": pack(done),
        "own": None,
    }


def _deal_of(state: Mapping[str, Any]) -> Deal:
    names = ("samples", "seed", "shuffle", "rank", "world_size", "batch_size", "drop_last")
    return Deal(**{name: state[name] for name in names})


def _share(state: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    deal = _deal_of(state)
    return deal.share(deal.order(state["epoch"], unpack(state["done"], deal.samples)))[0]


def _consumed(state: Mapping[str, Any]) -> Mask:
    """Return which samples a state says are behind: ``(samples,)``."""
    deal = _deal_of(state)
    done = unpack(state["done"], deal.samples)
    if state["own"]:
        share, left_out = deal.share(deal.order(state["epoch"], done))
        done[share[unpack(state["own"], len(share))]] = True
        done[left_out] = True
    return done


def _checked(state: Mapping[str, Any]) -> State:
    """Return the state with plain numbers: what stored it may have made numpy's of them."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state: a dictionary made by state_dict() is wanted, not {type(state).__name__}")
    if "version" in state and state["version"] != VERSION:
        raise ValueError(f"state: version {state['version']!r} where this Quiver reads version {VERSION}")
    plain = dict(state)
    for name, kind in _FIELDS.items():
        value = state.get(name)
        if isinstance(value, np.integer | np.bool_):
            plain[name] = value = value.item()
        if type(value) is not kind:
            raise ValueError(f"state: {name!r} is missing or no {kind.__name__}; was it made by state_dict()?")
    for name in _BITS:
        if name not in state or type(state[name]) not in (bytes, type(None)):
            raise ValueError(f"state: {name!r} is missing or no bytes; was it made by state_dict()?")
    if not (0 <= plain["rank"] < plain["world_size"] <= RANKS_MAX and plain["batch_size"] > 0 and plain["samples"] > 0):
        raise ValueError("state: rank, world_size, batch_size or samples are not possible")
    if not (plain["epoch"] >= 0 and plain["batches"] >= 0):
        raise ValueError("state: epoch or batches are not possible")
    _check_bits(plain["done"], plain["samples"])
    return plain


def _what(name: str) -> str:
    return {"dataset": "dataset", "samples": "a dataset of"}.get(name, name)


def _short(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) else f"{value}"

"""Which of the states that checkpoints contain are those of the job to resume. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from quiver.errors import BadRequest
from quiver_client.migration.checkpoint import Found

SHOWN_MAX: Final = 8


def chosen(found: Sequence[Found], identity: str, key: str | None = None) -> list[Found]:
    """Return the states of one job: one of all ranks, or one of each rank.

    ``identity``: of the dataset that is warmed; states of others are passed over if one is of this. ``key``: of the
    states to take, as ``Found.key`` has it, or its end. Raises ``BadRequest`` if several jobs' states are there.
    """
    if key is not None:
        known = [it.key for it in found]
        found = [it for it in found if it.key == key or it.key.endswith(f".{key}")]
        if not found:
            raise BadRequest(f"--state-key {key}: there is no state under it; there are {_listed(known)}")
    fitting = [it for it in found if _is_of(it.state, identity)] or list(found)
    distinct: list[Found] = []
    for it in fitting:  # a checkpoint may have a state twice, as ``last`` and by its step
        if all(it.state != other.state for other in distinct):
            distinct.append(it)
    if len({_run(it.state) for it in distinct}) > 1 or _is_ambiguous(distinct):
        raise BadRequest(
            f"there are {len(distinct)} states that are not those of the ranks of one job; name the file of one, or its"
            f" key with --state-key: {_listed([str(it) for it in distinct])}"
        )
    return distinct


def _is_ambiguous(states: Sequence[Found]) -> bool:
    """Whether one rank has two states. Processes that read one share have equal ones."""
    ranks = [it.state["rank"] for it in states]
    return len(set(ranks)) < len(ranks)


def _is_of(state: Mapping[str, Any], identity: str) -> bool:
    parts = state.get("parts")
    if isinstance(parts, Mapping):
        passes = [each for part in parts.values() for each in part.get("passes", ())]
        return any(each.get("dataset") == identity for each in passes)
    return bool(state["dataset"] == identity)


def _run(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["dataset"], state["samples"], state["seed"], state["world_size"]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(name or "the whole file" for name in names[:SHOWN_MAX]) + more

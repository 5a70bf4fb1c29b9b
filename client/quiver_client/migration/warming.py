"""Brings shards into a cache in a given order, and keeps them there: all of a dataset, or what a saved job still needs.

What is needed counts as needed from the first moment (``holding``), so that nothing is filled in place of what was
filled before. A daemon without room for one more is asked for no more; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quiver.errors import NotFound, OverCapacity, QuiverError, Unavailable
from quiver.manifest import Manifest
from quiver.plan import plan_shards
from quiver.residency import rounded_up
from quiver.residency.messages import HOLD_SECONDS_MAX
from quiver_client.migration.checkpoint import states_in
from quiver_client.migration.choice import chosen
from quiver_client.migration.holding import Hold
from quiver_client.migration.remaining import Remaining, remaining
from quiver_client.migration.residency import held_by_rack, held_in_folder
from quiver_client.session import Session

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SHARDS_AT_ONCE: Final = 32  # enough to keep every daemon of a rack busy
KEEP_SECONDS: Final = 600.0  # in which a job is queued, started, and imports its libraries
RETRIES: Final = 2  # in a row in which nothing arrived
RETRY_SECONDS: Final = 1.0
RETRYING_SECONDS: Final = 60.0  # at most
FOLDER: Final = ""  # the home of all shards in a cache that is a folder


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of shards, and their bytes."""

    shards: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """What was warmed. ``needed`` is ``there`` before, ``brought`` now, ``left_out`` for lack of room, and ``failed``.

    ``resident``: what of it the cache holds at the end. ``errors``: by shard, why it was left out or failed.
    ``kept_seconds``: how long it is kept for the job; 0: no longer than other files, ``not_kept`` says why.
    """

    needed: Amount
    there: Amount
    brought: Amount
    resident: Amount
    left_out: Amount
    failed: Amount
    errors: Mapping[int, QuiverError] = field(default_factory=dict)
    kept_seconds: float = 0.0
    not_kept: str = ""
    remaining: Remaining | None = None


def warm(
    dataset: Any,
    state: Any = None,
    *,
    keep_seconds: float = KEEP_SECONDS,
    substitute: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> Warmed:
    """Fill into the cache of ``dataset`` all that it has, or what a saved job still needs of it, and keep it there.

        warm(Dataset("imagenet.quiver", cache="http://rack2:7717").split([0.9, 0.1])[0], "checkpoint.pt")

    ``dataset``: as the job makes it, whole, a part, a join or a concatenation, and read through the cache to warm; of a
    ``Mix``, warm each of its parts with the state of the mixture. ``state``: a loader's state, a list of the states of
    all ranks, or the path of a checkpoint that has them. ``keep_seconds``: how long to keep what is brought, at most an
    hour, if the job does not resume before. ``substitute``: as the job will be resumed, if that differs. ``progress``
    is called with the bytes of each group of shards that is done.

    Fills as many shards as there is room for and returns what became of each. Raises ``ValueError`` for a state of
    another dataset, one of which some ranks are missing, and a dataset without a cache.
    """
    from quiver_client.mix import Mix  # here: the command does without torch where the checkpoint does
    from quiver_client.resolution import resolved

    if isinstance(dataset, Mix):
        raise ValueError("dataset: it is a Mix; warm each of its parts, with the state of the mixture")
    dataset = resolved(dataset)
    placement = dataset.placement()
    need = None
    if state is not None:
        given = [state] if isinstance(state, Mapping) else state
        if isinstance(given, str | Path):
            given = [it.state for it in chosen(states_in(Path(given)), dataset.identity)]
        need = remaining(given, dataset.identity, placement, substitute=substitute)
    leaves = [(leaf.manifest, leaf.session()) for leaf in placement.leaves]
    if any(session.members is None and session.store is None for _, session in leaves):
        raise ValueError("dataset: it is read without a cache; give it the cache to warm with cache=")
    if need is None:
        from quiver_client.loader.epoch import ShardLayout

        need = Remaining.all_of(ShardLayout.of(placement))
    return bring(leaves, need, keep_seconds=keep_seconds, progress=progress)


def bring(
    leaves: Sequence[tuple[Manifest, Session]],
    need: Remaining,
    *,
    keep_seconds: float = KEEP_SECONDS,
    progress: Callable[[int], None] | None = None,
) -> Warmed:
    """Bring what is needed of these manifests, whose shards are numbered one after another. No shard raises."""
    keep_seconds = min(keep_seconds, HOLD_SECONDS_MAX)
    lease_seconds = max(
        keep_seconds, KEEP_SECONDS
    )  # meanwhile: a group of shards takes seconds, or a slow origin minutes
    warming = _Warming(leaves, need, progress or (lambda _: None))
    holds = [
        Hold(manifest, session.members, left)
        for (manifest, session), left in zip(leaves, warming.left_by_leaf(), strict=True)
        if session.members is not None and left.any()
    ]
    try:
        problems = _renewed(holds, lease_seconds)
        renewed_at = time.monotonic()

        def renew() -> None:
            nonlocal renewed_at
            if time.monotonic() - renewed_at > lease_seconds / 8:
                renewed_at = time.monotonic()
                _renewed(holds, lease_seconds)

        warming.run(renew)
    except BaseException:
        for hold in holds:
            hold.end()
        raise
    if keep_seconds > 0:
        problems = _renewed(holds, keep_seconds)
    else:
        for hold in holds:
            hold.end()
    kept = keep_seconds if holds and not problems else 0.0
    return warming.result(kept, str(problems[0]) if problems and keep_seconds > 0 else "")


def _renewed(holds: Sequence[Hold], seconds: float) -> list[QuiverError]:
    return [error for hold in holds for error in hold.renew(seconds)]


class _Warming:
    """One run. ``need.shards`` are numbered over all leaves; ``_sizes`` and the masks likewise."""

    def __init__(
        self, leaves: Sequence[tuple[Manifest, Session]], need: Remaining, progress: Callable[[int], None]
    ) -> None:
        self._leaves = leaves
        self._need = need
        self._progress = progress
        self._sizes = np.concatenate([manifest.tables.shard_sizes for manifest, _ in leaves]).astype(np.int64)
        self._firsts = np.cumsum([0, *(manifest.shard_count for manifest, _ in leaves)])
        self._there = self._resident()
        self._errors: dict[int, QuiverError] = {}
        self._full: dict[str, QuiverError] = {}  # daemons without room, and what they said

    def left_by_leaf(self) -> list[npt.NDArray[np.uint8]]:
        counts = np.concatenate(
            [np.bincount(_shard_of(manifest), minlength=manifest.shard_count) for manifest, _ in self._leaves]
        )
        return np.split(rounded_up(self._need.left, counts), self._firsts[1:-1])

    def run(self, renew: Callable[[], object]) -> None:
        """Bring the shards that are not there, in order."""
        shards = self._need.shards
        self._progress(int(self._sizes[shards[self._there[shards]]].sum()))
        self._bring_all(shards[~self._there[shards]], renew, self._progress)
        tries, until = 0, time.monotonic() + RETRYING_SECONDS
        resident = self._resident()
        while tries < RETRIES and time.monotonic() < until:
            # A daemon that was silent for a moment was passed over: nobody may have filled what was asked of it. And in
            # a rack where others read, what is held now has a share of the room, which they give back little by little.
            missing = [it for it in shards[~resident[shards]].tolist() if self._may_be_retried(it)]
            if not missing:
                return
            time.sleep(RETRY_SECONDS)
            self._full.clear()
            for shard in missing:
                self._errors.pop(shard, None)
            self._bring_all(np.asarray(missing, np.int64), renew, lambda _: None)
            before, resident = resident, self._resident()
            tries = 0 if (resident & ~before).any() else tries + 1

    def _may_be_retried(self, shard: int) -> bool:
        error = self._errors.get(shard)
        if isinstance(error, OverCapacity):
            return any(session.members is not None for _, session in self._leaves)
        return error is None or isinstance(error, NotFound | Unavailable)

    def _bring_all(self, missing: Ints, renew: Callable[[], object], progress: Callable[[int], None]) -> None:
        for first in range(0, len(missing), SHARDS_AT_ONCE):
            some = missing[first : first + SHARDS_AT_ONCE]
            for at, (manifest, session) in enumerate(self._leaves):
                mine = some[(some >= self._firsts[at]) & (some < self._firsts[at + 1])]
                self._bring(at, manifest, session, mine)
            progress(int(self._sizes[some].sum()))
            renew()

    def _bring(self, leaf: int, manifest: Manifest, session: Session, shards: Ints) -> None:
        if not len(shards):
            return
        own = shards - self._firsts[leaf]
        homes = [FOLDER] * len(own)
        if session.members is not None:
            homes = [urls[0] if urls else FOLDER for urls in session.members.ranked(own)]
        is_full = np.asarray([home in self._full for home in homes])
        self._errors |= {
            shard: self._full[home] for shard, home in zip(shards.tolist(), homes, strict=True) if home in self._full
        }
        asked = own[~is_full]
        if not len(asked):
            return
        failed = session.fill(plan_shards(manifest, asked))
        home_of = dict(zip(own.tolist(), homes, strict=True))
        for shard, error in failed.items():
            self._errors[shard + int(self._firsts[leaf])] = error
            if isinstance(error, OverCapacity):
                self._full.setdefault(home_of[shard], error)

    def _resident(self) -> Mask:
        """Return which shards the caches hold, of those that are needed."""
        held = np.zeros(len(self._sizes), bool)
        for at, (manifest, session) in enumerate(self._leaves):
            span = slice(int(self._firsts[at]), int(self._firsts[at + 1]))
            if session.members is not None:
                own = np.flatnonzero(self._need.left[span])
                held[span][own] = held_by_rack(session.members, own)
            elif session.store is not None:
                held[span] = held_in_folder(session.store, manifest)
        return held

    def result(self, kept_seconds: float, not_kept: str) -> Warmed:
        shards = self._need.shards
        resident = self._resident()
        for shard in shards[resident[shards]].tolist():
            if shard in self._errors and self._may_be_retried(
                shard
            ):  # its fill ended after nobody waited for it any more
                self._errors.pop(shard, None)
        for shard in shards[~resident[shards]].tolist():  # a fill that failed, or evicted by others meanwhile
            self._errors.setdefault(shard, OverCapacity("it was evicted again for what others need more", 0.0))
        full = np.zeros(len(self._sizes), bool)
        lost = full.copy()
        for shard, error in self._errors.items():
            (full if isinstance(error, OverCapacity) else lost)[shard] = True

        def amount(mask: Mask) -> Amount:
            those = shards[mask[shards]]
            return Amount(len(those), int(self._sizes[those].sum()))

        there, bad = self._there, full | lost
        return Warmed(
            needed=amount(np.ones_like(full)),
            there=amount(there & resident & ~bad),
            brought=amount(~there & resident & ~bad),
            resident=amount(resident & ~lost),
            left_out=amount(full),
            failed=amount(lost),
            errors=self._errors,
            kept_seconds=kept_seconds,
            not_kept=not_kept,
            remaining=self._need,
        )


def _shard_of(manifest: Manifest) -> Ints:
    from quiver_client.loader.epoch import shards_of

    return shards_of(manifest)

"""Whether the ranks of a job deal the same epoch: otherwise some samples are read twice and others never.

The ranks share torch.distributed's key-value store. The first to come to a point says there what it has, and each
other one compares, by one request: the manifest and what the shares follow from when a loader is first read, the state
that is gone on with when a pass begins, and the epoch when a pass was read to its end. No rank waits for another, so
one that alone reads a dataset, to validate say, waits for nobody: in a collective it would.

Loaders are the same one if the same line of the program made them, for as many times, over the same path. A pass that
was broken off is not compared: whether the others break theirs off as well, nobody knows yet.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import PurePath
from typing import Any, Final

import blake3
import torch.distributed
from torch.utils.data import DistributedSampler

from quiver.digest import Digest
from quiver.errors import Misconfigured
from quiver.manifest import Manifest
from quiver_client.loader.epoch import Deal
from quiver_client.loader.state import State

log = logging.getLogger("quiver_client")

PREFIX: Final = "quiver/loader"
ALONE: Final = "Begin each pass in all ranks, or call loader.set_epoch(epoch) before each"
Said = dict[str, Any]
_made: Counter[str] = Counter()  # loaders of this process, by what they read and where they were made


class Agreement:
    """What the ranks of one loader have to agree on. Made where the loader is: by that it is told from others.

    Says nothing where the ranks are not torch.distributed's. Whoever reads from another path may mean another dataset.
    """

    def __init__(self, manifest: Manifest, deal: Deal, sampler: Any) -> None:
        self._manifest = manifest
        self._settings = _settings(manifest, deal, sampler)
        # Where one epoch is like another, it does not matter which one a rank reads.
        self._by_epoch = deal.shuffle if sampler is None else _follows_epoch(sampler)
        self._shares_state = sampler is None
        made = str(Digest.of(f"{manifest.path}\0{_maker()}".encode()))
        _made[made] += 1
        self._key = f"{PREFIX}/{made}/{_made[made]}"
        self._begun: Counter[str] = Counter()
        self._finished = 0  # passes that were read to their end
        self._now: Said = {}
        self._warned = False

    def begin(self, place: tuple[int, int], epoch: int, resume: State | None) -> None:
        """A pass begins. Raises ``Misconfigured`` if other ranks deal samples by something else than this one."""
        done = resume["done"] if resume is not None and self._shares_state else None
        self._now = {"done": blake3.blake3(done).hexdigest(16) if done else ""}
        if self._by_epoch:
            self._now["epoch"] = epoch
        store = _store(*place)
        if store is None:
            return
        first, theirs = _compare(store, f"{self._key}/settings", place[0], self._settings)
        self._check_settings(place[0], first, theirs)
        key = f"{self._key}/{self._finished}/{self._now.get('epoch', '')}"
        self._begun[key] += 1
        first, theirs = _compare(store, f"{key}/{self._begun[key]}", place[0], self._now)
        if theirs != self._now:
            raise Misconfigured(
                f"epoch {epoch}: rank {place[0]} goes on from another state than rank {first}, or from none, so their"
                " shares would overlap. Load states of the same run in all ranks: each its own, or all merge_states of"
                " them"
            )
        if not self._warned and _is_there(store, f"{self._key}/finished/{self._finished}"):
            self._warned = True
            log.warning(
                "epoch %d: before rank %d began this pass, another one had finished it. That is right where each reads"
                " at its own pace; where they train in step, another rank made a whole pass alone. %s",
                epoch,
                place[0],
                ALONE,
            )

    def finish(self, place: tuple[int, int]) -> None:
        """The pass was read to its end. Raises ``Misconfigured`` if that of another rank was of another epoch."""
        store = _store(*place)
        key = f"{self._key}/finished/{self._finished}"
        self._finished += 1
        if store is None:
            return
        first, theirs = _compare(store, key, place[0], self._now)
        if theirs != self._now:
            ours, their = (f"epoch {said['epoch']}" if "epoch" in said else "a pass" for said in (self._now, theirs))
            state = " from another state" if theirs.get("done") != self._now["done"] else ""
            raise Misconfigured(
                f"rank {place[0]} read {ours} while rank {first} read {their}{state}, so samples were read twice or"
                f" never: one of them began a pass alone, to look at a batch perhaps. {ALONE}"
            )

    def _check_settings(self, rank: int, first: int, theirs: Said) -> None:
        ours = self._settings
        if theirs.get("manifest") != ours["manifest"]:
            mine, other = (Digest.parse(said["manifest"]).short for said in (ours, theirs))
            raise Misconfigured(
                f"{self._manifest.path} is the manifest {mine} for rank {rank}, and {other} for rank {first}: it was"
                " indexed again meanwhile, or is another file on another host. Give all ranks the same file, and make"
                " their Dataset anew"
            )
        for name in sorted(ours | theirs):
            if ours.get(name) != theirs.get(name):
                raise Misconfigured(
                    f"{name}: it is {ours.get(name)} in rank {rank} and {theirs.get(name)} in rank {first}, and each"
                    " would deal the epoch in its own way. Give all ranks the same; or, to read all of it in this"
                    " rank alone, rank=0, world_size=1"
                )


def _settings(manifest: Manifest, deal: Deal, sampler: Any) -> Said:
    """Return what the shares follow from."""
    said: Said = {"manifest": str(manifest.digest), "sampler": sampler is not None}
    if sampler is None:
        seed = deal.seed if deal.shuffle else 0
        said |= {"seed": seed, "shuffle": deal.shuffle, "drop_last": deal.drop_last, "batch_size": deal.batch_size}
    elif isinstance(sampler, DistributedSampler):
        seed = sampler.seed if sampler.shuffle else 0
        said |= {"seed": seed, "shuffle": sampler.shuffle, "drop_last": sampler.drop_last}
    return said


def _follows_epoch(sampler: Any) -> bool:
    return hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True) is not False


def _maker() -> str:
    """Return the line that makes a loader, without the folder, which may be another on another host."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("quiver_client."):
        frame = frame.f_back
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _compare(store: Any, key: str, rank: int, ours: Said) -> tuple[int, Said]:
    """Return who was the first to say something under this key, and what."""
    try:
        said = store.compare_set(key, "", json.dumps([rank, ours]))  # set if there is none; returns what is there
        first, theirs = json.loads(said)
    except (RuntimeError, ValueError):
        return rank, ours  # a store that is gone, or cannot do this; torch.distributed says so where it matters
    return first, theirs


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def _store(rank: int, world_size: int) -> Any:
    """Return the store that the ranks share; ``None`` if these are not its ranks, or there is none."""
    distributed = torch.distributed
    if world_size < 2 or not distributed.is_available() or not distributed.is_initialized():
        return None
    if (distributed.get_rank(), distributed.get_world_size()) != (rank, world_size):
        return None
    get_store = getattr(distributed.distributed_c10d, "_get_default_store", None)  # torch has no public name for it
    return get_store() if get_store is not None else None

"""Whether the ranks of a job deal the same epoch: otherwise some samples are read twice and others never.

The ranks share torch.distributed's key-value store. The first rank to reach a point writes its values there, and each
other rank compares, by one request: when a pass begins, the manifest, the settings that determine the shares, and the
state that it resumes from; when a pass was read to its end, the epoch. No rank waits for another, so a rank that reads
a dataset alone, to validate for instance, does not hang as it would in a collective.

Two ranks' loaders correspond if the same line of the program made them, as its n-th loader, over the same path. A pass
that ended early is not compared: the other ranks may be about to end theirs early as well.
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
from quiver_client.loader.epoch import Deal
from quiver_client.loader.group_store import group_store
from quiver_client.loader.state import State
from quiver_client.placement import Placement

log = logging.getLogger("quiver_client")

PREFIX: Final = "quiver/loader"
ALONE: Final = "Begin each pass in all ranks, or call loader.set_epoch(epoch) before each"
Facts = dict[str, Any]
_made: Counter[str] = Counter()  # loaders of this process, by path and by the line that made them


class RankAgreement:
    """What the ranks of one loader have to agree on. Made by the loader's constructor, whose caller identifies it.

    If the ranks are not those of torch.distributed, nothing is compared; neither are ranks that read other paths.
    """

    def __init__(
        self, placement: Placement, identity: str, deal: Deal, sampler: Any, *, of_groups: bool = False
    ) -> None:
        """``identity``: of the dataset whose samples lie at ``placement``.

        ``of_groups``: the ranks are numbers of groups that read one share each, and this process leads one.
        """
        self._of_groups = of_groups
        self._path = ", ".join(str(leaf.manifest.path) for leaf in placement.leaves)
        self._is_whole = [str(leaf.manifest.digest) for leaf in placement.leaves] == [identity]
        self._settings = _settings(identity, deal, sampler)
        # If all epochs have the same order, it does not matter which one a rank reads.
        self._by_epoch = deal.shuffle if sampler is None else _follows_epoch(sampler)
        self._shares_state = sampler is None
        made = str(Digest.of(f"{self._path}\0{maker()}".encode()))
        _made[made] += 1
        self._key = f"{PREFIX}/{made}/{_made[made]}"
        self._begun: Counter[str] = Counter()
        self._finished = 0  # passes that were read to their end
        self._pass: Facts = {}  # of the pass that was begun last
        self._warned = False

    def begin(self, ranks: tuple[int, int], epoch: int, resume: State | None) -> None:
        """A pass begins. Raises ``Misconfigured`` if other ranks deal its samples differently."""
        done = resume["done"] if resume is not None and self._shares_state else None
        self._pass = {"done": blake3.blake3(done).hexdigest(16) if done else ""}
        if self._by_epoch:
            self._pass["epoch"] = epoch
        store = self._store(ranks)
        if store is None:
            return
        first, theirs = compare(store, f"{self._key}/settings", ranks[0], self._settings)
        self._check_settings(ranks[0], first, theirs)
        key = f"{self._key}/{self._finished}/{self._pass.get('epoch', '')}"
        self._begun[key] += 1
        first, theirs = compare(store, f"{key}/{self._begun[key]}", ranks[0], self._pass)
        if theirs != self._pass:
            raise Misconfigured(
                f"epoch {epoch}: rank {ranks[0]} resumes from another state than rank {first}, or from none, so their"
                " shares would overlap. Load states of the same run in all ranks: each its own, or all merge_states of"
                " them"
            )
        if not self._warned and _is_there(store, f"{self._key}/finished/{self._finished}"):
            self._warned = True
            log.warning(
                "epoch %d: another rank had finished this pass before rank %d began it. That is correct where each rank"
                " reads at its own rate; where they train in step, another rank read a whole pass alone. %s",
                epoch,
                ranks[0],
                ALONE,
            )

    def finish(self, ranks: tuple[int, int]) -> None:
        """The pass was read to its end. Raises ``Misconfigured`` if another rank read another epoch."""
        store = self._store(ranks)
        key = f"{self._key}/finished/{self._finished}"
        self._finished += 1
        if store is None:
            return
        first, theirs = compare(store, key, ranks[0], self._pass)
        if theirs != self._pass:
            ours, their = (f"epoch {each['epoch']}" if "epoch" in each else "a pass" for each in (self._pass, theirs))
            state = " from another state" if theirs.get("done") != self._pass["done"] else ""
            raise Misconfigured(
                f"rank {ranks[0]} read {ours} while rank {first} read {their}{state}, so samples were read twice or"
                f" never: one of them began a pass alone, perhaps to look at a batch. {ALONE}"
            )

    def _store(self, ranks: tuple[int, int]) -> Any:
        """Return the store that the ranks share; ``None`` if these are not its ranks, or there is none."""
        if ranks[1] < 2:
            return None
        return group_store() if self._of_groups else _store_of(ranks)

    def _check_settings(self, rank: int, first: int, theirs: Facts) -> None:
        ours = self._settings
        if theirs.get("manifest") != ours["manifest"]:
            mine, other = (Digest.parse(each["manifest"]).short for each in (ours, theirs))
            if not self._is_whole:
                raise Misconfigured(
                    f"dataset: rank {rank} has other samples of {self._path} ({mine}) than rank {first} ({other})."
                    " Select, split or concatenate the same in all ranks, with the same seed"
                )
            raise Misconfigured(
                f"{self._path} is the manifest {mine} for rank {rank}, and {other} for rank {first}: it was"
                " indexed again meanwhile, or the hosts have different files. Give all ranks the same file, and restart"
                " the job"
            )
        for name in sorted(ours | theirs):
            if ours.get(name) != theirs.get(name):
                raise Misconfigured(
                    f"{name}: it is {ours.get(name)} in rank {rank} and {theirs.get(name)} in rank {first}, so they"
                    " would deal the epoch differently. Give all ranks the same; or, to read all of it in this"
                    " rank alone, rank=0, world_size=1"
                )


def _settings(identity: str, deal: Deal, sampler: Any) -> Facts:
    """Return the settings that determine the shares."""
    facts: Facts = {"manifest": identity, "sampler": sampler is not None}
    if sampler is None:
        seed = deal.seed if deal.shuffle else 0
        facts |= {"seed": seed, "shuffle": deal.shuffle, "drop_last": deal.drop_last, "batch_size": deal.batch_size}
        facts["block_shards"] = deal.block_shards
    elif isinstance(sampler, DistributedSampler):
        seed = sampler.seed if sampler.shuffle else 0
        facts |= {"seed": seed, "shuffle": sampler.shuffle, "drop_last": sampler.drop_last}
    return facts


def _follows_epoch(sampler: Any) -> bool:
    return hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True) is not False


def maker() -> str:
    """Return the line that makes a loader, without its folder, which may differ between hosts."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("quiver_client."):
        frame = frame.f_back
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def compare(store: Any, key: str, rank: int, ours: Facts) -> tuple[int, Facts]:
    """Return which rank was the first to write under this key, and what."""
    try:
        stored = store.compare_set(key, "", json.dumps([rank, ours]))  # sets it if it is absent; returns the value
        first, theirs = json.loads(stored)
    except (RuntimeError, ValueError):
        return rank, ours  # the store is closed, or has no compare_set; torch.distributed raises if it matters
    return first, theirs


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def _store_of(ranks: tuple[int, int]) -> Any:
    """Return torch.distributed's store; ``None`` if there is none, or its rank and world size are not these."""
    store = group_store()
    distributed = torch.distributed
    return store if store is not None and (distributed.get_rank(), distributed.get_world_size()) == ranks else None

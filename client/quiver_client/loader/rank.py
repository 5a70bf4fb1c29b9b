"""Which rank of how many a loader reads for: settled when its first pass begins, and never changed afterwards.

A trainer makes the process group long after the user made the loader; until then it distinguishes processes by
variables of its own. So a rank that was looked up when the loader was made could be the same in all processes. Whenever
a pass begins, the settled rank is compared with ``torch.distributed``'s: if they disagreed, samples would be read twice
or never.
"""

from __future__ import annotations

import logging
import os
from typing import Final

import torch.distributed

from quiver_client.loader.arguments import RANK_VARIABLES, rank_and_world_size

log = logging.getLogger("quiver_client")
_warned: Final[list[bool]] = []  # of several ranks that read one share


class SettledRank:
    """Rank and world size: as given to the loader, or else found in this process's environment."""

    def __init__(self, rank: int | None, world_size: int | None, *, of_group: bool = False) -> None:
        """``of_group``: several processes read this share together, so its rank is none of ``torch.distributed``'s.

        Raises ``ValueError`` naming the argument.
        """
        self._of_group = of_group
        self._given = rank_and_world_size(rank, world_size) if rank is not None or world_size is not None else None
        self._settled: tuple[int, int] | None = None
        rank_and_world_size(rank, world_size)

    def __repr__(self) -> str:
        rank, world_size = self.current
        return f"SettledRank(rank={rank}, world_size={world_size}, {'settled' if self._settled else 'open'})"

    @property
    def current(self) -> tuple[int, int]:
        """Rank and world size; before the first pass, as if that began now."""
        return self._settled or self._given or rank_and_world_size(None, None)

    @property
    def is_whole(self) -> bool:
        """Whether the loader was told to read everything in this process."""
        return self._given is not None and self._given[1] == 1

    @property
    def is_known(self) -> bool:
        """Whether they are final: no process group and no variables that are set later can change them."""
        return bool(self._settled or self._given or _process_group()) or all(os.environ.get(n) for n in RANK_VARIABLES)

    def settle(self) -> tuple[int, int]:
        """Fix rank and world size, and return them.

        Raises ``ValueError`` naming ``rank`` if another process would read the same share, or none would read some
        share.
        """
        rank, world_size = self.current
        group = _process_group()
        if group is None and not self.is_known and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            raise ValueError(
                f"rank: WORLD_SIZE={os.environ['WORLD_SIZE']} is set and RANK is not, so which share is this process's?"
                " Iterate the loader after torch.distributed.init_process_group, or give it rank and world_size"
            )
        if group is not None and self._given is None and group != (rank, world_size):
            raise ValueError(
                f"rank: the first pass read the share of rank {rank} of {world_size}, and torch.distributed now says"
                f" that this is rank {group[0]} of {group[1]}. Iterate the loader after"
                " torch.distributed.init_process_group, make a new loader, or give it rank and world_size"
            )
        # Fewer shares than processes are correct: a loader that all read whole, or several processes to each share.
        is_foreign = group is not None and (world_size > group[1] or (world_size == group[1] and rank != group[0]))
        if group is not None and is_foreign and not self._of_group:
            raise ValueError(
                f"rank={rank}, world_size={world_size}: torch.distributed says that this is rank {group[0]} of"
                f" {group[1]}; leave both out, or give these"
            )
        self._settled = rank, world_size
        return self._settled

    @property
    def process(self) -> int | None:
        """The number of this process if several may read its share, each for itself; ``None`` if it alone reads it."""
        if self._given is None or self._of_group:
            return None
        group = _process_group()
        if group is not None:
            return group[0] if group[1] > self._given[1] else None
        rank, count = (os.environ.get(name, "") for name in RANK_VARIABLES)
        is_one_of_more = rank.isdecimal() and count.isdecimal() and int(count) > self._given[1]
        return int(rank) if is_one_of_more else None

    def warn_of_replicas(self, *, is_fixed: bool) -> None:
        """Warn, once in a process, if other processes may read this share as well, in an order of their own."""
        group = _process_group()
        if _warned or group is None or self._given is None or self.process is None:
            return
        rank, world_size = self.current
        if is_fixed and world_size == 1:
            return  # the same order in each process, as for validation
        _warned.append(True)
        log.warning(
            "rank=%d, world_size=%d: torch.distributed has %d ranks, so several read this share, and each decides for"
            " itself which samples come next. If they have to get the same samples, as ranks of one tensor- or"
            " pipeline-parallel model do, give the loader mesh=device_mesh or replicate=process_group instead",
            rank,
            world_size,
            group[1],
        )

    def refuse_whole(self) -> None:
        """Raise ``ValueError`` if each of several ranks would read all of an order that is not dealt to them.

        A loader with ``rank=0, world_size=1`` is allowed to.
        """
        if self.is_whole or self.current[1] < 2:
            return
        raise ValueError(
            f"sampler: each of {self.current[1]} ranks would read all of its samples, since nothing deals them to"
            " ranks. Wrap the sampler in a DistributedSampler, or leave it out; if it deals them itself, or every rank"
            " is to read all of it, give the loader rank=0, world_size=1"
        )


def _process_group() -> tuple[int, int] | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None

"""Which rank of how many a loader reads for: settled when its first pass begins, and never changed afterwards.

A trainer makes the process group long after the user made the loader; until then it distinguishes processes by
variables of its own. So a rank that was looked up when the loader was made could be the same in all processes. Whenever
a pass begins, the settled rank is compared with ``torch.distributed``'s: if they disagreed, samples would be read twice
or never.
"""

from __future__ import annotations

import os

import torch.distributed

from quiver_client.loader.arguments import RANK_VARIABLES, rank_and_world_size


class SettledRank:
    """Rank and world size: as given to the loader, or else found in this process's environment."""

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        """Raises ``ValueError`` naming the argument."""
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
        # Fewer shares than processes are correct if several read the same one: tensor or pipeline parallelism.
        if group is not None and (world_size > group[1] or (world_size == group[1] and rank != group[0])):
            raise ValueError(
                f"rank={rank}, world_size={world_size}: torch.distributed says that this is rank {group[0]} of"
                f" {group[1]}; leave both out, or give these"
            )
        self._settled = rank, world_size
        return self._settled

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

"""Checks of the loader's arguments: a wrong one raises a ``ValueError`` that names it."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from typing import Any, Final

import numpy as np
import torch.distributed

from quiver.shuffles import BLOCK_SHARDS_MAX, default_block_shards
from quiver_client.loader.epoch import ShardLayout

_made: Counter[str] = Counter()  # loaders of this process by what they read
RANK_VARIABLES: Final = ("RANK", "WORLD_SIZE")  # set by torchrun


def whole(name: str, value: Any, least: int) -> int:
    """Return an integer of at least ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise ValueError(f"{name}={value!r}: give an integer of at least {least}")
    number: int = value.__index__()
    return number


def lookahead_of(value: Any) -> int | None:
    """Return how many pending samples a batch may choose from; ``None`` for the whole epoch."""
    return None if value == "auto" else whole("lookahead", value, 1)


def shuffle_of(shuffle: Any, block_shards: Any, layout: ShardLayout) -> tuple[bool, int]:
    """Return whether to shuffle, and how many shards of a block shuffle are open, 0 for a full one."""
    if isinstance(shuffle, str) and shuffle not in ("full", "block"):
        raise ValueError(f'shuffle={shuffle!r}: give True or "full", "block", or False')
    is_block = isinstance(shuffle, str) and shuffle == "block"
    if block_shards is not None and not is_block:
        raise ValueError(f'block_shards={block_shards!r}: it is of a block shuffle; give shuffle="block" with it')
    if not is_block:
        return bool(shuffle), 0
    if block_shards is None:
        filled = int(np.count_nonzero(np.bincount(layout.shard_of)))  # a selection may have samples of few shards
        return True, default_block_shards(filled, alike=layout.is_alike)
    return True, min(whole("block_shards", block_shards, 1), BLOCK_SHARDS_MAX)


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, else torch.distributed's, else torchrun's variables, else one of one."""
    if (rank is None) != (world_size is None):
        missing = "rank" if rank is None else "world_size"
        raise ValueError(f"{missing}: give rank and world_size both, or neither")
    if rank is None or world_size is None:
        rank, world_size = _of_process()
    world_size = whole("world_size", world_size, 1)
    rank = whole("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank={rank}: it must be below world_size={world_size}")
    return rank, world_size


def job_of(job: str | None) -> str:
    """Return the name from which consumers' names follow: as given, else a unique one.

    Neither the environment's nor a launcher's name, which ``identity_of`` shows: Slurm's job id is that of all steps of
    an allocation, and what they read must not replace one another in the cache.
    """
    if job is None:
        return secrets.token_hex(16)
    if not isinstance(job, str) or not job:
        raise ValueError(f"job={job!r}: give a name that is the same in all ranks of the job")
    return job


def shared_name(job: str, dataset: str) -> str:
    """Return the name that a loader's ranks share: a job that restarts replaces its earlier run.

    A job may read several datasets, and one of them by several loaders, which are numbered in order of creation.
    """
    name = f"{job}\0{dataset}"
    _made[name] += 1
    return f"{name}\0{_made[name]}"


def _of_process() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    texts = [os.environ.get(name, "") for name in RANK_VARIABLES]
    for name, text in zip(RANK_VARIABLES, texts, strict=True):
        if text and not text.isdecimal():
            raise ValueError(f"{name}={text!r}: it is set but is not a number; set it as torchrun does, or unset it")
    if all(text.isdecimal() for text in texts):
        return int(texts[0]), int(texts[1])
    return 0, 1

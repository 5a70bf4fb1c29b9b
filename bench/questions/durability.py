"""What it costs that a shard is synced to the disk, and verified, before it is visible.

One thread writes shards by the store's recipe, with and without each of the two steps, side by side. What was written
is flushed between the rounds, outside of the measured time. Expected: on a disk, syncing costs most of what small
shards take and little of what large ones take, whose limit is the disk's own throughput; in memory it is free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final
from unittest import mock

import numpy as np

from bench.questions.base import Answer, Question, Ratio, Setting
from quiver.digest import Digest
from quiver.shard import encode_table, name_of, verified
from quiver.store import Kind, Store

SAMPLE_BYTES: Final = 16 << 10
SHARD_BYTES: Final = (32 << 20, 1 << 20, 64 << 10)
TOTAL_BYTES: Final = 128 << 20
TOTAL_BYTES_QUICK: Final = 32 << 20
SHARDS_MAX: Final = 256
Shards = list[tuple[Digest, bytes]]


def durability(setting: Setting) -> Answer:
    """Each round writes the same shards into an empty store, once for each way."""
    answer = Answer()
    total = TOTAL_BYTES_QUICK if setting.quick else TOTAL_BYTES
    for size in SHARD_BYTES:
        shards = [_shard(size, seed) for seed in range(max(min(total // size, SHARDS_MAX), 1))]
        seconds: dict[str, list[float]] = {"both": [], "not synced": [], "not verified": []}
        for at in range(setting.rounds):
            setting.say(f"shards of {size >> 10} KiB, round {at + 1}")
            for way, times in seconds.items():
                times.append(_written(setting.folder / "store", shards, way))
        written = sum(len(data) for _, data in shards)
        answer.more[f"shards of {size >> 10} KiB"] = {"bytes": written, "shards": len(shards), "seconds": seconds}
        rate = written / median(seconds["both"]) / 1e6
        for way, step in (("not synced", "syncing"), ("not verified", "verifying by BLAKE3")):
            each = tuple(without / both for both, without in zip(seconds["both"], seconds[way], strict=True))
            note = f"{rate:,.0f} MB/s with both, {written / median(seconds[way]) / 1e6:,.0f} without"
            name = f"Throughput of writing shards of {size >> 10} KiB with {step} ÷ without"
            answer.ratios.append(Ratio(name, median(each), each=each, note=note))
    return answer


def _shard(size: int, seed: int) -> tuple[Digest, bytes]:
    sample = np.random.default_rng(seed).bytes(SAMPLE_BYTES)
    samples = [seed.to_bytes(4, "little") + at.to_bytes(4, "little") + sample[8:] for at in range(size // SAMPLE_BYTES)]
    digests = np.array([list(Digest.of(each)) for each in samples], np.uint8).reshape(-1, 32)
    table = encode_table(digests, np.full(len(samples), SAMPLE_BYTES, np.uint64))
    return name_of(table), b"".join(samples) + table


def _written(root: Path, shards: Shards, way: str) -> float:
    """Write shards into an empty store; return the seconds that it took."""
    with contextlib.closing(Store.open(root, 1 << 40, shared=False)) as store, _synced(way != "not synced"):
        begun = time.monotonic()
        for digest, data in shards:
            with store.reserve(Kind.SHARD, digest, len(data)) as writing:
                writing.write(data)
                if way != "not verified":
                    verified(digest, writing.content(), "bench")
                writing.commit()
        took = time.monotonic() - begun
    shutil.rmtree(root)
    os.sync()
    return took


@contextlib.contextmanager
def _synced(syncs: bool) -> Iterator[None]:
    with contextlib.nullcontext() if syncs else mock.patch("os.fsync", return_value=None):
        yield


QUESTIONS = (Question("fsync", "What do syncing and verifying a shard cost before it is visible?", durability),)

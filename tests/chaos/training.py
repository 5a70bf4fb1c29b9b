"""The training loop of a chaos client, which runs in the client's process: see ``history``."""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from blake3 import blake3

TIERS = ("host", "rack", "origin")


def train(config: str) -> None:
    """Train as the configuration file says; append to its history."""
    job = SimpleNamespace(**json.loads(Path(config).read_text()))
    os.environ.update(job.environment)
    with Path(job.log).open("ab") as log:
        os.dup2(log.fileno(), 2)  # of its workers, too, whose logging is not configured
    logging.basicConfig(filename=job.log, format="%(levelname)s %(name)s %(message)s")
    from quiver_client import Dataset
    from quiver_client.loader import consumer

    if job.leases_seconds:
        vars(consumer)["LEASE_SECONDS"] = job.leases_seconds
    history = _Writer(job)
    state = history.last_state()
    history.append({"what": "start", "pid": os.getpid(), "resumed": state is not None})
    opening = True
    try:
        dataset = Dataset(job.manifest, job.cache, fields=["data", "__key__"], verify=job.verify)
        opening = False
        with closing(dataset):
            _loop(job, dataset, history, state)
            history.append({"what": "end", "stats": dataset.stats()})
    except Exception as error:
        keys = list(getattr(error, "keys", ()))
        said = {"what": "error", "type": type(error).__name__, "message": str(error), "keys": keys, "opening": opening}
        history.append({**said, "seconds": time.monotonic() - history.waiting_since, "epoch": history.epoch})
        raise SystemExit(1) from error


def _loop(job: Any, dataset: Any, history: _Writer, state: Any) -> None:
    from quiver_client import DataLoader

    numbers = {dataset.manifest.key(row): row for row in range(len(dataset))}
    loader = DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.workers,
        seed=job.seed,
        rank=job.rank,
        world_size=job.world_size,
        substitute=job.substitute,
        job=job.name,
    )
    with closing(loader):
        if state is not None:
            loader.load_state_dict(pickle.loads(base64.b64decode(state["loader"])))
            history.epoch = state["epoch"]
        while history.epoch < job.epochs or (job.until_file and not Path(job.until_file).exists()):
            for seconds, batch in _timed(iter(loader), history):
                tier = history.tier(dataset.stats())
                lines = [
                    {
                        "what": "sample",
                        "epoch": history.epoch,
                        "rank": job.rank,
                        "index": numbers[key],
                        "digest": blake3(data).hexdigest(),
                        "tier": tier,
                        "seconds": seconds,
                    }
                    for key, data in zip(batch["__key__"], batch["data"], strict=True)
                ]
                commit = {"loader": _packed(loader.state_dict()), "epoch": history.epoch}
                history.append(*lines, {"what": "commit", "state": commit, "ended_epoch": None})
                if job.pause_seconds:
                    time.sleep(job.pause_seconds)
            history.epoch += 1
            commit = {"loader": _packed(loader.state_dict()), "epoch": history.epoch}
            history.append({"what": "commit", "state": commit, "ended_epoch": history.epoch - 1}, _held())


def _held() -> dict[str, Any]:
    """Return what this process holds."""
    own = psutil.Process()
    return {
        "what": "held",
        "pid": own.pid,
        "descriptors": own.num_fds(),
        "threads": own.num_threads(),
        "memory": own.memory_info().rss,
        "processes": len(own.children(recursive=True)),
    }


def _packed(state: Any) -> str:
    """Return a state as a checkpoint stores it."""
    return base64.b64encode(pickle.dumps(state)).decode()


def _timed(batches: Iterator[Any], history: _Writer) -> Iterator[tuple[float, Any]]:
    """Yield batches with how long each was waited for."""
    while True:
        history.waiting_since = time.monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield time.monotonic() - history.waiting_since, batch


class _Writer:
    """Appends to a history."""

    def __init__(self, job: Any) -> None:
        self.epoch = 0
        self.waiting_since = time.monotonic()
        self._path = Path(job.history)
        self._counts = dict.fromkeys(TIERS, 0)

    def last_state(self) -> Any:
        if not self._path.exists():
            return None
        raw = self._path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):  # half a line, of a process that was killed
            self._path.write_bytes(whole)
        commits = [line for line in whole.splitlines() if b'"what": "commit"' in line]
        return json.loads(commits[-1])["state"] if commits else None

    def append(self, *lines: dict[str, Any]) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())

    def tier(self, stats: dict[str, int]) -> str:
        """Return which tiers delivered since the last batch: with prefetching that is about this batch, not exactly."""
        now = {tier: stats[f"samples_{tier}"] for tier in TIERS}
        moved = [tier for tier in TIERS if now[tier] > self._counts[tier]]
        self._counts = now
        return "+".join(moved) or "ahead"

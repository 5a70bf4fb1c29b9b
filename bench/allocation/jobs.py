"""Jobs of a run: each rank is a forked process with a loop over ``DataLoader``.

A rank emulates an accelerator that works on each batch for a fixed step, while its loop sleeps; then the loop asks for
the next batch. *Idle* is the time for which it waits for one. The rank writes lines of JSON to a
file: four times per second what it has read so far, and one at the end of each epoch.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from bench.allocation.cases import Job

LINE_SECONDS: Final = 0.25
LATE_SECONDS_MAX: Final = 0.2  # that a rank makes up for
END_SECONDS_MAX: Final = 15.0
STEP_SECONDS: Final = 0.15  # about how long a step takes: the batch is chosen for it


@dataclass(frozen=True)
class Rank:
    """What one process does. ``epochs``: how many, 0 for as long as it lives. ``state``: to resume from.

    ``save``: where to write its state once ``save_after`` samples were read; then it ends.
    """

    job: Job
    rank: int
    manifest: str
    cache: str
    log: Path
    epochs: int = 0
    state: Path | None = None
    save: Path | None = None
    save_after: int = 0

    @property
    def batch(self) -> int:
        return max(round(self.job.rate * STEP_SECONDS), 1)


class Running:
    """A started rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=(rank,), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        """Ask it to end. Raises ``SystemExit`` with what it wrote if it had failed."""
        if not self._process.is_alive() and self._process.exitcode not in {0, -signal.SIGKILL}:
            raise SystemExit(f"{self.rank.job.name}: {self.rank.log.with_suffix('.err').read_text()[-3000:]}")
        self._process.terminate()
        self._process.join(END_SECONDS_MAX)
        if self._process.is_alive():
            self.kill()

    def lines(self) -> list[dict[str, Any]]:
        return lines_of(self.rank.log)


def lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


@contextlib.contextmanager
def started(ranks: list[Rank]) -> Iterator[list[Running]]:
    """Start ranks; end them at the end, all at once."""
    running: list[Running] = []
    try:
        running += [Running(rank) for rank in ranks]
        yield running
    finally:
        end_all(running)


def end_all(running: list[Running]) -> None:
    for it in running:
        if it.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(it.pid, signal.SIGTERM)
    for it in running:
        it.end()


# -- in the process of a rank -----------------------------------------------------------------------------------------


def _run(rank: Rank) -> None:
    """Run until asked to end, and then end at once: the run is over, and nobody needs what would be tidied up."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    errors = os.open(rank.log.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    _loop(rank)


def _loop(rank: Rank) -> None:
    from quiver_client import DataLoader, Dataset

    job = rank.job
    dataset = Dataset(rank.manifest, rank.cache)
    who = {"group": job.group or None, "tenant": job.tenant or None}
    known = inspect.signature(DataLoader.__init__).parameters
    identity = {name: value for name, value in who.items() if value and name in known}
    loader = DataLoader(
        dataset,
        batch_size=rank.batch,
        shuffle=True,
        collate_fn=_sizes,
        substitute=not job.ordered,
        seed=sum(job.name.encode()),
        rank=rank.rank,
        world_size=job.ranks,
        job=job.name,
        **identity,
    )
    if rank.state is not None:
        loader.load_state_dict(torch.load(rank.state, weights_only=True)["loader"])
    with contextlib.closing(dataset), contextlib.closing(loader), rank.log.open("w", buffering=1) as log:
        _Loop(rank, log).run(loader)


def _sizes(samples: list[dict[str, Any]]) -> tuple[int, int]:
    return len(samples), sum(len(sample["bin"]) for sample in samples)


class _Loop:
    """The training loop, and what it has come to."""

    def __init__(self, rank: Rank, log: Any) -> None:
        self._rank, self._step, self._log = rank, rank.batch / rank.job.rate, log
        self._samples = self._bytes = 0
        self._idle = 0.0  # seconds for which the accelerator had no batch
        self._told = 0.0

    def run(self, loader: Any) -> None:
        epochs = self._rank.epochs
        free_at = begun = time.monotonic()  # when the accelerator is done with what it has
        self._tell(begun)
        number = 0
        while not epochs or number < epochs:
            began = asked = time.monotonic()
            for count, size in loader:
                now = time.monotonic()
                self._idle += now - asked
                if not self._samples:
                    self._log.write(json.dumps({"first_batch": now - begun, "t": now}) + "\n")
                # That this thread woke up late is no time of the accelerator's: it makes up for it in the next step.
                free_at = max(free_at, asked - LATE_SECONDS_MAX) + (now - asked) + self._step
                self._samples, self._bytes = self._samples + count, self._bytes + size
                time.sleep(max(free_at - time.monotonic(), 0.0))
                if now - self._told >= LINE_SECONDS:
                    self._tell(now)
                if self._rank.save is not None and self._samples >= self._rank.save_after:
                    torch.save({"loader": loader.state_dict()}, self._rank.save)
                    self._tell(time.monotonic())
                    return
                asked = time.monotonic()
            now = time.monotonic()
            self._log.write(json.dumps({"epoch": number, "seconds": now - began, "t": now}) + "\n")
            number += 1
        self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        self._told = now
        told = {"t": now, "samples": self._samples, "bytes": self._bytes, "idle": self._idle}
        self._log.write(json.dumps(told) + "\n")

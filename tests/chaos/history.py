"""Clients that train, in processes of their own, and write down what they were given.

The history of a client is a file of JSON lines. For each batch it appends, in one write, a line for each sample
(``epoch``, ``rank``, ``index``, ``digest`` as computed by BLAKE3 of the bytes that came, ``tier``, ``seconds`` of its
batch), and then a line ``commit`` with the loader's state. A client that was killed and starts again continues from the
last commit; samples after it count as not consumed, as for a trainer that lost them with its weights. An error is a
line, too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from tests.support.scripts import Script
from tests.support.waiting import until

CLIENT = """
import sys
from tests.chaos.training import train
train(sys.argv[1])
"""


@dataclass(frozen=True)
class Job:
    """What a client does."""

    name: str
    manifest: str
    cache: str
    epochs: int = 1
    batch_size: int = 8
    rank: int = 0
    world_size: int = 1
    substitute: bool = True
    workers: int = 0
    seed: int = 0
    pause_seconds: float = 0.0  # between two batches: the training step
    verify: str = "fast"
    until_file: str = ""  # go on with epochs until this file exists
    environment: dict[str, str] = field(default_factory=dict)
    leases_seconds: float = 0.0  # 0: as the client has it


class Sample(NamedTuple):
    epoch: int
    rank: int
    index: int
    digest: str
    tier: str
    seconds: float


@dataclass(frozen=True)
class History:
    """What a client was given."""

    job: Job
    samples: tuple[Sample, ...]
    errors: tuple[dict[str, Any], ...]
    stats: dict[str, int]  # of its last process
    ended: bool
    log: str
    epochs: tuple[int, ...]  # that it ended
    held: tuple[dict[str, int], ...] = ()  # descriptors, threads, … at the end of each epoch, with the process id

    @functools.cached_property
    def _by_epoch(self) -> dict[int, list[Sample]]:
        found: dict[int, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.epoch, []).append(sample)
        return found

    def epoch(self, number: int) -> list[Sample]:
        return self._by_epoch.get(number, [])

    def longest_seconds(self) -> float:
        return max((sample.seconds for sample in self.samples), default=0.0)


def read_history(job: Job, path: Path, log: str = "") -> History:
    """Read a history; of a client that runs or was killed, as far as it is committed."""
    samples: list[Sample] = []
    pending: list[Sample] = []
    errors: list[dict[str, Any]] = []
    stats: dict[str, int] = {}
    epochs: list[int] = []
    held: list[dict[str, int]] = []
    ended = False
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    for raw in lines:
        try:
            line = json.loads(raw)
        except ValueError:  # half a line of a process that was killed, then the first of the next one
            pending.clear()
            continue
        match line["what"]:
            case "sample":
                line["digest"] = sys.intern(line["digest"])  # an epoch later it comes again
                pending.append(Sample(*(line[name] for name in Sample._fields)))
            case "commit":
                samples += pending
                pending.clear()
                if line["ended_epoch"] is not None:
                    epochs.append(line["ended_epoch"])
            case "start":
                pending.clear()
            case "error":
                errors.append(line)
            case "held":
                held.append(line)
            case "end":
                stats, ended = line["stats"], True
    return History(job, tuple(samples), tuple(errors), stats, ended, log, tuple(epochs), tuple(held))


class Client:
    """A running client."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.path = folder / f"{job.name}.{job.rank}.history"
        self._folder = folder
        self._starts = 0
        self._logs: list[Path] = []
        self.script = self._start()

    def _start(self) -> Script:
        config = self._folder / f"{self.job.name}.{self.job.rank}.json"
        log = self._folder / f"{self.job.name}.{self.job.rank}.{self._starts}.log"
        config.write_text(json.dumps({**asdict(self.job), "history": str(self.path), "log": str(log) + ".err"}))
        self._starts += 1
        self._logs += [log, Path(str(log) + ".err")]
        return Script(CLIENT, [config], log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.script.kill()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.script.pid)

    @property
    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self._logs if path.exists())

    def history(self) -> History:
        return read_history(self.job, self.path, self.log)

    def samples(self) -> int:
        """Return how many samples are committed."""
        return len(self.history().samples)

    def kill(self) -> None:
        self.script.kill()

    def resume(self) -> None:
        """Start again after ``kill``, from the last committed state."""
        assert self.script.ended
        self.script = self._start()

    def forget(self) -> None:
        """Remove the files of a client that ended."""
        assert self.script.ended
        for path in (self.path, *self._logs):
            path.unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        self.script.signal(number)

    def wait(self, seconds: float = 60.0) -> History:
        code = self.script.wait(seconds)
        history = self.history()
        assert code == 0, f"{self.job.name} ended with {code}: {history.log[-3000:]}"
        until(lambda: not self.left(), what=f"{self.job.name} left processes: {self.left()}")
        return history

    def left(self) -> list[str]:
        """Return the processes of its session that still live."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.script.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {process.name()}")
        return found

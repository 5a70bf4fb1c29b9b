"""The oracle: what must hold of histories, origin logs, daemons and their logs after a fault, whatever the fault was.

Each raises ``Violation``. ``tests/chaos/test_harness.py`` proves for each that it can fail.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from blake3 import blake3

from quiver.manifest import Manifest
from tests.chaos.history import History
from tests.support.daemon import Daemon
from tests.support.waiting import until

DIGEST_LETTERS: Final = 10  # as much of a digest as nobody would guess
MEMORY_BYTES_MAX: Final = 192 << 20  # by which a daemon may have grown: buffers that it keeps for reuse are bounded
SLACK: Final = {"descriptors": 8, "threads": 40, "memory": MEMORY_BYTES_MAX, "processes": 1, "temporary files": 0}
SETTLE_SECONDS: Final = 45.0  # the longest deadline of a connection that a fault left hanging, and some more


class Violation(AssertionError):
    """A promise was broken."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Violation(message)


@dataclass(frozen=True)
class Expected:
    """What is right, from the files themselves: not from the manifest, which may be wrong too."""

    digests: tuple[str, ...]  # by index
    secrets: frozenset[str]  # the beginnings of all digests that no log may show

    @classmethod
    def of(cls, manifest: Manifest, content: Mapping[str, bytes]) -> Expected:
        digests = tuple(blake3(content[manifest.key(row)]).hexdigest() for row in range(len(manifest)))
        shards = [manifest.shard_digest(number).hex() for number in range(manifest.shard_count)]
        every = [*digests, *shards, manifest.digest.hex()]
        return cls(digests, frozenset(digest[:DIGEST_LETTERS] for digest in every))


def digests_are_right(history: History, expected: Expected) -> None:
    wrong = [sample for sample in history.samples if sample.digest != expected.digests[sample.index]]
    _require(not wrong, f"{history.job.name} was given {len(wrong)} wrong samples, first {wrong[:1]}")


def epochs_are_exact(ranks: Sequence[History], expected: Expected) -> None:
    """Each epoch that all ranks ended contains each sample exactly once; no epoch contains one twice."""
    name = ranks[0].job.name
    ended = set.intersection(*(set(history.epochs) for history in ranks))
    begun = {sample.epoch for history in ranks for sample in history.samples}
    for epoch in sorted(begun | ended):
        counts = Counter(sample.index for history in ranks for sample in history.epoch(epoch))
        twice = sorted(index for index, count in counts.items() if count > 1)
        _require(not twice, f"{name}, epoch {epoch}: {len(twice)} samples came more than once, {twice[:5]} first")
        missing = sorted(set(range(len(expected.digests))) - set(counts))
        _require(
            epoch not in ended or not missing, f"{name}, epoch {epoch}: {len(missing)} are lost, {missing[:5]} first"
        )
    for history in ranks:
        _require(not history.ended or len(ended) >= history.job.epochs, f"{name} ended after epochs {sorted(ended)}")


def has_no_error(history: History) -> None:
    _require(not history.errors, f"{history.job.name} saw {history.errors[:2]}")


def no_wait_exceeds(history: History, seconds: float) -> None:
    longest = history.longest_seconds()
    _require(longest <= seconds, f"{history.job.name} waited {longest:.2f} s for a batch, more than {seconds} s")


def errors_name(history: History, *names: str, within_seconds: float) -> None:
    """The client ended by an error that names all of these, in time."""
    _require(bool(history.errors), f"{history.job.name} saw no error")
    last = history.errors[-1]
    missing = [name for name in names if name not in last["message"] and name not in last["keys"]]
    _require(not missing, f"the error does not name {missing}: {last['message']}")
    _require(last["seconds"] <= within_seconds, f"the error came after {last['seconds']:.1f} s, not {within_seconds}")


def origin_reads_at_most(reads: Mapping[int, float], *, mean: float, worst: float) -> None:
    average, most = sum(reads.values()) / len(reads), max(reads.values())
    _require(average <= mean + 1e-9, f"{average:.3f} origin reads per shard, more than {mean}")
    _require(most <= worst + 1e-9, f"a shard was read {most:.2f} times from the origin, more than {worst}")


def log_is_clean(name: str, log: str, expected: Expected, secrets: Iterable[str] = ()) -> None:
    """No digest, no credential and no traceback is in a log."""
    words = {word[:DIGEST_LETTERS] for word in re.findall(r"[0-9a-f]{10,}", log.lower())}
    leaked = words & expected.secrets
    _require(not leaked, f"the log of {name} shows digests: {[line for line in log.splitlines() if leaked][:1]}")
    for secret in secrets:
        _require(secret not in log, f"the log of {name} shows a credential")
    _require("Traceback" not in log, f"the log of {name} has a traceback: {log[-3000:]}")


def fired(counts: Mapping[str, int], *names: str) -> None:
    """Each of these faults happened."""
    silent = [name for name in names if not counts.get(name)]
    _require(not silent, f"the faults {silent} never fired: {dict(counts)}")


def no_daemon_died(daemons: Mapping[int, Daemon]) -> None:
    """These daemons, which no test ended, run: clients do without one that died, and would not tell."""
    for number, daemon in daemons.items():
        status = daemon.process.poll() if daemon.process is not None else None
        _require(daemon.process is not None and status is None, f"daemon {number} ended with {status}: {daemon.log}")


def client_leaks_nothing(history: History) -> None:
    """No process of a client holds more at the end of its last epoch than at the end of its second one."""
    for pid in {held["pid"] for held in history.held}:
        first, *more = [held for held in history.held if held["pid"] == pid][1:] or [{}]
        for what, slack in SLACK.items():
            grown = more[-1][what] - first[what] if more and what in first else 0
            _require(grown <= slack, f"{history.job.name} holds {grown} more {what} than after its second epoch")


class Leaks:
    """What daemons held before a fault, to be compared with what they hold after it."""

    def __init__(self, daemons: Sequence[Daemon]) -> None:
        self._daemons: list[Daemon] = []
        self._before: dict[int, dict[str, int]] = {}
        self.add(daemons)

    def add(self, daemons: Sequence[Daemon]) -> None:
        """Note what these hold, unless they are known."""
        self._daemons += [daemon for daemon in daemons if daemon not in self._daemons]
        pids = {daemon.process.pid: daemon for daemon in daemons if daemon.process}
        self._before |= {pid: self._held(daemon) for pid, daemon in pids.items() if pid not in self._before}

    @staticmethod
    def _held(daemon: Daemon) -> dict[str, int]:
        assert daemon.process is not None
        process = psutil.Process(daemon.process.pid)
        connected = sum(1 for each in process.net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED)
        held = sum(1 for each in process.open_files() if daemon.data_dir in Path(each.path).parents)  # not evicted ones
        return {
            "descriptors": process.num_fds() - connected - held,
            "threads": process.num_threads(),
            "memory": process.memory_info().rss,
            "processes": len(process.children(recursive=True)),
            "temporary files": len(temporary_files(daemon.data_dir)),
        }

    def found(self) -> list[str]:
        """Return what the daemons that still run hold more than before."""
        more = []
        for number, daemon in enumerate(self._daemons):
            ended = daemon.process is None or daemon.process.poll() is not None
            if ended or daemon.process.pid not in self._before:
                continue  # it was killed, or restarted: it holds nothing of before
            before, now = self._before[daemon.process.pid], self._held(daemon)
            more += [
                f"daemon {number} holds {now[what]} {what}, {before[what]} before"
                for what, slack in SLACK.items()
                if now[what] > before[what] + slack
            ]
        return more

    def check(self, seconds: float = SETTLE_SECONDS) -> None:
        """Wait until the daemons hold no more than before."""
        try:
            until(lambda: not self.found(), seconds)
        except AssertionError:
            raise Violation("; ".join(self.found())) from None


def temporary_files(folder: Path) -> list[Path]:
    """Return files that the write recipe has not given their names yet."""
    return [path for path in (folder / "tmp").rglob("*") if path.is_file()]

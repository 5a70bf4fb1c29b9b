"""Train for hours while everything fails at random: ``python -m tests.chaos.soak --hours 8 --seed 1``.

A soak is made of rounds. In a round jobs train on one rack (with substitution and without, with threads and with
workers, on a cache that holds half of the data) while a mishap strikes every second or so. Then everything is healed,
the jobs have to make progress and end, and all validators run over what they were given. A round that fails ends the
soak: it prints the seed, the round and what had struck. Rounds keep memory bounded, however long the soak is.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos import validators
from tests.chaos.history import Client, History
from tests.chaos.mishaps import Mishaps
from tests.chaos.rack import ChaosRack, Plan, chaos_files
from tests.support.waiting import until

ROUND_SECONDS: Final = 30.0  # in which mishaps strike
PAUSE_SECONDS: Final = (0.2, 1.5)  # between two of them
HEALED_SECONDS_MAX: Final = 90.0  # in which all jobs make progress and end, once everything is well
WAIT_SECONDS_MAX: Final = 60.0  # for one batch, while several things are broken at once
JOBS: Final[tuple[dict[str, Any], ...]] = (
    {"name": "substitutes"},
    {"name": "permutes", "substitute": False, "verify": "full"},
    {"name": "workers", "workers": 2},
)
Say = Callable[[str], None]


@dataclass
class Summary:
    """What a soak went through."""

    seed: int
    rounds: int = 0
    samples: int = 0
    epochs: int = 0
    mishaps: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    corruptions: int = 0
    reopened: int = 0
    longest_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.rounds} rounds, {self.epochs} epochs and {self.samples} samples, all exact;"
            f" {sum(self.mishaps.values())} mishaps of {len(self.mishaps)} kinds, {sum(self.fired.values())} events of"
            f" toxics, {self.corruptions} wrong samples replaced, longest wait for a batch {self.longest_seconds:.1f} s"
        )


class Soak:
    """One rack, and its rounds. ``verify``: the jobs' own, in place of those listed; ``off`` proves the validators."""

    def __init__(self, folder: Path, seed: int, say: Say, verify: str = "") -> None:
        self.folder, self.say, self.verify = folder, say, verify
        self.summary = Summary(seed)
        self._rng = random.Random(seed)
        self._files = chaos_files(folder, 240)
        capacity = int(self._files.total_bytes() * 0.5 / 3) + self._files.manifest.stat().st_size
        self._plan = Plan(seed=seed, etcd=True, capacity=str(capacity), flags=("--drain-seconds", "1"))

    def run(self, seconds: float, round_seconds: float = ROUND_SECONDS) -> Summary:
        """Run rounds for so long. Raises ``AssertionError`` at the first promise that was broken."""
        deadline = time.monotonic() + seconds
        with ChaosRack(self.folder / "rack", self._files, self._plan) as rack:
            mishaps = Mishaps(rack, self._rng)
            leaks = rack.leaks()
            while time.monotonic() < deadline:
                self._round(rack, mishaps, min(round_seconds, max(deadline - time.monotonic(), 5.0)))
                leaks.check()
                leaks.add(rack.alive())  # those that were started in this round
                self._forget(rack)
        self.summary.mishaps = mishaps.struck
        return self.summary

    def _round(self, rack: ChaosRack, mishaps: Mishaps, seconds: float) -> None:
        number = self.summary.rounds
        over = self.folder / f"over{number}"
        jobs = [{**job, **({"verify": self.verify} if self.verify else {})} for job in JOBS]
        seeds = [self._rng.randrange(1 << 30) for _ in jobs]
        clients = [
            rack.client(**job, epochs=1, seed=seed, until_file=str(over), pause_seconds=0.01)
            for job, seed in zip(jobs, seeds, strict=True)
        ]
        mishaps.clients = clients
        for client in clients:
            self._until_more(client, 1)
        struck: list[str] = []
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                struck.append(mishaps.strike())
                self._reopen(clients)
                time.sleep(self._rng.uniform(*PAUSE_SECONDS))  # the mishap takes place meanwhile
            mishaps.heal()
            rack.until_ring_has(len(rack.daemons))
            for client in clients:
                self._until_more(client, 50)
            over.touch()
            until(lambda: self._ended(clients), HEALED_SECONDS_MAX, "the jobs end")
            self._check(rack, [client.wait() for client in clients])
        except AssertionError:
            self.say(f"FAILED with seed {self.summary.seed} in round {number}, after: {', '.join(struck)}")
            raise
        self.say(f"round {number}: {len(struck)} mishaps; {self.summary.epochs} epochs exact so far")

    def _until_more(self, client: Client, count: int) -> None:
        target = client.samples() + count

        def more() -> bool:
            self._reopen([client])
            return client.samples() >= target

        until(more, HEALED_SECONDS_MAX, f"{client.job.name} makes no progress: {client.log[-2000:]}")

    def _reopen(self, clients: list[Client]) -> None:
        """Start jobs again that found no daemon at open: that is an error, and a trainer retries."""
        for client in clients:
            if client.script.ended and not client.history().ended:
                last = (client.history().errors or ({},))[-1]
                if not last.get("opening") or last["type"] != "Unavailable":
                    raise AssertionError(f"{client.job.name} ended: {last} {client.log[-3000:]}")
                self.summary.reopened += 1
                client.resume()

    def _ended(self, clients: list[Client]) -> bool:
        self._reopen(clients)
        return all(client.script.ended for client in clients)

    def _check(self, rack: ChaosRack, histories: list[History]) -> None:
        rack.check(*histories, wait_seconds=WAIT_SECONDS_MAX, errors=True)  # those at opening were seen to
        for history in histories:
            assert history.ended, history.job.name
            self.summary.samples += len(history.samples)
            self.summary.epochs += len(history.epochs)
            self.summary.corruptions += history.stats["corruptions"]
            self.summary.longest_seconds = max(self.summary.longest_seconds, history.longest_seconds())
        self.summary.fired = rack.network.fired() + rack.origin.fired
        self.summary.rounds += 1

    def _forget(self, rack: ChaosRack) -> None:
        """Drop what a round left in memory and on disk."""
        for client in rack.clients:
            client.forget()
        rack.clients.clear()
        rack.origin.reset()
        for daemon in rack.daemons:
            daemon.lines.clear()


def soak(seconds: float, seed: int, folder: Path, say: Say, **more: Any) -> Summary:
    """Run a soak and check at its end that every kind of mishap struck, if it had the time."""
    summary = Soak(folder, seed, say, **more).run(seconds)
    if seconds >= 600:
        validators.fired(summary.fired, "Reset", "Hang", "BitFlip", "Garbage", "LyingLength", "Truncate")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    chosen = parser.parse_args()

    def say(text: str) -> None:
        print(text, flush=True)

    say(f"soak of {chosen.hours} hours; --seed {chosen.seed} replays it")
    folder = Path(tempfile.mkdtemp(prefix="quiver-soak-"))
    try:
        say(str(soak(chosen.hours * 3600, chosen.seed, folder, say)))
    except AssertionError as error:
        say(f"the files are in {folder}")
        sys.exit(f"soak failed: {error}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""Prints the figures of docs/reliability.md that the harness measures: ``python -m tests.chaos.figures [NAME …]``.

    reads       origin reads per shard: without a fault, when one peer of sixteen dies, with a rack split in two
    etcd-away   reads and throughput while etcd is away; --seconds 600 for the ten minutes of the document

Origin reads are counted by the origin, in bytes, and divided by the bytes of the shards. The throughput while etcd is
away is compared with that of a second rack, equal and untouched, that runs at the same time on the same machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.chaos.history import Client
from tests.chaos.rack import ChaosRack, Plan, chaos_files
from tests.support.data import Files
from tests.support.waiting import until

LARGE_RACK: Final = 16
"""Daemons of the rack of which one dies. Its shards, 1/16 of all, have to be read again: more in a smaller rack."""


STEP_SECONDS: Final = 0.01
"""Of training, for each batch of 32 while etcd is away: so short that a job waits for the cache as often as not."""


@dataclass(frozen=True)
class Reads:
    """Origin reads per shard: the mean, and that of the shard that was read most."""

    mean: float
    worst: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} (worst shard {self.worst:.2f})"


def _reads(rack: ChaosRack, *clients: Client) -> Reads:
    rack.check(*[client.wait(120) for client in clients])
    return Reads(*rack.reads_per_shard())


def reads_without_a_fault(where: Path, files: Files, seed: int) -> Reads:
    """Two jobs, two epochs."""
    with ChaosRack(where, files, Plan(seed=seed)) as rack:
        return _reads(rack, rack.client(epochs=2), rack.client(epochs=2))


def many_shards(where: Path) -> Files:
    """Return a dataset of some two hundred small shards, so that each of sixteen daemons owns a few."""
    return chaos_files(where, 1600, low=1_500, high=2_500, shard_bytes="16KiB")


def reads_when_a_peer_dies(where: Path, files: Files, seed: int) -> Reads:
    """Two jobs; one of sixteen daemons is killed in the second epoch, when all is resident."""
    with ChaosRack(where, files, Plan(daemons=LARGE_RACK, seed=seed, etcd=True, ttl_seconds=10.0)) as rack:
        clients = [rack.client(epochs=4, pause_seconds=0.02) for _ in range(2)]
        until(lambda: min(client.samples() for client in clients) > 1.2 * len(rack.manifest), 120)
        before, _ = rack.reads_per_shard()
        held = [len(daemon.files()) for daemon in rack.daemons]
        rack.kill(held.index(sorted(held)[len(held) // 2]))
        after = _reads(rack, *clients)
        assert after.mean > before, "the death cost something"
        return Reads(1 + after.mean - before, after.worst)


def reads_of_a_split_rack(where: Path, files: Files, seed: int) -> Reads:
    """Two halves of two daemons, each with its own ring; a job in each, and one that knows all addresses."""
    with ChaosRack(where, files, Plan(daemons=4, seed=seed, rings=((0, 1), (0, 1), (2, 3), (2, 3)))) as rack:
        caches = [rack.proxies[0].url, rack.proxies[3].url, rack.cache]
        return _reads(rack, *[rack.client(epochs=2, cache=cache) for cache in caches])


@dataclass(frozen=True)
class Away:
    """What a job saw while etcd was away, and what its twin saw in a rack whose etcd was there."""

    seconds: float
    failed_reads: int
    samples_per_second: float
    throughput: float  # of the twin's, as a ratio, divided by the same ratio before and after
    fallbacks: tuple[int, int]  # shards that were read elsewhere than asked first: the job's, and its twin's

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s: failed reads {self.failed_reads}, {self.samples_per_second:.0f} samples/s,"
            f" throughput {100 * self.throughput:.1f} % of that of a rack with etcd; shards read elsewhere"
            f" {self.fallbacks[0]}, with etcd {self.fallbacks[1]}"
        )


def etcd_away(where: Path, files: Files, seed: int, seconds: float) -> Away:
    """Kill etcd for so long, and compare. Raises if anything that was read is wrong or lost."""
    with contextlib.ExitStack() as stack:
        names = ("away", "there")
        racks = [stack.enter_context(ChaosRack(where / name, files, Plan(seed=seed, etcd=True))) for name in names]
        over = where / "over"
        job: dict[str, Any] = {"epochs": 1, "batch_size": 32, "pause_seconds": STEP_SECONDS, "until_file": str(over)}
        clients = [rack.client(**job) for rack in racks]
        until(lambda: all(client.samples() >= 4 * len(files.content) for client in clients), 60)
        before = _rates(clients, max(seconds / 10, 5.0))
        etcd = racks[0].etcd
        assert etcd is not None
        etcd.kill()
        during = _rates(clients, seconds)
        age = min(daemon.metric("quiver_ring_age_seconds") for daemon in racks[0].daemons)
        assert age > seconds * 0.9, "etcd was away all the time"
        etcd.start()
        after = _rates(clients, max(seconds / 10, 5.0))
        over.touch()
        histories = [client.wait(120) for client in clients]
        for rack, history in zip(racks, histories, strict=True):
            rack.check(history)
        usual = sum(each[0] for each in (before, after)) / sum(each[1] for each in (before, after))
        fallbacks = histories[0].stats["fallbacks"], histories[1].stats["fallbacks"]
        ratio = during[0] / during[1] / usual
        return Away(seconds, len(histories[0].errors), during[0], ratio, fallbacks)


def _rates(clients: list[Client], seconds: float) -> list[float]:
    """Return how many samples per second each client consumed in this time."""
    counts = [_Count(client.path) for client in clients]
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < seconds:
        time.sleep(min(1.0, seconds - passed))
        for client in clients:
            assert not client.script.ended, client.log[-3000:]
    return [count.more() / passed for count in counts]


class _Count:
    """Counts the samples that are appended to a history, without parsing it."""

    def __init__(self, path: Path) -> None:
        self._path, self._from = path, path.stat().st_size

    def more(self) -> int:
        with self._path.open("rb") as file:
            file.seek(self._from)
            return sum(line.count(b'"what": "sample"') for line in file)


FIGURES: Final = ("reads", "etcd-away")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(FIGURES)}; all if none is given")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long etcd is away")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(FIGURES):
        parser.error(f"no such figures: {sorted(unknown)}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="quiver-figures-") as made:
        where = Path(made)
        if "reads" in (chosen.names or FIGURES):
            files, many = chaos_files(where / "small"), many_shards(where / "many")
            found["origin reads per shard, no fault"] = reads_without_a_fault(where / "1", files, chosen.seed)
            dies = reads_when_a_peer_dies(where / "2", many, chosen.seed)
            found[f"origin reads per shard, one peer of {LARGE_RACK} dies"] = dies
            found["origin reads per shard, split in two"] = reads_of_a_split_rack(where / "3", files, chosen.seed)
        if "etcd-away" in (chosen.names or FIGURES):
            files = chaos_files(where / "away", 240)
            found["etcd away"] = etcd_away(where / "4", files, chosen.seed, chosen.seconds)
    if chosen.json:
        sys.stdout.write(json.dumps({name: vars(value) for name, value in found.items()}) + "\n")
    else:
        sys.stdout.writelines(f"{name}: {value}\n" for name, value in found.items())


if __name__ == "__main__":
    main()

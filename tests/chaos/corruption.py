"""``python -m tests.chaos.corruption --reads 1000000 --corruptions 10000``: is a wrong byte ever handed out?

Samples are read through each kind of cache, while what the caches hold is corrupted:

    embedded   a folder of this process; its files are changed at rest, where they are mapped
    host       files that a daemon passes over its socket; the same
    rack       a daemon over TCP: its files at rest, and bits in flight by a proxy
    liar       a peer that answers well-formed lies: bytes of another sample, and bytes forged so that XXH3 agrees

Each sample that is read is compared with the file that it was made of. A seed replays a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from quiver.peer import PeerClient
from quiver.wire import FillRequest, RangeStatus, ReadRequest
from quiver_client import Dataset
from tests.chaos.proxy import Network, Proxy
from tests.chaos.toxics import BitFlip
from tests.client.test_faults import Fake
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files
from tests.support.etcd import free_ports
from tests.support.forgery import forged
from tests.support.servers import ok
from tests.support.waiting import until

SAMPLES: Final = 3000
SAMPLE_BYTES: Final = (1100, 1500)  # a forgery needs 1,088
BATCH: Final = 250
FLIP_CHANCE: Final = 0.05  # of each piece of an answer that passes the proxy
LIE_EVERY: Final = 3  # requests
BLOCK_BYTES: Final = 4096
REST_BATCHES: Final = 8  # a cache is corrupted, then read so often, and corrupted again


@dataclass
class Cache:
    """A cache to corrupt, and the dataset that reads through it."""

    name: str
    dataset: Dataset
    folder: Path | None = None  # whose files are corrupted at rest
    reads: int = 0
    wrong: int = 0
    injected: Counter[str] = field(default_factory=Counter)

    def shards(self) -> list[Path]:
        return sorted((self.folder / "shards").glob("*/*")) if self.folder is not None else []


def corrupt(paths: list[Path], chance: random.Random) -> str:
    """Corrupt one of the files; return how."""
    path = chance.choice(paths)
    how = chance.choice(("bit flipped", "truncated", "other shard's bytes", "zeros", "file replaced"))
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        at = chance.randrange(max(size, 1))
        match how:
            case "bit flipped":
                byte = os.pread(file.fileno(), 1, at) or b"\0"
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << chance.randrange(8)]), at)
            case "truncated":
                os.truncate(path, at)
            case "other shard's bytes":
                os.pwrite(file.fileno(), chance.choice(paths).read_bytes()[:size], 0)
            case "zeros":
                os.pwrite(file.fileno(), bytes(min(BLOCK_BYTES, size - at)), at)
            case "file replaced":
                other = path.with_name("other")
                other.write_bytes(chance.choice(paths).read_bytes()[:size].ljust(size, b"\0"))
                other.replace(path)
    return how


class Liar:
    """A peer that speaks the protocol and lies about a sample now and then."""

    def __init__(self, files: Files, chance: random.Random) -> None:
        manifest = files.opened()
        tables = manifest.tables
        self._chance = chance
        self._forged = {data: forged(data, b"a lie") for data in files.content.values()}
        self._lengths = {len(data) for data in files.content.values()}
        self.lies: Counter[str] = Counter()
        self.requests = 0
        self.fake = Fake(files, self._answer)
        assert len(tables.shard_sizes) > 10

    def _answer(self, fake: Fake, request: ReadRequest, connection: Any) -> None:
        statuses, body = fake.honest(request)
        self.requests += 1
        if self.requests % LIE_EVERY == 0:
            lengths = request.ranges["length"].tolist()
            at = self._chance.randrange(len(lengths))
            start = sum(lengths[:at])
            sample = body[start : start + lengths[at]]
            if sample in self._forged and self._chance.random() < 0.7:
                lie, how = self._forged[sample], "forged"
            else:
                lie, how = bytes(len(sample)), "made up"
            body = body[:start] + lie + body[start + lengths[at] :]
            self.lies[how] += 1
        connection.sendall(ok(statuses + body))


class Run:
    """Reads and corrupts until both counts are reached."""

    def __init__(self, files: Files, folder: Path, seed: int) -> None:
        self.files, self._folder = files, folder
        self.chance = random.Random(seed)
        manifest = files.opened()
        self._truth = [files.content[manifest.key(row)] for row in range(len(manifest))]
        self._rows = np.random.default_rng(seed)
        self.caches: list[Cache] = []
        self.daemons: list[Daemon] = []
        self.liar = Liar(files, random.Random(seed + 1))

    @contextlib.contextmanager
    def open(self, seed: int) -> Iterator[None]:
        files, folder, port = self.files, self._folder, free_ports(1)[0]
        with contextlib.ExitStack() as stack:
            host = Daemon(folder / "host", "--socket", str(folder / "socket"), origins=[files.folder])
            network = stack.enter_context(Network(seed))
            self.proxy: Proxy = network.proxy("rack", f"http://127.0.0.1:{port}")
            rack = Daemon(folder / "rack", "--advertise", self.proxy.url, origins=[files.folder], port=port)
            self.daemons = [stack.enter_context(host), stack.enter_context(rack)]
            stack.enter_context(self.liar.fake.server)
            for daemon in self.daemons:
                self._fill(daemon)
            embedded = f"file://{folder}/embedded?capacity=1GiB"
            for name, cache, where in (
                ("embedded", embedded, folder / "embedded"),
                ("host", host.url, folder / "host"),
                ("rack", self.proxy.url, folder / "rack"),
                ("liar", self.liar.fake.url, None),
            ):
                dataset = Dataset(files.manifest, cache, fields=["data"], verify="full" if name == "liar" else "fast")
                stack.enter_context(contextlib.closing(dataset))
                self.caches.append(Cache(name, dataset, where))
                dataset.__getitems__(range(len(dataset)))  # all is mapped
            self.proxy.add(BitFlip(chance=FLIP_CHANCE))
            yield

    def _fill(self, daemon: Daemon) -> None:
        """Have all resident before anything is corrupted. Patiently: a machine that runs other tests is slow."""
        manifest = self.files.opened()
        shards = tuple(map(manifest.shard_digest, range(manifest.shard_count)))
        with contextlib.closing(PeerClient(daemon.url)) as peer:
            peer.put_manifest(manifest.digest, manifest.content)
            until(lambda: set(peer.fill(FillRequest(manifest.digest, shards, 1000))) == {RangeStatus.PRESENT}, 60)

    def injected(self) -> int:
        at_rest = sum(cache.injected.total() for cache in self.caches)
        return at_rest + self.liar.lies.total() + self.proxy.fired["BitFlip"]

    def read(self, cache: Cache) -> None:
        """Read a batch and compare it with the truth."""
        rows = self._rows.integers(0, len(self._truth), BATCH).tolist()
        for row, sample in zip(rows, cache.dataset.__getitems__(rows), strict=True):
            cache.wrong += sample["data"] != self._truth[row]
        cache.reads += BATCH

    def run(self, reads: int, corruptions: int) -> None:
        """Read and corrupt: as much of the corruptions as of the reads is done at any time."""
        done = number = 0
        while done < reads:
            cache = self.caches[number // REST_BATCHES % len(self.caches)]
            if number % REST_BATCHES == 0 and (paths := cache.shards()):
                while self.injected() < corruptions * min((done + BATCH * REST_BATCHES * len(self.caches)) / reads, 1):
                    cache.injected[corrupt(paths, self.chance)] += 1
            self.read(cache)
            done += BATCH
            number += 1

    def figures(self) -> dict[str, Any]:
        kinds: Counter[str] = Counter()
        for cache in self.caches:
            kinds += cache.injected
        kinds += Counter(self.liar.lies) + Counter({"bit flipped in flight": self.proxy.fired["BitFlip"]})
        stats = {cache.name: cache.dataset.stats() for cache in self.caches}
        met = sum(each["corruptions"] for each in stats.values())
        found = sum(daemon.metric("quiver_corruptions_total") for daemon in self.daemons)
        return {
            "reads": sum(cache.reads for cache in self.caches),
            "corruptions": self.injected(),
            "met by readers": met,
            "found by daemons": int(found),
            "wrong": sum(cache.wrong for cache in self.caches),
            "kinds": dict(sorted(kinds.items())),
            "caches": {
                cache.name: {
                    "reads": cache.reads,
                    "wrong": cache.wrong,
                    "met": stats[cache.name]["corruptions"],
                    **{f"from {tier}": stats[cache.name][f"samples_{tier}"] for tier in ("host", "rack", "origin")},
                }
                for cache in self.caches
            },
        }


def measure(folder: Path, reads: int, corruptions: int, seed: int) -> dict[str, Any]:
    """Run in a folder; return the figures."""
    chance = np.random.default_rng(seed)
    content = {f"{at:05}.bin": chance.bytes(int(chance.integers(*SAMPLE_BYTES))) for at in range(SAMPLES)}
    files = make_files(folder, content, shard_bytes="32KiB", layout="mixed")
    run = Run(files, folder, seed)
    begun = time.monotonic()
    with run.open(seed):
        run.run(reads, corruptions)
        figures = run.figures()
    return {**figures, "seed": seed, "seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.corruption", description=__doc__)
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--corruptions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quiver-corruption-") as folder:
        figures = measure(Path(folder), arguments.reads, arguments.corruptions, arguments.seed)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    sys.exit(figures["wrong"] > 0)


if __name__ == "__main__":
    main()

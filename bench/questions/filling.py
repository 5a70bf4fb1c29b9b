"""What a fill costs the daemon: CPU seconds per GB, of shards that it fills from a tar on this machine."""

from __future__ import annotations

import io
import shutil
import tarfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from bench.data import SHARD_BYTES, Data
from bench.measure import TICKS_A_SECOND, process_stat
from bench.questions.base import Answer, Question, Ratio, Setting
from bench.servers import quiver_rack
from quiver.errors import Unavailable
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.wire import RANGE, RangeStatus, ReadRequest
from quiver_client import index

SMALL_BYTES: Final = 4_096
SMALL_COUNT: Final = 65_536
SMALL_COUNT_QUICK: Final = 8_192
SHARDS_AT_ONCE: Final = 8  # more than a daemon fills at once, so that none of its fill threads waits for us
WAIT_MS: Final = 10_000


@dataclass(frozen=True)
class Filled:
    """What filling a dataset once took the daemon."""

    bytes: int
    seconds: float
    user_seconds: float
    system_seconds: float
    page_faults: int
    blocked_seconds: float  # on a disk; of all threads together

    @property
    def cpu_seconds_per_gb(self) -> float:
        return (self.user_seconds + self.system_seconds) / self.bytes * 1e9


def fill(setting: Setting) -> Answer:
    """A daemon is started for each round, fills every shard once, and is asked for one byte of each."""
    answer = Answer()
    for data in (
        setting.data(),
        setting.data(count=SMALL_COUNT_QUICK if setting.quick else SMALL_COUNT, sample_bytes=SMALL_BYTES),
    ):
        manifest = tarred(data)
        rounds = []
        for at in range(setting.rounds):
            setting.say(f"samples of {data.sample_bytes} bytes, round {at + 1}")
            rounds.append(_filled(setting.folder / f"fill-{data.sample_bytes}-{at}", data, manifest))
        label = f"samples of {data.sample_bytes} bytes"
        answer.more[label] = [asdict(one) for one in rounds]
        answer.ratios += _figures(label, rounds)
    return answer


def _figures(label: str, rounds: list[Filled]) -> list[Ratio]:
    each = tuple(one.cpu_seconds_per_gb for one in rounds)
    system = median(one.system_seconds / one.bytes * 1e9 for one in rounds)
    faults = median(one.page_faults / one.bytes * 1e9 for one in rounds)
    rate = median(one.bytes / one.seconds for one in rounds) / 1e9
    note = f"{system:.2f} s of it in the kernel, {faults:,.0f} page faults; filled at {rate:.2f} GB/s"
    return [
        Ratio(f"CPU of a daemon per GB filled from a local tar, {label}", median(each), unit=" s", each=each, note=note)
    ]


def _filled(folder: Path, data: Data, manifest: Path) -> Filled:
    room = 2 * data.total_bytes + (256 << 20)
    opened = Manifest.open(manifest)
    with quiver_rack(folder, data.folder, room, count=1) as (urls, (server,)):
        peer = PeerClient(urls[0])
        try:
            peer.put_manifest(opened.digest, manifest.read_bytes())
            before, begun = process_stat(server.pid), time.monotonic()
            for first in range(0, opened.shard_count, SHARDS_AT_ONCE):
                _ask(peer, opened, range(first, min(first + SHARDS_AT_ONCE, opened.shard_count)))
            seconds, after = time.monotonic() - begun, process_stat(server.pid)
        finally:
            peer.close()
    shutil.rmtree(folder)  # what one round leaves in the page cache must not make memory scarce, or fresh, for the next
    # Fields of /proc/PID/stat from the state on: minor faults, user and system time, time blocked on a disk.
    faults, user, system, blocked = (int(after[at]) - int(before[at]) for at in (7, 11, 12, 39))
    total = int(opened.tables.shard_sizes.sum())
    return Filled(total, seconds, user / TICKS_A_SECOND, system / TICKS_A_SECOND, faults, blocked / TICKS_A_SECOND)


def _ask(peer: PeerClient, manifest: Manifest, shards: range) -> None:
    """Read one byte of each of the shards, asking again until all of them are there. Raises ``Unavailable``."""
    digests = tuple(manifest.shard_digest(number) for number in shards)
    ranges = np.zeros(len(digests), RANGE)
    ranges["shard"], ranges["length"] = np.arange(len(digests)), 1
    while True:
        statuses, _ = peer.read(ReadRequest(manifest.digest, digests, ranges, wait_ms=WAIT_MS))
        if (statuses == RangeStatus.PRESENT).all():
            return
        if not np.isin(statuses, (RangeStatus.PRESENT, RangeStatus.FILLING)).all():
            raise Unavailable(peer.url, f"did not fill: statuses {statuses.tolist()}")


def tarred(data: Data) -> Path:
    """Return the manifest of the data as members of one tar, which is made with it."""
    folder, target = data.folder / "tar", data.folder / "tar.quiver"
    folder.mkdir()
    with tarfile.open(folder / "data.tar", "w") as archive:
        for number in range(data.count):
            content = data.sample(number)
            member = tarfile.TarInfo(f"{number:08}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    index(str(folder), target, format="webdataset", shard_bytes=SHARD_BYTES)
    return target


QUESTIONS = (Question("fill", "What CPU does a GB cost a daemon that fills from a local tar?", fill),)

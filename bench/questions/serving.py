"""How a rack behaves when shared: many readers, a scan of cold shards, memory, a first epoch."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.arena import Entry
from bench.data import Data
from bench.load import Load, bring_in, put_on
from bench.peers.base import Work
from bench.peers.nginx import Nginx
from bench.questions.base import BATCH, Answer, Question, Ratio, Setting, compare, speed_ratio
from bench.servers import LOOPBACK, CannotRun, Server, free_ports, quiver_rack
from bench.stall import ONCE, SCAN_BATCH, SCANS, Scan, Shelf

READERS: Final = (1, 2, 4, 8)
SAMPLED_EVERY_SECONDS: Final = 0.02
ORIGIN_BYTES_A_SECOND: Final = 100_000_000
ORIGIN_LATENCY_MS: Final = 10


@contextlib.contextmanager
def warm_rack(setting: Setting, data: Data) -> Iterator[tuple[str, list[Server]]]:
    """Run three daemons that hold the data; yield ``cache=`` and the daemons."""
    with quiver_rack(setting.folder / "rack", data.folder, 2 * data.total_bytes + (256 << 20)) as (urls, servers):
        setting.say("filling the rack with the data")
        bring_in(",".join(urls), str(data.manifest()))
        yield ",".join(urls), servers


def readers(setting: Setting) -> Answer:
    data = setting.data()
    seconds = 1.0 if setting.quick else 8.0
    counts = READERS[:2] if setting.quick else READERS
    rounds: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    with warm_rack(setting, data) as (cache, _):
        for at in range(min(setting.rounds, 3)):
            for count in counts:
                setting.say(f"round {at + 1}, {count} readers")
                rounds[count].append(put_on(Load(cache, str(data.manifest()), count, seconds, BATCH)).encode())
    answer = Answer(configuration={"samples": data.count, "seconds": seconds, "batch_size": BATCH})
    answer.more["by_readers"] = rounds
    single = median(one["bytes_a_second"] for one in rounds[1])
    for count, outcomes in rounds.items():
        total = median(one["bytes_a_second"] for one in outcomes)
        even = tuple(one["evenness"] for one in outcomes)
        note = f"{total / 1e9:.2f} GB/s together"
        answer.ratios.append(Ratio(f"throughput of {count} readers ÷ of one", total / single, note=note))
        if count > 1:
            answer.ratios.append(Ratio(f"the slowest of {count} readers ÷ the fastest", median(even), each=even))
    return answer


def stall(setting: Setting) -> Answer:
    """One daemon, so that the scan and the hot reads compete fully. ``bench.stall`` defines cold."""
    data = setting.data()
    seconds = 1.0 if setting.quick else 6.0
    answer = Answer(configuration={"samples": data.count, "seconds": seconds, "scan_batch": SCAN_BATCH})
    shelf = Shelf(setting.folder / "shelf", data.folder, data.manifest(), 2 * data.total_bytes + (256 << 20))
    with shelf.daemon() as (url, _):
        setting.say("bringing the data in")
        bring_in(url, str(shelf.manifest))
    rounds: dict[Scan, dict[int, dict[str, float]]] = {scan: {} for scan in SCANS}
    for at in range(setting.rounds):
        for scan, taken in rounds.items():
            setting.say(f"round {at + 1}, scan: {scan}")
            try:
                taken[at] = shelf.measure(scan, seconds)
            except CannotRun as error:
                answer.absent[f"scan: {scan}"] = str(error)
    answer.more["by_scan"] = {scan: list(taken.values()) for scan, taken in rounds.items()}
    for scan, taken in rounds.items():
        if taken:
            answer.ratios += _felt(scan, list(taken.values()))
    for name, figure in (("a hot read", "p99_ms"), ("an answer of the loop", "loop_p99_ms")):
        for scan in ONCE:
            warm = rounds["warm"]
            each = tuple(slow[figure] / warm[at][figure] for at, slow in rounds[scan].items() if at in warm)
            if each:
                label = f"p99 of {name} beside a scan that is {scan} ÷ beside a warm one"
                answer.ratios.append(Ratio(label, median(each), each=each))
    return answer


def _felt(scan: Scan, taken: list[dict[str, float]]) -> Iterator[Ratio]:
    """Yield the latencies of hot reads during one kind of scan, and how cold the scanned shards were."""
    middle = {name: median(one[name] for one in taken) for name in taken[0]}
    note = f"p50 {middle['p50_ms']:.2f} ms"
    if scan != "none":
        absent, scanned, read = (middle[name] / 1e6 for name in ("absent_bytes", "scanned_bytes", "disk_bytes"))
        note += f"; scan at {middle['scan_bytes_a_second'] / 1e9:.2f} GB/s; of {scanned:.0f} MB {absent:.0f} not in"
        note += f" memory before, {read:.0f} read from disk"
    yield Ratio(f"p99 of a hot read, scan: {scan}", middle["p99_ms"], unit="ms", note=note)
    note = f"p50 {middle['loop_p50_ms']:.2f} ms"
    yield Ratio(f"p99 of an answer of the daemon's loop, scan: {scan}", middle["loop_p99_ms"], unit="ms", note=note)


def memory(setting: Setting) -> Answer:
    data = setting.data()
    seconds = 2.0 if setting.quick else 15.0
    with warm_rack(setting, data) as (cache, servers):
        idle = [own_memory(server.pid) for server in servers]
        with Sampler([server.pid for server in servers]) as sampler:
            outcome = put_on(Load(cache, str(data.manifest()), 4, seconds, BATCH))
    peak = max(sampler.anonymous_bytes)
    answer = Answer(configuration={"samples": data.count, "seconds": seconds, "readers": 4})
    answer.more |= {
        "idle": idle,
        "peak_anonymous_bytes": sampler.anonymous_bytes,
        "peak_unique_bytes": sampler.unique_bytes,
        "load": outcome.encode(),
    }
    note = f"at {outcome.bytes_a_second / 1e9:.2f} GB/s; idle {max(one['anonymous'] for one in idle) / 1e6:.0f} MB"
    answer.ratios.append(Ratio("a daemon's memory beyond the page cache, peak", peak / 1e6, 150, "≤", "MB", note=note))
    return answer


def cold(setting: Setting) -> Answer:
    """Twice: an origin with the bandwidth and latency of an object store as a rack sees it, and one without a limit."""
    data = setting.data()
    data.files()
    data.manifest()
    answer = Answer()
    with slow_origin(setting.folder, data) as origin:
        _cold(setting, data, answer, origin, f"an origin of {ORIGIN_BYTES_A_SECOND // 10**6} MB/s", 0.95)
    try:
        with fast_origin(setting.folder, data) as origin:
            _cold(setting, data, answer, origin, "an origin without a limit on the same cores", None)
    except CannotRun as error:
        answer.absent["nginx as origin"] = str(error)
    return answer


def _cold(setting: Setting, data: Data, answer: Answer, origin: str, label: str, reach: float | None) -> None:
    entries = [Entry(peer, f"{peer}, {label}", {"origin": origin}) for peer in ("quiver-cold", "origin")]
    named = {one.peer: one.shown for one in entries}
    told = compare(setting, data, BATCH, entries)
    speed_ratio(told, "cold first epoch", [named["quiver-cold"]], [named["origin"]], reach)
    answer.ratios += told.ratios
    answer.contenders |= told.contenders
    answer.absent |= told.absent
    answer.configuration |= told.configuration


@contextlib.contextmanager
def slow_origin(folder: Path, data: Data) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "bench.origin", str(data.files()), str(port)]
    with Server(command, folder / "origin.log") as server:
        server.wait_for_port(port)
        url = f"http://{LOOPBACK}:{port}/"
        urllib.request.urlopen(f"{url}-/limit/{ORIGIN_BYTES_A_SECOND}/{ORIGIN_LATENCY_MS}").close()
        yield url


@contextlib.contextmanager
def fast_origin(folder: Path, data: Data) -> Iterator[str]:
    peer = Nginx(Work(data, BATCH, folder / "nginx-origin"))
    try:
        peer.check()
        peer.prepare()
        yield peer.url
    finally:
        peer.close()


class Sampler:
    """Samples the memory of processes and keeps the peaks."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.anonymous_bytes = [0] * len(pids)
        self.unique_bytes = [0] * len(pids)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLED_EVERY_SECONDS):
            for at, pid in enumerate(self._pids):
                own = own_memory(pid)
                self.anonymous_bytes[at] = max(self.anonymous_bytes[at], own["anonymous"])
                self.unique_bytes[at] = max(self.unique_bytes[at], own["unique"])


def own_memory(pid: int) -> dict[str, int]:
    """Return a process's anonymous bytes, and its private bytes, including those of files that only it has mapped."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return {
        "anonymous": kib["Anonymous"] << 10,
        "unique": (kib["Private_Clean"] + kib["Private_Dirty"]) << 10,
    }


QUESTIONS = (
    Question("cold", "A first epoch through an empty rack: how close to reading the origin directly?", cold),
    Question("memory", "What memory does a daemon take, beyond the page cache, while it serves at full rate?", memory),
    Question("readers", "Many readers and three daemons: does throughput hold, and is it shared evenly?", readers),
    Question("stall", "How much does a scan of cold shards delay a reader of hot samples?", stall),
)

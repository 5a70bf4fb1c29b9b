"""One daemon and as many readers as a rack has: what those cost that are connected, and how those share that read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.arena import ROOT
from bench.load import bring_in
from bench.questions.base import BATCH, Answer, Question, Ratio, Setting
from bench.questions.serving import Sampler
from bench.servers import quiver_rack
from bench.stream_load import put_on_streams

CONNECTED: Final = 2_000
READING: Final = 32
READERS: Final = (1, 2, 4, 8, 16, 32, 64)
WOKEN: Final = (1, 64)  # connections that take turns


def connected(setting: Setting) -> Answer:
    data = setting.data()
    seconds = 1.0 if setting.quick else 6.0
    idle = (200 if setting.quick else CONNECTED) - READING
    answer = Answer(configuration={"samples": data.count, "seconds": seconds, "batch_size": BATCH, "idle": idle})
    alone: list[dict[str, float]] = []
    among: list[dict[str, float]] = []
    by_readers: dict[int, list[dict[str, float]]] = {count: [] for count in READERS[:: 3 if setting.quick else 1]}
    capacity = 2 * data.total_bytes + (256 << 20)
    with quiver_rack(setting.folder / "rack", data.files(), capacity, count=1) as ((url,), (server,)):
        setting.say("filling the daemon")
        bring_in(url, str(data.manifest()))
        with Sampler([server.pid]) as sampler:
            for at in range(setting.rounds):
                setting.say(f"round {at + 1}, {READING} readers alone, and of {idle + READING}")
                alone.append(put_on_streams(url, data, BATCH, READING, seconds))
                among.append(put_on_streams(url, data, BATCH, READING, seconds, idle))
            threads = threads_of(server.pid)
        for at in range(min(setting.rounds, 3)):
            for count, taken in by_readers.items():
                setting.say(f"round {at + 1}, {count} readers")
                taken.append(put_on_streams(url, data, BATCH, count, seconds))
    answer.more |= {"alone": alone, "among": among, "by_readers": by_readers}
    each = tuple(one["bytes_a_second"] / other["bytes_a_second"] for one, other in zip(among, alone, strict=True))
    note = f"{median(one['bytes_a_second'] for one in among) / 1e9:.2f} GB/s"
    name = f"throughput of {READING} readers, {idle + READING:,} connected ÷ {READING} connected"
    answer.ratios.append(Ratio(name, median(each), 0.95, each=each, note=note))
    memory = sampler.anonymous_bytes[0] / 1e6
    answer.ratios.append(Ratio("the daemon's memory beyond the page cache, peak", memory, 150, "≤", "MB"))
    answer.ratios.append(Ratio("the daemon's threads", threads, 64, "≤"))
    speeds = {count: median(one["bytes_a_second"] for one in taken) for count, taken in by_readers.items()}
    shown = ", ".join(f"{count}: {speed / 1e9:.2f}" for count, speed in speeds.items())
    worst = min(speeds.values()) / max(speeds.values())
    answer.ratios.append(Ratio(f"1 … {max(speeds)} readers, least throughput ÷ best", worst, 0.8, note=f"GB/s {shown}"))
    for count, taken in by_readers.items():
        if count > 1:
            even = tuple(one["evenness"] for one in taken)
            answer.ratios.append(Ratio(f"the slowest of {count} readers ÷ the fastest", median(even), 0.8, each=even))
    return answer


def wakeup(setting: Setting) -> Answer:
    seconds = 0.5 if setting.quick else 3.0
    answer = Answer(configuration={"seconds": seconds})
    for connections in WOKEN:
        rounds: dict[str, list[dict[str, Any]]] = {"poller": [], "threads": []}
        for at in range(setting.rounds):
            for how, taken in rounds.items():
                setting.say(f"round {at + 1}, {connections} connections, {how}")
                command = [sys.executable, "-m", "bench.wakeup", how, str(connections), str(seconds)]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
                taken.append(json.loads(done.stdout))
        answer.more[f"{connections} connections"] = rounds
        for figure, what in (("us", "a request takes"), ("cpu_us", "CPU per request")):
            pairs = zip(rounds["poller"], rounds["threads"], strict=True)
            each = tuple(one[figure] - other[figure] for one, other in pairs)
            one, other = (median(taken[figure] for taken in rounds[how]) for how in rounds)
            name = f"{what}, poller − a thread per connection, {connections} in turn"
            answer.ratios.append(Ratio(name, median(each), unit="µs", each=each, note=f"{one:.1f} − {other:.1f} µs"))
    return answer


def threads_of(pid: int) -> int:
    found = re.search(r"^Threads:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


QUESTIONS = (
    Question("connected", "2,000 readers connected to one daemon, of which 1 … 64 read: what do they get?", connected),
    Question("wakeup", "What does a wake-up by the poller cost beside a thread that blocks?", wakeup),
)

"""Which costs grow with the rack, the dataset and the sample, and which must not."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any, Final

from bench.arena import ROOT, Entry
from bench.questions.base import Answer, Question, Ratio, Setting, compare

PEERS: Final = (30, 1_000)
SAMPLES: Final = (1_300_000, 130_000_000)
SAMPLES_QUICK: Final = (13_000, 1_300_000)
SIZES: Final = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 110_000, 256 << 10, 1 << 20, 4 << 20)
SIZES_QUICK: Final = (4 << 10, 110_000)
BATCH_BYTES: Final = 16 << 20


def plan(setting: Setting) -> Answer:
    samples = SAMPLES_QUICK if setting.quick else SAMPLES
    places = [(PEERS[0], samples[0]), (PEERS[1], samples[0]), (PEERS[0], samples[1]), (PEERS[1], samples[1])]
    rounds: dict[str, list[dict[str, float]]] = {f"{peers} peers, {count} samples": [] for peers, count in places}
    for at in range(min(setting.rounds, 3)):
        for (peers, count), taken in zip(places, rounds.values(), strict=True):
            setting.say(f"round {at + 1}, {peers} peers, {count:,} samples")
            command = [sys.executable, "-m", "bench.planning", str(peers), str(count)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
            taken.append(json.loads(done.stdout))
    answer = Answer(configuration={"batch_size": 256, "peers": PEERS, "samples": samples})
    answer.more["by_place"] = rounds
    small, many, large, both = rounds
    for label, place in (("1,000 peers ÷ 30", many), ("100 × the samples", large), ("both", both)):
        for figure, kind in (("known_us", "shards known"), ("first_us", "shards met the first time")):
            each = tuple(one[figure] / other[figure] for one, other in zip(rounds[place], rounds[small], strict=True))
            now, before = (median(one[figure] for one in rounds[name]) for name in (place, small))
            reach = 2.0 if figure == "known_us" else None
            note = f"{before:.0f} → {now:.0f} µs"
            answer.ratios.append(
                Ratio(f"time to plan a batch, {label}, {kind}: {note}", median(each), reach, "≤", "×", each)
            )
    return answer


def sizes(setting: Setting) -> Answer:
    total = (16 if setting.quick else 256) << 20
    answer = Answer()
    by_size: dict[int, dict[str, Any]] = {}
    for size in SIZES_QUICK if setting.quick else SIZES:
        setting.say(f"samples of {size:,} bytes")
        data = setting.data(count=min(total // size, 1 << 16), sample_bytes=size)
        batch_size = min(max(BATCH_BYTES // size, 4), 1024)
        names = ("quiver", "quiver-bytes", "quiver-rack", "quiver-rack-bytes", "files", "mapped", "sockets")
        told = compare(setting, data, batch_size, [Entry(name) for name in names])
        by_size[size] = {"batch_size": batch_size, "contenders": {n: r.encode() for n, r in told.contenders.items()}}
        answer.absent |= {f"{name}, {size} bytes": reason for name, reason in told.absent.items()}
        for ours, limit in (("quiver", "mapped"), ("quiver-rack", "sockets")):
            if ours in told.contenders and limit in told.contenders:
                speeds = [told.contenders[name].median("bytes_a_second") for name in (ours, limit)]
                note = f"{speeds[0] / 1e9:.2f} of {speeds[1] / 1e9:.2f} GB/s"
                answer.ratios.append(Ratio(f"{size:,} bytes: {ours} ÷ {limit}", speeds[0] / speeds[1], note=note))
    answer.configuration = {"total_bytes": total, "batch_bytes": BATCH_BYTES}
    answer.more["by_size"] = by_size
    return answer


QUESTIONS = (
    Question("plan", "Does planning a batch take as long with 1,000 peers, and with 130 million samples?", plan),
    Question("sizes", "How does throughput depend on the size of a sample, from 1 kB to 4 MB?", sizes),
)

"""Grey failures: what one dead, stopped, stuck or slow daemon of three costs a reader, batch by batch."""

from __future__ import annotations

from statistics import median
from typing import Final

from bench.data import SHARD_BYTES
from bench.grey import BATCH, FAULTS, SETTLE_SECONDS, grey_rack, read, summary
from bench.questions.base import Answer, Question, Ratio, Setting

COUNT: Final = 2_560
FAULT_SECONDS: Final = 8.0
STOP_SECONDS: Final = 30.0
ROUNDS_MAX: Final = 3


def grey(setting: Setting) -> Answer:
    data = setting.data(count=setting.samples or COUNT)
    answer = Answer(configuration={"samples": data.count, "batch_size": BATCH, "shard_bytes": SHARD_BYTES})
    extra = []
    for name, fault in FAULTS.items():
        seconds = STOP_SECONDS if fault == "stop" else FAULT_SECONDS
        if setting.quick:
            seconds = 3.0
        rounds = []
        for at in range(min(setting.rounds, ROUNDS_MAX)):
            setting.say(f"a daemon {name}, round {at + 1}")
            with grey_rack(setting.folder / f"rack-{fault.split()[0]}-{at}", data) as rack:
                rounds.append(summary(read(rack, data, fault, seconds), seconds))
        answer.more[name] = rounds
        extra += [one["extra_share"] for one in rounds]
        each = tuple(one["longest"] for one in rounds)
        healthy, after = (median(one[key] for one in rounds) for key in ("healthy_p99", "longest_after"))
        late = median(one["over_100_ms"] for one in rounds)
        note = f"p99 before {healthy:.1f} ms; {late:.0f} batches over 100 ms; longest after its end {after:.0f} ms"
        reach = None if fault == "pass" else 1000.0
        answer.ratios.append(Ratio(f"longest batch, a daemon {name}", max(each), reach, "≤", " ms", each, note))
        each = tuple(one["settled_p99"] / one["healthy_p99"] for one in rounds)
        title = f"p99 from {SETTLE_SECONDS:.0f} s on ÷ healthy, a daemon {name}"
        answer.ratios.append(Ratio(title, median(each), 2.0, "≤", each=each))
    title = "bytes transferred in vain by hedges ÷ bytes read, the worst of all"
    answer.ratios.append(Ratio(title, max(extra), 0.05, "≤", each=tuple(extra)))
    return answer


QUESTIONS = (Question("grey", "One daemon of three is dead, stopped, stuck or slow: what does a batch see?", grey),)

"""What the tiers deliver to the loop, compared with other systems and with the machine's limit."""

from __future__ import annotations

from statistics import median

from bench.arena import Entry
from bench.questions.base import (
    BATCH,
    SAMPLE_BYTES,
    TOKENS_BATCH,
    Answer,
    Question,
    Ratio,
    Setting,
    compare,
    per_round,
    speed_ratio,
)

HOST = ("quiver", "quiver-bytes", "quiver-socket")
RACK = ("quiver-rack", "quiver-rack-bytes")
ON_DISK = ("webdataset", "litdata", "mds", "files")
ANY_ORDER = (
    "litdata-indexed",
    "mds-indexed",
    "files",
)  # readers whose order can differ from epoch to epoch, as Quiver's does
SERVED = ("memcached", "redis", "nginx")
FIGURES = ("wait_p50_ms", "wait_p99_ms", "utilisation", "bytes_a_second")


def entries(*names: str) -> list[Entry]:
    return [Entry(name) for name in names]


def host(setting: Setting) -> Answer:
    others = entries(*dict.fromkeys(ON_DISK + ANY_ORDER), "mapped", "mapped-verified")
    answer = compare(setting, setting.data(), BATCH, [*entries(*HOST), *others])
    speed_ratio(answer, "host tier ÷ best of formats on disk", HOST, ON_DISK, 5.0)
    speed_ratio(answer, "host tier ÷ best of them in an order of its own every epoch", HOST, ANY_ORDER)
    speed_ratio(answer, "host tier ÷ slices of a mapped file", HOST, ["mapped"], 0.8)
    speed_ratio(answer, "host tier ÷ the same slices, verified by a thread ahead", HOST, ["mapped-verified"])
    speed_ratio(answer, "those verified ÷ not: the most there is", ["mapped-verified"], ["mapped"])
    speed_ratio(answer, "slices of a mapped file ÷ best of formats on disk: the most there is", ["mapped"], ON_DISK)
    return answer


def rack(setting: Setting) -> Answer:
    answer = compare(setting, setting.data(), BATCH, entries(*RACK, *SERVED, "sockets"))
    speed_ratio(answer, "rack tier ÷ best of servers", RACK, SERVED, 4.0)
    speed_ratio(answer, "rack tier ÷ raw sendfile → recv_into", RACK, ["sockets"], 0.85)
    speed_ratio(answer, "raw sendfile → recv_into ÷ best of servers: the most there is", ["sockets"], SERVED)
    return answer


def small(setting: Setting) -> Answer:
    data = setting.data("tokens")
    answer = compare(setting, data, TOKENS_BATCH, entries(*HOST, *RACK, "gather", "mapped", "sockets"))
    speed_ratio(answer, "4 kB, host tier ÷ one numpy gather", HOST, ["gather"], 0.5)
    speed_ratio(answer, "4 kB, host tier ÷ slices of a mapped file", HOST, ["mapped"])
    speed_ratio(answer, "4 kB, rack tier ÷ raw sendfile/writev → recv_into", RACK, ["sockets"], 0.6)
    return answer


def decode(setting: Setting) -> Answer:
    decoded_bytes = {"decoded_bytes": 500 * 375 * 3}
    contenders = [Entry("quiver-decoded", options=decoded_bytes), Entry("files-decoded", options=decoded_bytes)]
    answer = compare(setting, setting.data("jpeg"), 32, contenders)
    speed_ratio(answer, "stock DataLoader, JPEG decode", ["quiver-decoded"], ["files-decoded"], 1.0)
    return answer


def cpu(setting: Setting) -> Answer:
    answer = compare(setting, setting.data(), BATCH, entries(*RACK, "memcached"))
    there = [name for name in RACK if name in answer.contenders]
    if there and "memcached" in answer.contenders:
        best = min(there, key=lambda name: answer.contenders[name].median("cpu_seconds"))
        each = per_round(answer, best, "memcached", lambda done: done.cpu_seconds / done.bytes)
        total = {name: _cpu_per_gb(answer, name) for name in (best, "memcached")}
        # Over all rounds together: the kernel counts CPU in hundredths of a second.
        value = total[best] / total["memcached"]
        answer.ratios.append(Ratio(f"CPU seconds per GB ({best} ÷ memcached)", value, 0.5, "≤", each=each))
        answer.more["cpu_seconds_per_gb"] = total
    return answer


def _cpu_per_gb(answer: Answer, name: str) -> float:
    rounds = answer.contenders[name].rounds
    return sum(one.cpu_seconds for one in rounds) / sum(one.bytes for one in rounds) * 1e9


def verify(setting: Setting) -> Answer:
    tiers = {"host": ("quiver", "quiver-bytes", 5.0), "rack": ("quiver-rack", "quiver-rack-bytes", 3.0)}
    contenders = [
        Entry(peer, f"{peer} {verifying}", {"verify": verifying})
        for views, copies, _ in tiers.values()
        for peer in (views, copies)
        for verifying in ("fast", "off")
    ]
    answer = compare(setting, setting.data(), BATCH, contenders)
    for tier, (views, copies, reach) in tiers.items():
        peer = next((name for name in (views, copies) if f"{name} off" in answer.contenders), None)
        if peer is None or f"{peer} fast" not in answer.contenders:
            continue
        each = per_round(answer, f"{peer} fast", f"{peer} off", lambda done: done.seconds)
        costs = tuple(100 * (ratio - 1) for ratio in each)
        answer.ratios.append(
            Ratio(f"cost of verification, {tier} tier ({peer})", median(costs), reach, "≤", "%", costs)
        )
    return answer


def wait(setting: Setting) -> Answer:
    """Accelerators that consume 1, 2 and 4 GB/s."""
    data = setting.data()
    steps = [BATCH * SAMPLE_BYTES / rate for rate in (1e9, 2e9, 4e9)]
    beside = {"trial_step_seconds": steps[1]}  # fetching ahead helps only if the loop also works
    contenders = [Entry(name, options=beside) for name in (*HOST, *RACK, *ON_DISK, *SERVED)]
    answer = Answer()
    with setting.arena(data, BATCH, contenders) as arena:
        waits: dict[str, dict[str, dict[str, float]]] = {}
        for step in steps:
            setting.say(f"an accelerator with steps of {1000 * step:.1f} ms")
            for result in arena.results.values():
                result.rounds.clear()
            arena.run(setting.rounds, step)
            for name, result in arena.results.items():
                medians = {figure: result.median(figure) for figure in FIGURES}
                waits.setdefault(name, {})[f"{1000 * step:.1f}"] = medians
        answer.take(arena)
    answer.more["by_step_ms"] = waits
    for name, by_step in waits.items():
        middle = by_step[f"{1000 * steps[1]:.1f}"]
        shares = " / ".join(f"{100 * figures['utilisation']:.0f}" for figures in by_step.values())
        note = f"{shares} %; waits p50 {middle['wait_p50_ms']:.1f} ms, p99 {middle['wait_p99_ms']:.1f} ms"
        label = f"accelerator busy, {name}, steps of {' / '.join(by_step)} ms; the middle one:"
        answer.ratios.append(Ratio(label, 100 * middle["utilisation"], unit="%", note=note))
    return answer


QUESTIONS = (
    Question("host", "110 kB samples from this machine: how much faster than formats on local disk, warm?", host),
    Question("rack", "110 kB samples from three daemons over TCP: how much faster than other servers?", rack),
    Question("small", "4 kB samples in batches of 1,024: how close to one numpy gather, and to raw sockets?", small),
    Question("decode", "A stock DataLoader that decodes JPEG in two workers: as fast as from plain files?", decode),
    Question("cpu", "How much CPU does a GB cost, client and daemons together, compared with memcached?", cpu),
    Question("verify", "What does verification of every sample cost?", verify),
    Question("wait", "How long does a training step wait for its batch, and how busy is the accelerator?", wait),
)

"""Plots from the questions' JSON files. A plot whose file is missing is skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

OURS: Final = "tab:blue"
THEIRS: Final = "tab:gray"
LIMIT: Final = "tab:orange"
LIMITS: Final = ("mapped", "gather", "sockets")
Told = dict[str, Any]


def draw(out: Path) -> list[Path]:
    """Draw all plots into ``out``; return their paths."""
    import matplotlib as mpl

    mpl.use("agg")
    drawn = []
    for name, (question, plot) in PLOTS.items():
        told = _read(out, question)
        if told is not None:
            from matplotlib import pyplot

            figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
            plot(told, axes)
            axes.spines[["top", "right"]].set_visible(False)
            figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))  # room for the line below
            figure.text(0.99, 0.01, _where(told), ha="right", fontsize=7, color="gray")
            drawn.append(out / f"{name}.png")
            figure.savefig(drawn[-1], dpi=120)
            pyplot.close(figure)
    return drawn


def _read(out: Path, question: str) -> Told | None:
    path = out / f"{question}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _where(told: Told) -> str:
    facts = told["facts"]
    quick = ", quick: its figures mean nothing" if told["configuration"]["quick"] else ""
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['date'][:10]}, {facts['commit'][:8]}{quick}"


def _colour(name: str) -> str:
    return OURS if name.startswith("quiver") else LIMIT if name in LIMITS else THEIRS


def _throughput(told: Told, axes: Any) -> None:
    speeds = {name: _gb(one) for name, one in told["contenders"].items() if one["rounds"]}
    names = sorted(speeds, key=lambda name: speeds[name])
    axes.barh(names, [speeds[name] for name in names], color=[_colour(name) for name in names])
    for at, name in enumerate(names):
        rounds = [one["bytes_a_second"] / 1e9 for one in told["contenders"][name]["rounds"]]
        axes.plot([min(rounds), max(rounds)], [at, at], color="black", linewidth=1)
        axes.text(0, at + 0.2, f" {speeds[name]:.2f}", va="center", fontsize=8)
    axes.set_xlabel("GB/s to the loop, every byte copied into a tensor (bar: median of rounds, line: all of them)")
    axes.set_title(told["asks"], fontsize=10)


def _gb(contender: Told) -> float:
    return float(contender["median"]["bytes_a_second"]) / 1e9


def _sizes(told: Told, axes: Any) -> None:
    by_name: dict[str, list[tuple[int, float]]] = {}
    for size, one in told["by_size"].items():
        for name, contender in one["contenders"].items():
            by_name.setdefault(name, []).append((int(size), _gb(contender)))
    for name, points in by_name.items():
        style = "--" if name in LIMITS else "-"
        axes.plot(*zip(*sorted(points), strict=True), style, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [int(size) for size in told["by_size"]]
    axes.set_xticks(ticks, [_size(tick) for tick in ticks])
    axes.set_xlabel("bytes of a sample")
    axes.set_ylabel("GB/s to the loop")
    axes.legend(fontsize=8)
    axes.set_title(told["asks"], fontsize=10)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB" if count % 1024 == 0 else f"{count} B"


def _readers(told: Told, axes: Any) -> None:
    counts = [int(count) for count in told["by_readers"]]
    rounds = told["by_readers"].values()
    totals = [median(one["bytes_a_second"] for one in outcomes) / 1e9 for outcomes in rounds]
    axes.bar([str(count) for count in counts], totals, color=OURS)
    for at, outcomes in enumerate(rounds):
        even = median(one["evenness"] for one in outcomes)
        axes.text(at, totals[at], f"slowest ÷ fastest {even:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set_xlabel("reader processes")
    axes.set_ylabel("GB/s, all together")
    axes.set_title(told["asks"], fontsize=10)


def _waits(told: Told, axes: Any) -> None:
    steps = list(next(iter(told["by_step_ms"].values())))
    names = sorted(told["by_step_ms"], key=lambda name: told["by_step_ms"][name][steps[0]]["wait_p99_ms"])
    width = 0.8 / len(steps)
    for at, step in enumerate(steps):
        figures = [told["by_step_ms"][name][step] for name in names]
        places = [place + at * width for place in range(len(names))]
        low, high = [one["wait_p50_ms"] for one in figures], [one["wait_p99_ms"] for one in figures]
        axes.bar(places, high, width, alpha=0.4, color=f"C{at}", label=f"p99, {step} ms a step")
        axes.bar(places, low, width, color=f"C{at}", label=f"p50, {step} ms a step")
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names, rotation=30, ha="right")
    axes.set_yscale("log")
    axes.set_ylabel("wait for a batch, ms")
    axes.legend(fontsize=7)
    axes.set_title(told["asks"], fontsize=10)


PLOTS: Final[dict[str, tuple[str, Callable[[Told, Any], None]]]] = {
    "throughput-host": ("host", _throughput),
    "throughput-rack": ("rack", _throughput),
    "throughput-small": ("small", _throughput),
    "sizes": ("sizes", _sizes),
    "readers": ("readers", _readers),
    "waits": ("wait", _waits),
}

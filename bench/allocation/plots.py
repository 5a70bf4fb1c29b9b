"""Two plots from ``allocation.json``: what each job reached of what was predicted, and how a run went over time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

COLOURS: Final = {"none": "tab:gray", "max-min": "tab:blue", "throughput": "tab:orange"}
Told = dict[str, Any]


def draw(out: Path) -> list[Path]:
    """Draw what there is; return the paths."""
    import matplotlib as mpl

    mpl.use("agg")
    rows = json.loads((out / "allocation.json").read_text())["rows"]
    quick = any(row["configuration"]["quick"] for row in rows)
    drawn = [_reached(rows, out / "allocation.png", quick=quick)] if rows else []
    cases = {row["case"] for row in rows}
    drawn += [_series(rows, case, out / f"allocation-{case}.png") for case in sorted(cases) if case.startswith("disj")]
    return drawn


def _reached(rows: list[Told], path: Path, *, quick: bool) -> Path:
    """Bars: the share of its f* that each job reached; lines: an equal split and what the policy predicts."""
    from matplotlib import pyplot

    names = [(case, job) for case in dict.fromkeys(row["case"] for row in rows) for job in _row(rows, case)["need"]]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.32 * len(names)), layout="constrained")
    policies = [it for it in COLOURS if any(row["policy"] == it for row in rows)]
    height = 0.8 / max(len(policies), 1)
    for turn, policy in enumerate(policies):
        for at, (case, job) in enumerate(names):
            row = _row(rows, case, policy)
            if row is None:
                continue
            need, place = row["need"][job], at + (turn - (len(policies) - 1) / 2) * height
            axes.barh(place, row["measured"][job] / need, height, color=COLOURS[policy], label=policy)
            if row["predicted"]:
                told = row["predicted"][job] / need
                axes.plot([told, told], [place - height / 2, place + height / 2], color="black", label="predicted")
    for at, (case, job) in enumerate(names):
        row = _row(rows, case)
        even = row["equal_split"][job] / row["need"][job]
        axes.plot([even, even], [at - 0.45, at + 0.45], ":", color="tab:red", label="equal split")
    axes.set_yticks(range(len(names)), [f"{case}: {job}" for case, job in names], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("samples per second ÷ those of a loop that never waits" + (" (quick: means nothing)" * quick))
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=8, loc="lower left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _series(rows: list[Told], case: str, path: Path) -> Path:
    """Over one run for each policy: each job's samples per second, and what is resident of each dataset."""
    from matplotlib import pyplot

    its = [row for row in rows if row["case"] == case]
    figure, panels = pyplot.subplots(2, len(its), figsize=(5 * len(its), 5), layout="constrained", squeeze=False)
    for column, row in enumerate(its):
        series = row["each"][0]["series"]
        at = series["seconds"]["at"]
        for panel, what in ((panels[0][column], "samples_per_second"), (panels[1][column], "resident")):
            for name, values in series[what].items():
                panel.plot(at, values, label=name)
            panel.set_ylim(bottom=0)
            panel.legend(fontsize=8)
        panels[0][column].set_title(f"{case}, {row['policy']}", fontsize=9)
        panels[1][column].set_xlabel("seconds")
    panels[0][0].set_ylabel("samples per second")
    panels[1][0].set_ylabel("share resident")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _row(rows: list[Told], case: str, policy: str = "") -> Any:
    return next((it for it in rows if it["case"] == case and policy in {"", it["policy"]}), None)
